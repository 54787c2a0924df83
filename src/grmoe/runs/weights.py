"""Which weights a folder holds, in a few letters: results name those that they are of."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from grmoe.runs.stored import INDEX

_SLICE = 4096  # bytes that are read of each exported tensor


def fingerprint(folder: Path) -> str:
    """Of the weights in a checkpoint or an exported model; the same for its copies. Empty where nothing can be read.

    A checkpoint has a checksum for each tensor. Exported files have none, and may have hundreds of GB: there the first
    bytes of each tensor are read.
    """
    found = hashlib.sha256()
    try:
        if (folder / INDEX).is_file():
            tensors = json.loads((folder / INDEX).read_bytes())["tensors"]
            parts = {name: _parts(about) for name, about in tensors.items() if name.startswith("model.")}
            found.update(json.dumps(parts, sort_keys=True).encode())
        else:
            files = sorted(folder.glob("*.safetensors"))
            for path in files:
                _add_tensors(found, path)
            if not files:
                return ""
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return ""
    return found.hexdigest()[:16]


def _parts(about: dict[str, Any]) -> list[Any]:
    """Without the places in a file, which depend on what else is in it."""
    return [about["dtype"], about["shape"], sorted([*part[:2], part[-1]] for part in about["parts"])]


def _add_tensors(found: Any, path: Path) -> None:
    """The header of a safetensors file and the beginning of each tensor that it names."""
    with path.open("rb") as file:
        text = file.read(min(int.from_bytes(file.read(8), "little"), path.stat().st_size))
        found.update(text)
        begin = file.tell()
        for name, about in json.loads(text).items():
            if name != "__metadata__":
                first, end = about["data_offsets"]
                file.seek(begin + first)
                found.update(file.read(min(_SLICE, end - first)))
