"""A process that renders chat templates: `python chat_worker.py SECONDS`. It imports nothing but Jinja.

A template comes with a model's folder. It can loop without end or build a text of gigabytes, and a thread that does so
cannot be ended. Here the kernel ends it: by an alarm and by a limit of memory.

Input: lines of JSON, first {"template", "variables"}, then {"messages"} each time. Output: one line of JSON for each
of the latter, {"text"} or {"error"}.
"""

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 30
"""Bytes of address space."""
MAX_TEXT = 1 << 22
"""Characters of a rendered chat."""


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


def render(template: str, variables: dict[str, str], messages: list[dict[str, str]]) -> str:
    """The text of a chat, up to the model's turn."""
    parts, length = [], 0
    for part in _compile(template).generate(
        messages=messages, tools=None, documents=None, add_generation_prompt=True, **variables
    ):
        parts.append(part)
        length += len(part)
        if length > MAX_TEXT:
            raise ValueError(f"it writes more than {MAX_TEXT} characters")
    return "".join(parts)


def main() -> None:
    seconds = float(sys.argv[1])
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    first = json.loads(sys.stdin.readline())
    for line in sys.stdin:
        # The default action of this signal ends the process, also inside a long operation of C code.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            answer = {"text": render(first["template"], first["variables"], json.loads(line)["messages"])}
        except Exception as error:  # templates raise errors of many kinds
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
