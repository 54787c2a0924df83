"""What lies in a checkpoint's folder, read without trust.

PyTorch's distributed checkpoint is an index, the pickle `.metadata`, and files with one archive per tensor. Python's
unpickler runs whatever a pickle names, so this module reads the index with one that knows only the classes of an index.
A table of checksums, written with the checkpoint, tells damaged bytes before they are used.

    checksums.json    {"step", "index": CRC of .metadata, "files": {name: {"offset+length": CRC}}}

CRC-32, because it finds every burst of up to 32 bits and is several times faster than a cryptographic hash. It protects
from damage, not from forgery: nothing in a forged checkpoint is run either way.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import _get_layout

from grmoe.files import read_json, reading

INDEX, CHECKSUMS = ".metadata", "checksums.json"


class DamageError(ValueError):
    """Files of a checkpoint are missing, damaged or of another step."""


# -- the index -------------------------------------------------------------------------------------------------

_INDEX_CLASSES = {
    kind.__name__: kind
    for kind in (
        index.Metadata,
        index.TensorStorageMetadata,
        index.BytesStorageMetadata,
        index.ChunkStorageMetadata,
        index.TensorProperties,
        index._MEM_FORMAT_ENCODING,
        index.MetadataIndex,
        index.StorageMeta,
    )
}
_OTHER = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    # Where the checkpoint was written. Nobody reads it.
    **{(m, "PosixPath"): PurePosixPath for m in ("pathlib", "pathlib._local")},
    **{(m, "WindowsPath"): PureWindowsPath for m in ("pathlib", "pathlib._local")},
}


class _IndexUnpickler(pickle._Unpickler):
    """Python's own unpickler, because its steps can be restricted. It knows no class but those of an index."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.distributed.checkpoint.metadata" and name in _INDEX_CLASSES:
            return _INDEX_CLASSES[name]
        if (module, name) in _OTHER:
            return _OTHER[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise DamageError(f"it names {module}.{name}, which does not belong into a checkpoint")

    def _build(self) -> None:
        """Sets the fields of an object; never of a class, which the whole process shares."""
        if isinstance(self.stack[-2], type):  # type: ignore[attr-defined]
            raise DamageError("it changes a class")
        self.load_build()  # type: ignore[attr-defined]

    def _set_item(self) -> None:
        self._check_keys(self.stack[-2:-1])  # type: ignore[attr-defined]
        self.load_setitem()  # type: ignore[attr-defined]

    def _set_items(self) -> None:
        self._check_keys(self.stack[::2])  # type: ignore[attr-defined]
        self.load_setitems()  # type: ignore[attr-defined]

    def _check_keys(self, keys: Iterable[Any]) -> None:
        """Names alone: hashing a deep tuple can take for ever."""
        for key in keys:
            name = getattr(key, "fqn", None) if type(key) is index.MetadataIndex else key
            if type(name) is not str:
                raise DamageError(f"it has a key of type {type(name).__name__}")

    dispatch: ClassVar[Any] = pickle._Unpickler.dispatch | {
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
    }


def read_index(folder: Path, checksums: Checksums | None = None) -> index.Metadata:
    """The index of a checkpoint. Nothing in it is run, whoever wrote it."""
    path = folder / INDEX
    with reading(path):
        content = path.read_bytes()
        if checksums is not None and checksums.index != zlib.crc32(content):
            raise DamageError(f"{path} is not the file that was saved: its checksum differs")
        found = _IndexUnpickler(io.BytesIO(content)).load()
        _check_index(found)
    assert isinstance(found, index.Metadata)
    return found


def _check_index(found: Any) -> None:
    """Types and sizes, because an unpickled object may hold anything."""
    ok = isinstance(found, index.Metadata) and isinstance(found.storage_data, dict)
    if not ok or not isinstance(found.state_dict_metadata, dict):
        raise DamageError("it is no index of a checkpoint")
    for name, entry in found.state_dict_metadata.items():
        if isinstance(entry, index.BytesStorageMetadata):
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


def tensors_in(found: index.Metadata) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of the tensors in an index, by name."""
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in found.state_dict_metadata.items()
        if isinstance(entry, index.TensorStorageMetadata)
    }


# -- checksums -------------------------------------------------------------------------------------------------

FileSums = dict[str, int]


@dataclass(frozen=True)
class Checksums:
    step: int
    index: int
    files: Mapping[str, FileSums]

    @staticmethod
    def read(folder: Path, wanted: int) -> Checksums:
        """The table of a checkpoint. wanted: its own checksum, which `meta.json` holds."""
        path = folder / CHECKSUMS
        with reading(path):
            if zlib.crc32(path.read_bytes()) != wanted:
                raise DamageError(f"{path} is not the file that was saved: its checksum differs")
            found = read_json(path)
            return Checksums(found["step"], found["index"], found["files"])

    def check(self, folder: Path, place: _StorageInfo, content: bytes) -> None:
        saved = self.files.get(place.relative_path, {}).get(_slice(place))
        if saved is None or saved != zlib.crc32(content):
            raise DamageError(
                f"{folder / place.relative_path} is not the file that was saved: its checksum differs"
            )


def sum_written(folder: Path, written: Iterable[WriteResult]) -> dict[str, FileSums]:
    """Checksums of what one process wrote. Read back, because PyTorch writes each tensor in many pieces."""
    sums: dict[str, FileSums] = {}
    for result in written:
        place = result.storage_data
        with open(folder / place.relative_path, "rb") as file:
            sums.setdefault(place.relative_path, {})[_slice(place)] = zlib.crc32(_read(file, place))
    return sums


def write_checksums(folder: Path, step: int, files: Mapping[str, FileSums]) -> int:
    """Write the table; returns its own checksum."""
    table = {"step": step, "index": zlib.crc32((folder / INDEX).read_bytes()), "files": files}
    content = json.dumps(table, separators=(",", ":")).encode()
    (folder / CHECKSUMS).write_bytes(content)
    return zlib.crc32(content)


def _slice(place: _StorageInfo) -> str:
    return f"{place.offset}+{place.length}"


def _read(file: BinaryIO, place: _StorageInfo) -> bytes:
    file.seek(place.offset)
    return file.read(place.length)


# -- tensors ---------------------------------------------------------------------------------------------------


class Reader(FileSystemReader):
    """Reads a checkpoint for `torch.distributed.checkpoint.load`: checked bytes, checked types, nothing unpickled."""

    def __init__(self, folder: Path, checksums: Checksums | None) -> None:
        super().__init__(folder)
        self.folder, self.checksums = folder, checksums
        self.found = read_index(folder, checksums)
        self.found.storage_meta = index.StorageMeta()

    def read_metadata(self, *args: Any, **kwargs: Any) -> index.Metadata:
        return self.found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        # By place, so that a tensor with several readers is read once.
        items = sorted(plan.items, key=lambda item: self._order(self.storage_data[item.storage_index]))
        last: tuple[Any, Tensor | None] = (None, None)
        for item in items:
            place = self.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self.content(place)))
                continue
            if last[0] is not place:
                last = (place, _tensor(self.content(place), self.folder / place.relative_path, item))
            assert last[1] is not None
            self._fill(last[1], item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def content(self, place: _StorageInfo) -> bytes:
        """The bytes of one entry, as they were saved."""
        path = self.folder / place.relative_path
        with reading(path):
            if path.stat().st_size < place.offset + place.length:
                raise DamageError(f"{path} is cut off: it has {path.stat().st_size} bytes")
            with open(path, "rb") as file:
                content = _read(file, place)
        if self.checksums is not None:
            self.checksums.check(self.folder, place, content)
        return content

    def check_all(self) -> None:
        """Raise if any byte that loading could use is not the one that was saved."""
        for place in self.found.storage_data.values():
            self.content(place)

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

    @staticmethod
    def _order(place: _StorageInfo) -> tuple[str, int]:
        return place.relative_path, place.offset


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


def _tensor(content: bytes, path: Path, item: ReadItem) -> Tensor:
    try:
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # of the archive, its index, or a class that is not plain
        raise DamageError(f"{path} is damaged at {item.storage_index.fqn}") from error
    if not isinstance(found, Tensor):
        raise DamageError(f"{path} holds no tensor at {item.storage_index.fqn}")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
