"""The journal of a preparation: what is finished, so that an interrupted preparation can continue.

`journal.jsonl` exists while a preparation is unfinished. Its first line is the recipe, the second the tokenizer. Each
further line is a finished range: its shards, and the position in the sources where the next range starts. A line is
written after the files it names, so files without a line are ignored. An incomplete last line is ignored, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import IO, Any

from grmoe.checks import require
from grmoe.data.shards import INDEX
from grmoe.data.splitting import sequence_length_of
from grmoe.files import PARTIAL, write_file

JOURNAL = "journal.jsonl"


class Journal:
    def __init__(self, folder: Path, recipe: dict[str, Any], overwrite: bool) -> None:
        """Open the journal of `folder`, or start one. `overwrite` always starts one."""
        self.path = folder / JOURNAL
        if overwrite and self.path.exists():
            _lock(self.path).close()  # raises if another process is preparing this folder
        if overwrite or not self.path.exists():
            write_file(self.path, _line({"recipe": recipe}))
        self.file = _lock(self.path)
        lines, valid = _read(self.path)
        self.file.truncate(valid)
        self.recipe: dict[str, Any] = lines[0]["recipe"]
        self.tokenizer: dict[str, Any] | None = lines[1]["tokenizer"] if len(lines) > 1 else None
        self.ranges: list[dict[str, Any]] = lines[2:]

    def record_tokenizer(self, tokenizer: dict[str, Any]) -> None:
        self._append({"tokenizer": tokenizer})
        self.tokenizer = tokenizer

    def record_range(self, record: dict[str, Any]) -> None:
        self._append(record)
        self.ranges.append(record)

    def _append(self, content: dict[str, Any]) -> None:
        try:
            self.file.write(_line(content))
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise OSError(f"cannot write {self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `_append` has already raised
            self.file.close()

    def remove(self) -> None:
        self.path.unlink()
        self.close()


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(complete lines, their length in bytes)."""
    raw = path.read_bytes()
    valid = raw.rfind(b"\n") + 1
    try:
        lines = [json.loads(line) for line in raw[:valid].splitlines()]
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); start again with --overwrite") from error
    if not lines:
        raise ValueError(f"{path} is empty; delete the folder and start again")
    return lines, valid


def _lock(path: Path) -> IO[bytes]:
    """Open for appending, and lock the folder for this process until it ends."""
    file = open(path, "ab", buffering=0)  # noqa: SIM115  lives as long as the journal
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(f"{path.parent} is being prepared by another process") from None
    return file


def recipe_of(folder: Path) -> dict[str, Any] | None:
    """The recipe of `folder`, finished or not; None if it is empty. Raises if it holds something else."""
    if (folder / JOURNAL).exists():
        recipe: dict[str, Any] = _read(folder / JOURNAL)[0][0]["recipe"]
        return recipe
    if (folder / INDEX).exists():
        try:
            recipe = json.loads((folder / INDEX).read_text())["recipe"]
            known = isinstance(recipe, dict)
        except (ValueError, KeyError, TypeError, RecursionError):
            known = False
        if not known:
            raise ValueError(f"{folder / INDEX} is not the index of prepared data; choose another folder")
        return recipe
    if folder.exists():
        require(folder.is_dir(), f"out must be a folder, but {folder} is a file")
        foreign = sorted(p.name for p in folder.iterdir() if not p.name.endswith(PARTIAL))
        if foreign:
            raise ValueError(f"{folder} holds {foreign[0]}, but no prepared data; choose another folder")
    return None


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The differences between two recipes as text."""
    shares = _share(before), _share(now)
    told = {"sources", *(("validation", "validation_bytes") if shares[0] != shares[1] else ())}
    words = [f"validation: {shares[0]} before, {shares[1]} now"] if "validation" in told else []
    words += [
        _change(key, before.get(key), now[key])
        for key in now
        if key not in told and before.get(key) != now[key]
    ]
    old = {(s["name"], s["held_out"]): s for s in before.get("sources", [])}
    new = {(s["name"], s["held_out"]): s for s in now["sources"]}
    gone, added = old.keys() - new.keys(), new.keys() - old.keys()
    moved = {(name, held_out) for name, held_out in added if (name, not held_out) in gone}
    named = [
        ("gone in the sources", gone - {(name, not held_out) for name, held_out in moved}),
        ("new in the sources", added - moved),
        ("for validation now", {key for key in moved if key[1]}),
        ("for training now", {key for key in moved if not key[1]}),
        ("changed in the sources", {key for key in old.keys() & new.keys() if old[key] != new[key]}),
    ]
    for what, keys in named:
        names = sorted(name for name, _ in keys)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        if names:
            words.append(f"{what}: {', '.join(names[:3])}{more}")
    if not words and before.get("sources") != now["sources"]:
        words.append("the order of the sources")
    return words


def _share(recipe: dict[str, Any]) -> str:
    """What is held out. A share that was not asked for is more where later commands need more."""
    return f"{recipe.get('validation')!r}{' or more' if recipe.get('validation_bytes') else ''}"


def _change(key: str, before: Any, now: Any) -> str:
    """In the words of the command line."""
    if key == "validation_bytes":
        key, before, now = "sequence length", sequence_length_of(before or 0), sequence_length_of(now)
    return f"{key.replace('_', ' ')}: {before!r} before, {now!r} now"
