"""Which weights a folder holds, in a few letters: results name those that they are of."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from grmoe.runs.stored import INDEX

_SLICES, _SLICE = 64, 4096  # of an exported file that are looked at, and bytes of each


def fingerprint(folder: Path) -> str:
    """Of the weights in a checkpoint or an exported model; the same for its copies. Empty where nothing can be read.

    A checkpoint has a checksum for each tensor. Of exported files, which may have hundreds of GB, names, sizes and
    slices are read, evenly spread: other weights differ everywhere.
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
                found.update(f"{path.name} {path.stat().st_size}\n".encode())
                _add_slices(found, path)
            if not files:
                return ""
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return ""
    return found.hexdigest()[:16]


def _parts(about: dict[str, Any]) -> list[Any]:
    """Without the places in a file, which depend on what else is in it."""
    return [about["dtype"], about["shape"], sorted([*part[:2], part[-1]] for part in about["parts"])]


def _add_slices(found: Any, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        for i in range(_SLICES):
            file.seek(i * max(0, size - _SLICE) // (_SLICES - 1))
            found.update(file.read(_SLICE))
