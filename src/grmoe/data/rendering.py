"""Conversations through a chat template, in a process of its own (`grmoe.chat_worker`), because it may never end."""

from __future__ import annotations

import json
import signal
import subprocess
import weakref
from typing import Any

from grmoe.chat_worker import launch

SECONDS = 10.0
"""Most that a template may take for one text. Usual ones take a thousandth of a second."""


class Renderer:
    """Renders conversations one after another, all in one process, which starts with the first of them."""

    def __init__(self, template: str, variables: dict[str, str], seconds: float = SECONDS) -> None:
        self.setup = {"template": template, "variables": variables}
        self.seconds = seconds
        self.process: subprocess.Popen[bytes] | None = None

    def render(self, messages: list[dict[str, str]], role: str) -> dict[str, Any]:
        """{"text", "spans"}: the conversation as text and where `role` speaks in it; or {"error"}.

        Raises a `ValueError` if the template does not end. Skipping the conversation instead would make the result
        depend on the speed of the machine.
        """
        line = b""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process, {"messages": messages, "role": role})
            line = process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line.endswith(b"\n"):
            self.process = None
            status = process.wait()
            late = status == -getattr(signal, "SIGALRM", 0)
            why = f"took more than {self.seconds:g} s" if late else f"ended its process (status {status})"
            begin = messages[0]["content"]
            raise ValueError(
                f"the tokenizer's chat template {why} for the conversation that begins {begin!r:.60}; "
                "give a tokenizer with another template"
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            command, options = launch(self.seconds)
            self.process = subprocess.Popen(command, **options)
            weakref.finalize(self, _end, self.process)
            _write(self.process, self.setup)
        return self.process


def _write(process: subprocess.Popen[bytes], line: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(line).encode() + b"\n")
    process.stdin.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()  # closes the pipes and waits
