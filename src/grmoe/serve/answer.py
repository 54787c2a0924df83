"""Sends one answer to its client: whole, or piece by piece as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from grmoe.serve.engine import Event, Failed, Finished, Job, Piece
from grmoe.serve.requests import Request

_GONE = Failed(499, "the client is gone")


def to_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(kw_only=True)
class Answer:
    """An ASGI response fed by events. The engine sends them; a client that leaves and a timeout are events too."""

    job: Job
    events: asyncio.Queue[Event]
    request: Request
    chat: bool
    head: dict[str, Any]
    """id, created and model, the same in every chunk."""
    timeout: float
    cancel: Callable[[Job], None]
    done: Callable[[int, str], None]
    """Called at the end with status and outcome, for the log."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        late = Failed(504, f"the answer took more than {self.timeout:g} s")
        timer = asyncio.get_running_loop().call_later(self.timeout, self.events.put_nowait, late)
        gone = asyncio.create_task(self._wait_for_disconnect(receive))
        status, outcome = 499, "gone"
        try:
            # The timer ends the answer. This longer limit ends one that its client does not read.
            async with asyncio.timeout(2 * self.timeout):
                send_all = self._stream if self.request.stream else self._whole
                status, outcome = await send_all(send)
        except (OSError, TimeoutError):  # the client is gone
            pass
        finally:
            timer.cancel()
            gone.cancel()
            self.cancel(self.job)
            self.done(status, outcome)

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.events.put_nowait(_GONE)

    async def _whole(self, send: Send) -> tuple[int, str]:
        text, tokens = "", []
        while isinstance(event := await self.events.get(), Piece):
            text += event.text
            tokens += event.tokens
        if event is _GONE:
            return 499, "gone"
        if isinstance(event, Failed):
            status, outcome, body = event.status, "failed", error_body(event.message, event.status)
        else:
            status, outcome = 200, event.reason
            content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choice = self._choice(content, event.reason, tokens)
            kind = "chat.completion" if self.chat else "text_completion"
            body = {**self.head, "object": kind, "choices": [choice], "usage": self._usage()}
        await self._start(send, status, b"application/json")
        await send({"type": "http.response.body", "body": to_json(body)})
        return status, outcome

    async def _stream(self, send: Send) -> tuple[int, str]:
        await self._start(send, 200, b"text/event-stream")
        if self.chat:
            await self._chunk(send, [self._choice({"delta": {"role": "assistant", "content": ""}}, None, [])])
        while isinstance(event := await self.events.get(), Piece):
            if event.text or self.request.return_token_ids:
                await self._chunk(send, [self._choice(self._delta(event.text), None, event.tokens)])
        if event is _GONE:
            return 499, "gone"
        if isinstance(event, Finished):
            last: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
            await self._chunk(send, [self._choice(last, event.reason, [])])
            if self.request.wants_usage:
                await self._chunk(send, [], usage=self._usage())
            await self._event(send, b"[DONE]")
            outcome: str = event.reason
        else:
            await self._event(send, to_json(error_body(event.message, event.status)))
            outcome = "failed"
        await send({"type": "http.response.body", "body": b""})
        return 200, outcome

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self.chat else {"text": text}

    def _choice(self, content: dict[str, Any], reason: str | None, tokens: list[int]) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        return choice | {"token_ids": tokens} if self.request.return_token_ids else choice

    def _usage(self) -> dict[str, Any]:
        sequence = self.job.sequence
        prompt, answer, experts = len(sequence.prompt), len(sequence.tokens), sequence.experts_per_token
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "alpha": sequence.alphas[0] if len(set(sequence.alphas)) == 1 else sequence.alphas,
            "budget": sequence.budget,
            "experts_per_token": None if experts is None else round(experts, 4),
        }

    async def _start(self, send: Send, status: int, kind: bytes) -> None:
        headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _chunk(self, send: Send, choices: list[dict[str, Any]], **more: Any) -> None:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        await self._event(send, to_json({**self.head, "object": kind, "choices": choices, **more}))

    async def _event(self, send: Send, data: bytes) -> None:
        body = b"data: " + data + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})
