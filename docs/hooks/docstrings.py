"""A griffe extension: lines `name, other: text` of a docstring become a list in the Python API."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)", re.DOTALL)


class ListedArguments(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    """The docstring, with each paragraph that describes arguments as a list."""
    return "\n\n".join(_paragraph(p) for p in text.split("\n\n"))


def _paragraph(text: str) -> str:
    """A list if every entry of the paragraph begins with names and a colon, else the paragraph itself."""
    entries: list[str] = []
    for line in text.splitlines():
        if _ENTRY.match(line):
            entries.append(line)
        elif entries:
            entries[-1] += " " + line.strip()
        else:
            return text
    if not entries or text.startswith("    "):
        return text
    found = [_ENTRY.match(entry) for entry in entries]
    return "\n".join(f"- `{m[1]}`: {' '.join(m[2].split())}" for m in found if m)
