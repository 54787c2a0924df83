"""Conversations: lists of messages, `{"role": "user", "content": "Hello"}`."""

from __future__ import annotations

import json
from typing import Any

ASSISTANT = "assistant"


def conversation_text(value: Any) -> str | None:
    """A conversation as JSON; None if `value` is not a list of messages with a role and a text.

    The content may also be a list of parts, `{"type": "text", "text": …}`.
    """
    if not isinstance(value, list) or not value:
        return None
    messages = []
    for message in value:
        if not isinstance(message, dict):
            return None
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list):
            parts = [p.get("text") for p in content if isinstance(p, dict) and p.get("type") == "text"]
            texts = [part for part in parts if isinstance(part, str)]
            content = "".join(texts) if len(texts) == len(content) else None
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        messages.append({"role": role, "content": content})
    return json.dumps(messages, ensure_ascii=False)


def spoken_text(conversation: str) -> str:
    """What is said in a conversation: text to train a tokenizer on."""
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in json.loads(conversation))
