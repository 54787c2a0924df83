"""A process that renders chat templates: `python chat_worker.py SECONDS`. It imports nothing but Jinja.

A template comes with a model's folder. It can loop without end or build a text of gigabytes, and a thread that does so
cannot be ended. Here the kernel ends it: by an alarm for each text and by a limit of memory.

Input: lines of JSON, first {"template", "variables"}, then one line per chat. Output: one line of JSON per chat.
{"messages"} asks for the prompt: {"text"}. {"messages", "role"} asks for the whole chat and for the places where this
role speaks: {"text", "spans"}. Whatever the template raises is {"error"}.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import cache
from subprocess import PIPE
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 30
"""Bytes of address space."""
MAX_TEXT = 1 << 22
"""Characters of a rendered chat."""


def launch(seconds: float) -> tuple[list[str], dict[str, Any]]:
    """(command, options) to start this process, for `subprocess` and for `asyncio`. seconds: the most per text."""
    # -P: the modules beside this file must not stand for others of the same name.
    command = [sys.executable, "-P", os.path.abspath(__file__), str(seconds)]
    variables = {name: value for name, value in os.environ.items() if name != "GRMOE_API_KEY"}
    return command, {"stdin": PIPE, "stdout": PIPE, "env": variables, "start_new_session": True}


class Generation(jinja2.ext.Extension):
    """The tag {% generation %} marks the model's part for training. Here it shows what it holds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def environment() -> ImmutableSandboxedEnvironment:
    """The sandbox in which transformers renders chat templates."""
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    found.filters["tojson"] = _tojson
    found.globals["raise_exception"] = _raise_exception
    found.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return found


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


@cache
def _compile(template: str) -> jinja2.Template:
    return environment().from_string(template)


def render(
    template: str, variables: dict[str, str], messages: list[dict[str, str]], prompt: bool = True
) -> str:
    """The text of a chat. prompt: with the words that begin the model's turn."""
    parts, length = [], 0
    for part in _compile(template).generate(
        messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **variables
    ):
        parts.append(part)
        length += len(part)
        if length > MAX_TEXT:
            raise ValueError(f"it writes more than {MAX_TEXT} characters")
    return "".join(parts)


def find_spans(
    text_of: Callable[[list[dict[str, str]], bool], str], messages: list[dict[str, str]], role: str
) -> tuple[str, list[tuple[int, int]]]:
    """(a chat as text, where `role` speaks in it): what each of its messages adds to the prompt for it."""
    whole = text_of(messages, False)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] == role:
            prompt, answered = text_of(messages[:number], True), text_of(messages[: number + 1], False)
            if not (whole.startswith(answered) and answered.startswith(prompt)):
                raise ValueError("the template changes earlier messages")
            spans.append((len(prompt), len(answered)))
    return whole, spans


def _set_alarm(seconds: float) -> None:
    """The default action of this signal ends the process, also inside a long operation of C code."""
    if hasattr(signal, "setitimer"):  # Windows has none
        signal.setitimer(signal.ITIMER_REAL, seconds)


def main() -> None:
    seconds = float(sys.argv[1])
    with suppress(ImportError, ValueError, OSError):  # Windows has no such module, macOS no such limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    first = json.loads(sys.stdin.readline())

    def text_of(messages: list[dict[str, str]], prompt: bool) -> str:
        _set_alarm(seconds)
        return render(first["template"], first["variables"], messages, prompt)

    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any]
        try:
            if "role" in asked:
                answer = dict(zip(("text", "spans"), find_spans(text_of, **asked), strict=True))
            else:
                answer = {"text": text_of(asked["messages"], True)}
        except Exception as error:  # templates raise errors of many kinds
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        _set_alarm(0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
