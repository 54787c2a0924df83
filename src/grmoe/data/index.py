"""`index.json` of a prepared folder: written with its own checksum, checked when it is read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from grmoe.checks import require
from grmoe.data.packing import SPLITS
from grmoe.data.shards import INDEX
from grmoe.files import write_file

PLAIN, MASKED = 1, 2  # versions; in a masked folder the highest bit of a token says that it is no target
_CHECKSUM = "sha256"


def write_index(folder: Path, index: dict[str, Any]) -> dict[str, Any]:
    """Write the index. Returns it with its checksum."""
    index = {**index, _CHECKSUM: _checksum(index)}
    write_file(folder / INDEX, json.dumps(index, indent=1, ensure_ascii=False).encode())
    return index


def _checksum(index: dict[str, Any]) -> str:
    content = {key: value for key, value in index.items() if key != _CHECKSUM}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a prepared folder. Raises ValueError with one line if it is missing, damaged or of another version.

    An index without a checksum is one of an older version.
    """
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if not folder.exists():
            where = "" if folder.is_absolute() else f" in {Path.cwd()}"
            raise ValueError(
                f"{path} is missing: there is no folder {folder}{where}; `grmoe prepare` makes one of text"
            ) from None
        raise ValueError(
            f"{path} is missing: {folder} holds no prepared data, or an unfinished preparation "
            "(run the same `grmoe prepare` again to finish it)"
        ) from None
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise ValueError(f"{path} is damaged: {error}; prepare the data again") from error
    require(isinstance(index, dict), f"{path} is damaged: it is not a JSON object; prepare the data again")
    version = index.get("version")
    known = isinstance(version, int) and version in (PLAIN, MASKED)
    newest = f"this grmoe reads {PLAIN} and {MASKED}"
    require(known, f"{path} has version {version!r:.40}, {newest}: prepare the data again")
    problem = "its checksum is wrong" if _is_changed(index) else _find_problem(index)
    require(not problem, f"{path} is damaged: {problem}; prepare the data again")
    return index


def _is_changed(index: dict[str, Any]) -> bool:
    return _CHECKSUM in index and index[_CHECKSUM] != _checksum(index)


def _find_problem(index: dict[str, Any]) -> str:
    """What is wrong with the content of an index; empty if all that is read later is there and fits together."""
    tokenizer, domains, splits = (index.get(key) for key in ("tokenizer", "domains", "splits"))
    if not isinstance(tokenizer, dict):
        return "it has no tokenizer"
    size, end, folder = (tokenizer.get(key) for key in ("vocab_size", "end_of_text", "folder"))
    if not _is_count(size) or not _is_count(end) or end not in range(size or 0):
        return "the size of the vocabulary and the end-of-text token do not fit"
    if not _is_name(folder):
        return "the folder of the tokenizer has no name"
    if not isinstance(domains, list) or not all(isinstance(name, str) for name in domains):
        return "it has no list of domains"
    if not isinstance(splits, dict):
        return "it has no splits"
    for name in SPLITS:
        split = splits.get(name)
        if not isinstance(split, dict) or not isinstance(split.get("shards"), list):
            return f"it has no shards of the split {name}"
        for shard in split["shards"]:
            if not isinstance(shard, dict) or not _is_name(shard.get("name")):
                return f"a shard of the split {name} has no name"
            if not all(_is_count(shard.get(key)) for key in ("tokens", "pieces")):
                return f"shard {shard['name']:.40} has no counts"
        counts = [split.get(key) for key in ("documents", "tokens")]
        if not all(map(_is_count, counts)) or counts[1] != sum(s["tokens"] for s in split["shards"]):
            return f"the counts of the split {name} do not fit its shards"
        if not isinstance(split.get("domains"), dict) or not set(split["domains"]) <= set(domains):
            return f"the domains of the split {name} are not those of the data"
        if not all(isinstance(t, dict) and _is_count(t.get("tokens")) for t in split["domains"].values()):
            return f"the domains of the split {name} have no counts"
    return ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_name(value: Any) -> bool:
    """Whether it names something in the folder itself."""
    return isinstance(value, str) and value not in ("", ".", "..") and not {"/", "\\", "\0"} & set(value)
