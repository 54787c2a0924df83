"""The index of an older checkpoint, PyTorch's pickle `.metadata`, read without running anything in it.

Python's unpickler calls whatever a pickle names. This one knows only the classes of an index. Newer checkpoints have an
index of our own (`grmoe.runs.stored`), because reading this one is slow.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout

PICKLED = ".metadata"


class DamageError(ValueError):
    """Files of a checkpoint are missing, damaged or of another step."""


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
        raise DamageError(f"it names {module}.{name}, which does not belong in a checkpoint")

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


def unpickle_index(content: bytes) -> Any:
    """The object in the pickle, made of the classes of an index alone. Its fields may hold anything."""
    return _IndexUnpickler(io.BytesIO(content)).load()
