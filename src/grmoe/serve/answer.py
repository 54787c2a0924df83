"""Sends the answers of one request to its client: whole, or piece by piece as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from grmoe.serve.engine import Event, Failed, Finished, Job, Piece
from grmoe.serve.errors import error_body, to_json
from grmoe.serve.requests import Request
from grmoe.serve.scores import Score, ScoreWriter, TokenTexts

_GONE = Failed(499, "the client is gone")


@dataclass
class _Choice:
    """One answer, as far as it has arrived."""

    writer: ScoreWriter
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    reason: str = ""

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.scores += piece.scores


def _error(event: Failed) -> bytes:
    return to_json(error_body(event.message, event.status))


def one_alpha(alphas: Iterable[float]) -> float | None:
    """The α of all layers; None where they differ. A request names one number, so a client never gets a list."""
    found = set(alphas)
    return found.pop() if len(found) == 1 else None


@dataclass(kw_only=True)
class Answer:
    """An ASGI response fed by events. The engine sends them; a client that leaves and a timeout are events too."""

    jobs: list[Job]
    """One per choice, in the order of their index."""
    events: asyncio.Queue[tuple[int, Event]]
    """(index of the choice, event)."""
    request: Request
    chat: bool
    head: dict[str, Any]
    """id, created and model, the same in every chunk."""
    texts: TokenTexts
    timeout: float
    """Seconds for the whole request."""
    arrived: float
    """When the request had arrived, by the event loop's clock."""
    cancel: Callable[[list[Job]], None]
    done: Callable[[int, str], None]
    """Called at the end with status and outcome, for the log."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        late = Failed(504, f"the answer took more than {self.timeout:g} s")
        timer = loop.call_at(self.arrived + self.timeout, self.events.put_nowait, (0, late))
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
            self.cancel(self.jobs)
            self.done(status, outcome)

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.events.put_nowait((0, _GONE))

    async def _arriving(self) -> AsyncIterator[tuple[int, Event]]:
        """(index, event) until every choice has finished or the request failed. Its failure is the last event."""
        left = len(self.jobs)
        while left:
            index, event = await self.events.get()
            if event is _GONE:
                raise ConnectionError(_GONE.message)
            yield index, event
            if isinstance(event, Failed):
                return
            left -= isinstance(event, Finished)

    async def _whole(self, send: Send) -> tuple[int, str]:
        choices, status, outcome, body = self._choices(), 200, "", b""
        async for index, event in self._arriving():
            if isinstance(event, Failed):
                status, outcome, body = event.status, "failed", _error(event)
            elif isinstance(event, Finished):
                choices[index].reason = event.reason
            else:
                choices[index].add(event)
        if not body:
            # In a thread, because a million scores take a while to write.
            body = await asyncio.to_thread(self._whole_body, choices)
            outcome = choices[0].reason
        await self._start(send, status, b"application/json", (b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.body", "body": body})
        return status, outcome

    def _whole_body(self, choices: list[_Choice]) -> bytes:
        found = []
        for index, choice in enumerate(choices):
            text = choice.text
            content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            found.append(self._choice(index, choice, content, choice.reason, choice.tokens, choice.scores))
        kind = "chat.completion" if self.chat else "text_completion"
        return to_json({**self.head, "object": kind, "choices": found, "usage": self._usage()})

    async def _stream(self, send: Send) -> tuple[int, str]:
        choices, outcome = self._choices(), ""
        await self._start(send, 200, b"text/event-stream")
        if self.chat:
            begin = {"delta": {"role": "assistant", "content": ""}}
            for index, choice in enumerate(choices):
                await self._chunk(send, [self._choice(index, choice, begin, None)])
        async for index, event in self._arriving():
            if isinstance(event, Failed):
                outcome = "failed"
                await self._event(send, _error(event))
            elif isinstance(event, Finished):
                outcome = outcome or event.reason
                last: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
                await self._chunk(send, [self._choice(index, choices[index], last, event.reason)])
            elif event.text or event.scores or self.request.return_token_ids:
                delta = {"delta": {"content": event.text}} if self.chat else {"text": event.text}
                new = self._choice(index, choices[index], delta, None, event.tokens, event.scores)
                await self._chunk(send, [new])
        if outcome != "failed":
            if self.request.wants_usage:
                await self._chunk(send, [], usage=self._usage())
            await self._event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b""})
        return 200, outcome

    def _choices(self) -> list[_Choice]:
        return [_Choice(ScoreWriter(self.texts, self.chat)) for _ in self.jobs]

    def _choice(
        self,
        index: int,
        choice: _Choice,
        content: dict[str, Any],
        reason: str | None,
        tokens: list[int] | None = None,
        scores: list[Score] | None = None,
    ) -> dict[str, Any]:
        asked = self.request.alternatives is not None
        logprobs = choice.writer.add(scores) if asked and scores is not None else None
        found = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        return found | {"token_ids": tokens or []} if self.request.return_token_ids else found

    def _usage(self) -> dict[str, Any]:
        sequences = [job.sequence for job in self.jobs]
        # A prompt counts once, however many answers it has.
        prompt = sum(len(s.prompt) for s in sequences[:: self.request.n or 1])
        answer, routed = sum(len(s.tokens) for s in sequences), sum(s.length for s in sequences)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "alpha": one_alpha(sequences[0].alphas),
            "budget": sequences[0].budget,
            "experts_per_token": round(sum(s.experts for s in sequences) / routed, 4) if routed else None,
        }

    async def _start(self, send: Send, status: int, kind: bytes, *more: tuple[bytes, bytes]) -> None:
        headers = [(b"content-type", kind), (b"cache-control", b"no-cache"), *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _chunk(self, send: Send, choices: list[dict[str, Any]], **more: Any) -> None:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        await self._event(send, to_json({**self.head, "object": kind, "choices": choices, **more}))

    async def _event(self, send: Send, data: bytes) -> None:
        body = b"data: " + data + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})
