"""From the messages of a chat to the text of a prompt, by the template of the model's folder.

The template runs in a process of its own (`grmoe.chat_worker`), because it may never end.
"""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import Process
from contextlib import suppress
from typing import Any

from grmoe.chat_worker import launch
from grmoe.serve.errors import Invalid

_MAX_LINE = 1 << 26  # bytes: MAX_TEXT of the worker as JSON


class ChatTemplate:
    """Renders chats one after another. A template that takes too long costs its process, and the next chat a new one.

    timeout: seconds per chat, with the time it waits for others. seconds: the most that the template may take of them.
    """

    def __init__(
        self, template: str, variables: dict[str, str], timeout: float, seconds: float = 5.0
    ) -> None:
        self.setup = {"template": template, "variables": variables}
        self.timeout, self.seconds = timeout, min(timeout, seconds)
        self.process: Process | None = None
        self.closed = False
        self._ended: list[Process] = []  # killed, not yet waited for
        self._turn = asyncio.Lock()

    async def render(self, messages: list[dict[str, str]]) -> str:
        """The prompt of a chat. Raises `Invalid`."""
        try:
            async with asyncio.timeout(self.timeout), self._turn:
                answer = await self._ask(messages)
        except TimeoutError as error:
            raise Invalid(f"the chat waited more than {self.timeout:g} s", status=504) from error
        if self.closed:
            raise Invalid("the server is shutting down", status=503)
        if answer is None:
            message = f"the chat template took more than {self.seconds:g} s or too much memory"
            raise Invalid(message, "messages")
        if "error" in answer:
            raise Invalid(f"messages do not fit the chat template: {answer['error']}", "messages")
        text: str = answer["text"]
        return text

    async def _ask(self, messages: list[dict[str, str]]) -> dict[str, Any] | None:
        """What the process answers; None if it ended."""
        line = b""
        try:
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({"messages": messages}).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError, ValueError):  # it ended, or its line does not
            pass
        finally:
            if not line.endswith(b"\n"):
                self.end()  # also if we are cancelled: its answer must not be taken for the next chat's
        found: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
        return found

    async def _running(self) -> Process:
        if self.process is None:
            await self._reap()
            command, options = launch(self.seconds)
            self.process = await asyncio.create_subprocess_exec(*command, limit=_MAX_LINE, **options)
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(self.setup).encode() + b"\n")
        return self.process

    def end(self) -> None:
        """End the process. A chat that is being rendered gets an error."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()
            self._ended.append(self.process)
            self.process = None

    async def _reap(self) -> None:
        while self._ended:
            await self._ended.pop().wait()

    async def close(self) -> None:
        """End the process for good, and wait for it."""
        self.closed = True
        self.end()
        await self._reap()
