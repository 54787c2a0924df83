"""The page as one file: markup, style, scripts and data. It loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files

import grmoe
from grmoe.report.content import Content

_SCRIPTS = (
    "math.js", "draw.js", "plot.js", "budget.js", "slider.js", "writing.js", "summary.js", "frontier.js", "controls.js",
    "layers.js", "types.js", "text.js", "main.js",
)  # fmt: skip


def render(runs: Sequence[Content]) -> str:
    """Data is embedded as JSON with `<` escaped. The page's policy allows only its own script, by hash."""
    folder = files("grmoe.report")
    script = "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n{script}'
    names = " · ".join(run.name for run in runs)
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = {
        "policy": f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{_hash(script)}'",
        "title": html.escape(f"{names} – grmoe report"),
        "heading": html.escape(names),
        "style": folder.joinpath("page.css").read_text(encoding="utf-8"),
        "story": _story(runs),
        "next": _next(runs),
        "footer": f"grmoe {grmoe.__version__}, {made}. This page contains all its data and loads nothing.",
        "data": as_json({"runs": [run.as_json() for run in runs]}),
        "script": script,
    }
    # In one pass, so that a placeholder inside the data stays as it is.
    page = folder.joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


def _story(runs: Sequence[Content]) -> str:
    """The paragraphs of each model, with its name where there are several."""
    parts = []
    for run in runs:
        name = f"<b>{html.escape(run.name)}.</b> " if len(runs) > 1 else ""
        paragraphs = [html.escape(" ".join(part)) for part in (run.story, run.found) if part]
        parts += [f"<p>{name}{text}</p>" for text in ([" ".join(paragraphs)] if name else paragraphs)]
    return "\n".join(parts)


def _next(runs: Sequence[Content]) -> str:
    """The commands, the first two of each model where there are several. The script adds buttons to copy them."""
    parts = []
    for run in runs:
        steps = run.next if len(runs) == 1 else run.next[:2]
        items = "\n".join(
            f"<li><span>{html.escape(step.text)}</span><code>{_command(step.command)}</code></li>"
            for step in steps
        )
        name = f"<h3>{html.escape(run.name)}</h3>\n" if len(runs) > 1 else ""
        if items:
            parts.append(f'{name}<ul class="next">\n{items}\n</ul>')
    return "\n".join(parts) or "<p>Nothing can be done with this folder: its model cannot be opened.</p>"


def _command(command: str) -> str:
    """A line breaks before an option, not inside it."""
    return re.sub(r"(?<= )--[\w-]+", r'<span class="option">\g<0></span>', html.escape(command))


def as_json(data: object) -> str:
    """JSON that is safe inside a script element, whatever its strings hold."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    # A token may cut a character in two: half a surrogate pair has no UTF-8.
    return re.sub("[\ud800-\udfff]", "�", text)


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
