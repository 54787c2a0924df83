"""Launching kernels without analysing their arguments every time.

Triton's own launch analyses types, alignments and divisibility of all arguments each time, which takes the host longer
than a small kernel takes the device. Here only the first launch with a set of constants and types does that, and the
compiled kernel is kept. Two conditions make this correct: integers are marked `do_not_specialize`, so a compiled kernel
serves every value, and tensors not aligned to 16 bytes always use Triton's launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from grmoe.kernels.runtime import INTERPRETED, starts_early

# Whether kernels start while the one before them still runs (`grmoe.kernels.early`). Not measured yet.
EARLY = False

_compiled: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}


class Tiled(TensorDescriptor):
    """A contiguous matrix read or written in tiles by the copy engine; `tiled` builds it, unchecked."""

    def __post_init__(self) -> None:
        pass


def dense(x: Tensor) -> Tensor:
    """x, or a contiguous copy aligned to 16 bytes, which the copy engine needs."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() & 15 else x


def tiled(matrix: Tensor, rows: int, columns: int) -> Tiled:
    """`matrix`, `dense` and with rows of whole 16 bytes, in tiles of rows × columns."""
    shape = matrix.shape
    return Tiled(matrix, list(shape), [shape[1], 1], [rows, columns])


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constants: tuple[Any, ...],
    warps: int = 4,
    stages: int = 3,
    fuse: bool = True,
) -> None:
    """Run `kernel` with its run-time arguments first and its constants after them, both in the kernel's order.

    fuse: the compiler may make one operation of a product and a sum, and round it once.
    """
    if INTERPRETED:
        kernel[grid](*args, *constants)
        return None
    values: list[Any] = []
    types: list[Any] = []
    index = -1
    for arg in args:
        kind = type(arg)
        if kind is int or kind is float:
            values.append(arg)
            continue
        base = arg if isinstance(arg, Tensor) else arg.base
        address = base.data_ptr()
        if address & 15:
            return _launch_anew(kernel, grid, args, constants, warps, stages, fuse, base.device)
        values.append(address if base is arg else arg)
        types.append(base.dtype)
        index = base.device.index
    key = (kernel.fn, index, warps, stages, fuse, EARLY, constants, *types)
    known = _compiled.get(key)
    if known is None or index != torch._C._cuda_getDevice():
        made = _launch_anew(kernel, grid, args, constants, warps, stages, fuse, torch.device("cuda", index))
        _compiled[key] = (made.run, made.function, made.packed_metadata)
        return None
    run, function, metadata = known
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(index)
    run(x, y, z, stream, function, metadata, None, None, None, *values, *constants)
    return None


def _launch_anew(
    kernel: Any,
    grid: tuple[int, ...],
    args: Any,
    constants: Any,
    warps: int,
    stages: int,
    fuse: bool,
    device: torch.device,
) -> Any:
    with torch.cuda.device(device):
        early = EARLY and starts_early(device)
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fuse, "launch_pdl": early}
        return kernel[grid](*args, *constants, **options)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n and at least 2, because a tile's dimension cannot be 1."""
    return max(2, 1 << (n - 1).bit_length())
