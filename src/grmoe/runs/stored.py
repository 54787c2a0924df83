"""What lies in a checkpoint's folder, read without trust: an index and the bytes of tensors, with their checksums.

PyTorch's distributed checkpoint has one archive per tensor or part of one, several to a file, and a pickle that says
where. A pickle can run code, so each checkpoint has an index of ours beside it, and only that one is read:

    index.json    {"step", "tensors": {name: {"dtype", "shape", "parts": [[offset, shape, *place], ...]}},
                   "values": {name: place}}, where place is [file, start, length, CRC-32]

CRC-32, because it finds every burst of up to 32 bits and is several times faster than a cryptographic hash. It protects
from damage, not from forgery: nothing in a forged checkpoint is run either way.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

from grmoe.files import read_json, reading
from grmoe.runs.pickled import PICKLED, DamageError, unpickle_index

INDEX = "index.json"
Sums = dict[tuple[str, int], int]
"""CRC-32 by file and start."""


# -- the index -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Index:
    content: Metadata
    """As PyTorch has it."""
    step: int | None = None
    """None for an older checkpoint."""
    sums: Sums | None = None
    """None for an older checkpoint."""

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """(shape, dtype) of each tensor."""
        return {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in self.content.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }


def write_index(folder: Path, step: int, content: Metadata, sums: Sums) -> int:
    """Write index.json. Returns its checksum."""
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    sizes: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for name, entry in content.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            about = {"dtype": _name(entry.properties.dtype), "shape": list(entry.size), "parts": []}
            tensors[name] = about
            sizes |= {(name, tuple(chunk.offsets)): list(chunk.sizes) for chunk in entry.chunks}
    for key, place in content.storage_data.items():
        where = [place.relative_path, place.offset, place.length, sums[place.relative_path, place.offset]]
        if key.fqn in tensors:
            offset = tuple(key.offset or ())
            tensors[key.fqn]["parts"].append([list(offset), sizes[key.fqn, offset], *where])
        else:
            values[key.fqn] = where
    table = {"step": step, "tensors": tensors, "values": values}
    text = json.dumps(table, separators=(",", ":")).encode()
    (folder / INDEX).write_bytes(text)
    return zlib.crc32(text)


def read_index(folder: Path, checksum: int | None) -> Index:
    """The index of a checkpoint. checksum: of index.json, from meta.json; None for an older checkpoint without one."""
    path = folder / (PICKLED if checksum is None else INDEX)
    with reading(path):
        if checksum is None:
            found = Index(unpickle_index(path.read_bytes()))
        elif zlib.crc32(path.read_bytes()) != checksum:
            raise DamageError(f"{path} is not the file that was saved: its checksum differs")
        else:
            found = _as_index(read_json(path))
        _check_index(found.content)
    return found


def _as_index(table: dict[str, Any]) -> Index:
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    sums: Sums = {}

    def place(file: str, start: int, length: int, crc: int) -> _StorageInfo:
        sums[file, start] = crc
        return _StorageInfo(file, start, length)

    for name, about in table["tensors"].items():
        chunks = []
        for i, (offset, shape, *where) in enumerate(about["parts"]):
            chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
            places[MetadataIndex(name, offset, i)] = place(*where)
        dtype = getattr(torch, about["dtype"])
        entries[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(about["shape"]), chunks)
    for name, where in table["values"].items():
        entries[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = place(*where)
    return Index(Metadata(entries, storage_data=places), table["step"], sums)


def _check_index(found: Any) -> None:
    """Types and sizes, because what was read may hold anything."""
    ok = isinstance(found, Metadata) and isinstance(found.storage_data, dict)
    if not ok or not isinstance(found.state_dict_metadata, dict):
        raise DamageError("it is no index of a checkpoint")
    for name, entry in found.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            continue
        size = tuple(entry.size)
        covered = 0
        for chunk in entry.chunks:
            ends = zip(chunk.offsets, chunk.sizes, size, strict=True)
            if not all(start >= 0 and length >= 0 and start + length <= end for start, length, end in ends):
                raise DamageError(f"{name} has a part outside its shape {size}")
            covered += math.prod(chunk.sizes)
        if covered != math.prod(size) or not isinstance(entry.properties.dtype, torch.dtype):
            raise DamageError(f"{name} is incomplete")
    for key, place in found.storage_data.items():
        numbers = isinstance(place, _StorageInfo) and type(place.offset) is type(place.length) is int
        if not numbers or place.offset < 0 or place.length < 0 or place.transform_descriptors:
            raise DamageError(f"the place of {key.fqn} cannot be read")
        if Path(str(place.relative_path)).name != place.relative_path:
            raise DamageError(f"{key.fqn} lies outside the checkpoint: {str(place.relative_path)[:80]!r}")


def sum_written(folder: Path, written: Iterable[WriteResult]) -> Sums:
    """Checksums of what one process wrote. Read back, because PyTorch writes each tensor in many pieces."""
    sums: Sums = {}
    for place in (result.storage_data for result in written):
        with open(folder / place.relative_path, "rb") as file:
            sums[place.relative_path, place.offset] = _sum(file, place)
    return sums


def _sum(file: BinaryIO, place: _StorageInfo) -> int:
    if place.length == 0:
        return zlib.crc32(b"")
    # Mapped, because reading would copy what may be gigabytes.
    end = place.offset + place.length
    with (
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        memoryview(content)[place.offset : end] as part,
    ):
        return zlib.crc32(part)


def _order(place: _StorageInfo) -> tuple[str, int]:
    return place.relative_path, place.offset


# -- tensors ---------------------------------------------------------------------------------------------------


class Reader(FileSystemReader):
    """Reads a checkpoint for `torch.distributed.checkpoint.load`: checked bytes, checked types, nothing unpickled."""

    def __init__(self, folder: Path, index: Index) -> None:
        super().__init__(folder)
        self.folder, self.index = folder, index
        index.content.storage_meta = StorageMeta()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index.content

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        # By place, so that a tensor with several readers is read once.
        items = sorted(plan.items, key=lambda item: _order(self.storage_data[item.storage_index]))
        for _, group in itertools.groupby(
            items, key=lambda item: _order(self.storage_data[item.storage_index])
        ):
            readers = list(group)
            place, name = self.storage_data[readers[0].storage_index], readers[0].storage_index.fqn
            with self.open(place) as content:
                if readers[0].type == LoadItemType.BYTE_IO:
                    planner.load_bytes(readers[0], io.BytesIO(content.read(place.length)))
                    continue
                tensor = _tensor(content, self.folder / place.relative_path, name)
            for item in readers:
                self._fill(tensor, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @contextlib.contextmanager
    def open(self, place: _StorageInfo) -> Iterator[Any]:
        """The bytes of one entry as a file, if they are those that were saved."""
        path = self.folder / place.relative_path
        with contextlib.ExitStack() as opened:
            with reading(path):
                file = opened.enter_context(open(path, "rb"))
                size = os.fstat(file.fileno()).st_size
                if size < place.offset + place.length:
                    raise DamageError(f"{path} is cut off: it has {size} bytes")
                sums = self.index.sums
                if sums is not None and sums.get((place.relative_path, place.offset)) != _sum(file, place):
                    raise DamageError(f"{path} is not the file that was saved: its checksum differs")
            yield _create_file_view(file, place.offset, place.length)

    def check_all(self) -> None:
        """Raise if any byte that loading could use is not the one that was saved."""
        for place in self.index.content.storage_data.values():
            with self.open(place):
                pass

    def _fill(self, tensor: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
        name = item.storage_index.fqn
        target = planner.resolve_tensor(item).detach()
        if tensor.dtype != target.dtype:
            raise DamageError(f"{name} must be {_name(target.dtype)}, got {_name(tensor.dtype)}")
        ends = zip(item.storage_offsets, item.lengths, tensor.shape, strict=False)
        if tensor.ndim != target.ndim or not all(start + length <= end for start, length, end in ends):
            raise DamageError(f"{name} has another shape than the index says: {tuple(tensor.shape)}")
        target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)


class Planner(DefaultLoadPlanner):
    """PyTorch's planner, but values other than tensors are plain: text and numbers."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except Exception as error:
            raise DamageError(f"{name} is damaged, or holds more than text and numbers") from error
        parents, last = self.mappings[name][:-1], self.mappings[name][-1]
        node: Any = self.original_state_dict
        for parent in parents:
            node = node[parent]
        node[last] = found


def _tensor(content: Any, path: Path, name: str) -> Tensor:
    try:
        found = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # of the archive, its index, or a class that is not plain
        raise DamageError(f"{path} is damaged at {name}") from error
    if not isinstance(found, Tensor):
        raise DamageError(f"{path} holds no tensor at {name}")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
