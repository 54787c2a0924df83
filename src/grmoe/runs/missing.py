"""Why a path is no model. A wrong path is the most common mistake, so the message names what is there instead."""

from __future__ import annotations

import contextlib
from pathlib import Path
from shlex import quote

from grmoe.data.shards import INDEX
from grmoe.data.sources import kind_of
from grmoe.runs.folder import CONFIG
from grmoe.runs.meta import META

_NAMED = 5  # folders that a message lists


def not_a_model(path: Path) -> str:
    """The message about a path that is neither a run nor an exported model."""
    if (path / META).is_file():
        run = path.resolve().parent.parent
        return f"{path} is a checkpoint, not a model; give the folder of its run: {quote(str(run))}"
    if (path / INDEX).is_file():
        train = f"grmoe train data.path={quote(str(path))}"
        return f"{path} holds prepared text, not a model; train one: {train}"
    refused = f"{path} is neither a run of `grmoe train` nor an exported model"
    if not path.exists():
        return f"{refused}: there is no such folder"
    prepare = f"; to train on its text, first: grmoe prepare {quote(str(path))}"
    if not path.is_dir():
        return f"{refused}: it is a file{prepare if kind_of(path) else ''}"
    inside: list[str] = []
    texts = False
    with contextlib.suppress(OSError):  # what cannot be listed is not named
        entries = sorted(path.iterdir())
        inside = [str(folder) for folder in entries if _is_model(folder)]
        # What is left of a run may have its log.
        texts = any(kind_of(e) and e.is_file() and e.name != "log.jsonl" for e in entries)
    more = f" and {len(inside) - _NAMED} more" if len(inside) > _NAMED else ""
    if inside:
        return f"{refused}; it holds {', '.join(inside[:_NAMED])}{more}"
    return f"{refused}{prepare if texts else ''}"


def _is_model(folder: Path) -> bool:
    """Whether a folder looks like a run or an exported model."""
    return (folder / CONFIG).is_file() or (folder / "config.json").is_file()
