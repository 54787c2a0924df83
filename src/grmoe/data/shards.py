"""The files of a prepared folder: layout, writing and checks.

`NAME.bin` holds the tokens of a shard, little endian. In a masked folder (conversations) the highest bit of a token
says that it is context only: no loss counts on it. `NAME.idx` holds little-endian int64 values:

    magic, version, tokens, pieces, continues (0 or 1),
    offset of each piece and, last, the number of tokens (pieces + 1 values),
    domain id of each piece (pieces values)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grmoe.data.packing import Shard
from grmoe.files import PARTIAL, write_file

VERSION = 1
INDEX = "index.json"
TOKENIZER = "tokenizer"
_MAGIC = int.from_bytes(b"grmoeidx", "little")
HEADER = 5  # int64 values


def token_dtype(vocab_size: int, masked: bool = False) -> np.dtype[np.unsignedinteger]:
    """The smallest unsigned integer type for every id: two bytes for up to 65536 tokens, else four.

    masked: one bit more, see `context_bit`.
    """
    return np.dtype("<u2") if vocab_size * (2 if masked else 1) <= 2**16 else np.dtype("<u4")


def context_bit(dtype: np.dtype[np.unsignedinteger]) -> int:
    """The highest bit of a token. In a masked folder it marks tokens that no loss counts on."""
    return int(1 << (8 * dtype.itemsize - 1))


def write_shard(folder: Path, name: str, shard: Shard, dtype: np.dtype[np.unsignedinteger]) -> dict[str, Any]:
    """Write both files. Returns the record of the shard for the journal and for index.json."""
    tokens = np.concatenate(shard.pieces).astype(dtype, copy=False)
    lengths = [len(piece) for piece in shard.pieces]
    header = [_MAGIC, VERSION, len(tokens), len(lengths), int(shard.continues)]
    index = np.concatenate([header, [0], np.cumsum(lengths), shard.domains]).astype("<i8")
    record: dict[str, Any] = {
        "name": name,
        "tokens": len(tokens),
        "pieces": len(lengths),
        "documents": len(lengths) - int(shard.continues),
        "domains": {domain: asdict(tally) for domain, tally in shard.tallies.items()},
    }
    for suffix, array in ((".bin", tokens), (".idx", index)):
        content = array.tobytes()
        write_file(folder / (name + suffix), content)
        record["sha256" + suffix] = hashlib.sha256(content).hexdigest()
    return record


def _index_bytes(record: dict[str, Any]) -> int:
    """Size of the .idx file of a shard."""
    return 8 * (HEADER + 2 * record["pieces"] + 1)


def check_shard(folder: Path, record: dict[str, Any], dtype: np.dtype[np.unsignedinteger]) -> None:
    """Raise if a shard is missing or truncated. Reads the sizes and one header, but not the tokens."""
    bin_bytes = record["tokens"] * dtype.itemsize
    for suffix, wanted in ((".bin", bin_bytes), (".idx", _index_bytes(record))):
        path = folder / (record["name"] + suffix)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise ValueError(f"{path} is missing") from None
        if size != wanted:
            raise ValueError(f"{path} is damaged: {size} bytes, {wanted} expected")
    header = np.fromfile(path, dtype="<i8", count=HEADER)
    if header[:4].tolist() != [_MAGIC, VERSION, record["tokens"], record["pieces"]]:
        raise ValueError(f"{path} is damaged: its header is not that of {record['name']}")


def verify_shard(folder: Path, record: dict[str, Any]) -> None:
    """Raise if the checksum of a shard has changed. A record of an old version may have none."""
    for suffix in (".bin", ".idx"):
        wanted = record.get("sha256" + suffix)
        if wanted is None:
            continue
        path = folder / (record["name"] + suffix)
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                raise ValueError(
                    f"{path} is damaged: its checksum does not match {INDEX}; prepare the data again with --overwrite"
                )


def read_pieces(path: Path, domains: int) -> tuple[NDArray[np.int64], NDArray[np.int64], bool]:
    """(offsets, domain ids, continues) of a .idx file."""
    values = np.fromfile(path, dtype="<i8")
    tokens, pieces, continues = values[2:HEADER].tolist()
    offsets, ids = values[HEADER : HEADER + pieces + 1], values[HEADER + pieces + 1 :]
    fits = offsets[0] == 0 and offsets[-1] == tokens and bool((np.diff(offsets) > 0).all())
    if not fits or continues not in (0, 1) or not ((ids >= 0) & (ids < domains)).all():
        raise ValueError(f"{path} is damaged: its pieces do not fit the shard")
    return offsets, ids, bool(continues)


def remove_unlisted(folder: Path, listed: Iterable[str]) -> None:
    """Remove shards that the journal does not list. An interrupted preparation may leave one."""
    keep = set(listed)
    for path in filter(Path.is_file, list(folder.iterdir())):
        stale = path.suffix in (".bin", ".idx") and path.name.startswith(("train-", "validation-"))
        if (stale and path.stem not in keep) or path.name.endswith(PARTIAL):
            path.unlink()
