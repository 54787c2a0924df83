"""Bytes of the tensors that are alive, and the most there were at once."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """Sees what operators return: all memory that tensors get while it is active, the meta device's none."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, weakref.ref[UntypedStorage]] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
            if isinstance(local, Tensor) and not local.is_meta:
                self._count(local.untyped_storage())
        return result

    def _count(self, storage: UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in self.alive:
            return

        def freed(_: Any) -> None:
            self.now -= size
            del self.alive[address]

        self.alive[address] = weakref.ref(storage, freed)
        self.now += size
        self.most = max(self.most, self.now)
