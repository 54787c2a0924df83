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
    """What the model is and what the dial found. Of several models, in one paragraph each, only the latter."""
    if len(runs) == 1:
        paragraphs = [runs[0].story, runs[0].found]
        return "\n".join(f"<p>{html.escape(' '.join(part))}</p>" for part in paragraphs if part)
    return "\n".join(
        f"<p><b>{html.escape(run.name)}.</b> {html.escape(' '.join(run.found or run.story))}</p>"
        for run in runs
    )


def _next(runs: Sequence[Content]) -> str:
    """The commands of each model. The script adds buttons to copy them, and shows those of the chosen model."""
    lists = []
    for run in runs:
        items = "\n".join(
            f"<li><span>{html.escape(step.text)}</span><code>{_command(step.command)}</code></li>"
            for step in run.next
        )
        lists.append(f'<ul class="next">\n{items}\n</ul>' if items else "<p>Its model cannot be opened.</p>")
    return "\n".join(lists)


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
