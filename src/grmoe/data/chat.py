"""From conversations to tokens, with the loss on what the assistant says.

The tokenizer's chat template turns a conversation into text. A template is a program of Jinja that came with the
tokenizer. It runs in a process of its own and in the sandbox of transformers, where it reaches neither files nor
attributes of Python objects.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from grmoe.chat_worker import MAX_TEXT
from grmoe.data.conversations import ASSISTANT
from grmoe.data.rendering import Renderer
from grmoe.data.shards import context_bit
from grmoe.data.sources import optional

# For a tokenizer without a template. It needs no token beside the one that ends a text, which ends every answer.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n\\n' }}{% endif %}{{ message['role'] + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{% if messages %}{{ '\\n\\n' }}{% endif %}{{ 'assistant:' }}{% endif %}"
)
_LONGEST = 2**20  # characters of a rendered conversation
NO_ANSWER, SPECIAL, TEMPLATE, LONG = (
    "no answer of the assistant",
    "a message spells a special token",
    "the chat template refuses it",
    "too long",
)


class ChatEncoder:
    """Turns conversations into tokens. Tokens that the assistant does not say carry the context bit.

    What the assistant says, its end included, is what an answer adds to the template's prompt for one.
    """

    def __init__(self, folder: Path, end_of_text: int, dtype: np.dtype[np.unsignedinteger]) -> None:
        self.tokenizer = optional("transformers").PreTrainedTokenizerFast.from_pretrained(folder)
        self.end_of_text, self.dtype = end_of_text, dtype
        added = self.tokenizer.added_tokens_decoder.values()
        self.special = {token.content for token in added if token.special}
        self.renderer = Renderer(self.tokenizer.get_chat_template(), self.tokenizer.special_tokens_map)

    def batch(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger] | str]:
        """The tokens of each conversation, or why it has none: a reason, or "reason: detail"."""
        return [self.encode(json.loads(text)) for text in texts]

    def encode(self, messages: list[dict[str, str]]) -> NDArray[np.unsignedinteger] | str:
        if not any(message["role"] == ASSISTANT for message in messages):
            return NO_ANSWER
        said = [text for message in messages for text in message.values()]
        if any(token in text for text in said for token in self.special):
            return SPECIAL  # it would end an answer, or begin a message
        if sum(map(len, said)) > MAX_TEXT:
            return LONG
        found = self.renderer.render(messages, ASSISTANT)
        if "error" in found:
            return f"{TEMPLATE}: {' '.join(found['error'].split()):.80}"
        text = found["text"]
        if len(text) > _LONGEST:
            return LONG
        encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int64)
        starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        spoken = np.zeros(len(ids), dtype=bool)
        for first, stop in found["spans"]:
            spoken |= (starts >= first) & (starts < stop)
        if not len(ids) or ids[-1] != self.end_of_text:
            ids = np.append(ids, self.end_of_text)
            spoken = np.append(spoken, messages[-1]["role"] == ASSISTANT)
        return np.where(spoken, ids, ids + context_bit(self.dtype)).astype(self.dtype)
