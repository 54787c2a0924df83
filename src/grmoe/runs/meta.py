"""A checkpoint's meta.json: its step, its metric, what the trainer adds, and two checksums.

One is of the file itself. The other is of the index (`grmoe.runs.stored`), which has those of the tensors.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from grmoe.files import read_json, reading
from grmoe.runs.pickled import DamageError

PREFIX, TEMPORARY, REPLACED = "step-", ".writing-", ".replaced"
META = "meta.json"
_OWN, _INDEX = "checksum", "index_checksum"


def write_meta(folder: Path, meta: dict[str, Any], index: int) -> None:
    plain = json.loads(json.dumps({**meta, _INDEX: index}))  # as it will be read
    (folder / META).write_text(json.dumps({**plain, _OWN: _sum_of(plain)}, indent=1))


def read_meta(folder: Path) -> tuple[dict[str, Any], int | None]:
    """(what was saved, the checksum of its index or None for an older checkpoint)."""
    path = folder / META
    with reading(path):
        meta = read_json(path)
        own, index = meta.pop(_OWN, None), meta.get(_INDEX)
        if (own is not None or index is not None) and own != _sum_of(meta):
            raise DamageError(f"{path} is not the file that was saved: its checksum differs")
        step, metric = meta.get("step"), meta.get("metric")
        if type(step) is not int or not isinstance(metric, int | float | None) or isinstance(metric, bool):
            raise DamageError(
                f"{path} must have a step and may have a metric, got {step!r:.40} and {metric!r:.40}"
            )
        name = folder.name.removesuffix(REPLACED)
        if name not in (f"{PREFIX}{step:08d}", f"{TEMPORARY}{PREFIX}{step:08d}"):
            raise DamageError(f"{path} is of step {step}, and its folder is {folder.name}")
    meta.pop(_INDEX, None)
    return meta, index


def _sum_of(meta: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())
