"""Where the Triton kernels can run, and the fallback where they cannot.

Triton comes with CUDA builds of torch. Without it, on a CPU, or for a shape the kernels do not cover, callers use
PyTorch. A kernel that does not compile is reported once and not tried again.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
# The interpreter runs kernels on the CPU, for tests. It must be chosen before a kernel is defined.
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

# How the gate's kernel chooses experts: all of them, the largest until a mass or a count is reached, all above a
# threshold; or not at all: scores alone. They are defined here, because callers use them where Triton may be missing.
DENSE, LARGEST, ABOVE, SCORES = 0, 1, 2, 3
# Random budgets (`grmoe.routing.elastic`): which number is drawn, and for what.
FIXED, MASS, COUNT = 0, 1, 2
PER_TOKEN, PER_SEQUENCE, PER_STEP = 0, 1, 2

Result = TypeVar("Result")
_failed: set[str] = set()


def available(x: Tensor) -> bool:
    """Whether kernels run where this tensor is, in its precision: CUDA, 16 or 32 bits."""
    if not HAS_TRITON or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return False  # inside vmap a tensor has no memory that a kernel could read
    if INTERPRETED:
        return x.dtype != torch.bfloat16  # the interpreter computes bf16 wrongly, without an error
    # bf16 tensor cores: Ampere and later.
    return x.is_cuda and torch.version.hip is None and _generation(x.device.index) >= 8


def runs_on(x: Tensor) -> bool:
    """`available`, and rows of whole 16 bytes, which the copy engine needs."""
    return available(x) and not missing(x.shape[-1], x)


def missing(width: int, x: Tensor) -> int:
    """Elements of x's precision that a row of this width lacks to whole 16 bytes."""
    return -width % (16 // x.element_size())


def is_hopper(device: torch.device) -> bool:
    """Hopper or data-centre Blackwell, which have the shared memory that our larger tiles need."""
    return INTERPRETED or _generation(device.index) in (9, 10)


def specialises(device: torch.device) -> bool:
    """Hopper, where groups of warps multiply asynchronously. Whether Triton has Gluon is found out by trying."""
    return not INTERPRETED and _generation(device.index) == 9


def starts_early(device: torch.device) -> bool:
    """Hopper and later, where a kernel can start while the one before it still runs."""
    return _generation(device.index) >= 9


# The first number instead of the pair, because the Dynamo of torch 2.11 cannot compare a constant tuple.
@torch.compiler.assume_constant_result
def _generation(index: int) -> int:
    """The compute capability's first number: 8 for Ampere and Ada, 9 for Hopper."""
    return _read_generation(index)


@cache
def _read_generation(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The precision that autocast would give x. It leaves fp64 alone, and casts for PyTorch's own operators only."""
    kind = x.device.type
    casts = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if casts else x.dtype


def is_capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being recorded."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@cache
def multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def num_programs(device: torch.device) -> int:
    """Programs of a persistent grid: one per multiprocessor."""
    return multiprocessors(device.index) if device.type == "cuda" else 4


def has_failed(name: str) -> bool:
    return name in _failed


def failures() -> list[str]:
    """Kernels that did not compile and were replaced by a slower path."""
    return sorted(_failed)


def try_again(names: Iterable[str]) -> None:
    """Forget that these kernels did not compile."""
    _failed.difference_update(names)


def attempt(name: str, kernel: Callable[[], Result], otherwise: Callable[[], Result]) -> Result:
    """`kernel()`. If it does not compile, warn once and use `otherwise()` from then on."""
    if torch.compiler.is_compiling() and name not in _failed:
        return kernel()  # traced, not run: nothing can fail here yet
    if name not in _failed:
        try:
            return kernel()
        except Exception as error:
            if not _is_compile_error(error):
                raise
            _failed.add(name)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
            text = f"the kernel {name!r} did not compile; a slower path replaces it from now on: {reason}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
    return otherwise()


def _is_compile_error(error: Exception) -> bool:
    """Whether the error came from Triton's compiler, rather than from a launch or our own code."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if type(error).__name__ in ("OutOfResources", "CompilationError", "PTXASError"):
        return True
    if isinstance(error, ImportError):  # Gluon is experimental, and its names change between Triton versions
        return True
    frame = error.__traceback__
    while frame is not None:
        module = str(frame.tb_frame.f_globals.get("__name__", ""))
        # Every launch passes through triton.backends.nvidia.driver, but not through its compiler.
        backend = module.startswith("triton.backends.") and module.endswith(".compiler")
        # triton.compiler also loads binaries; a broken CUDA context fails there, with "[CUDA]" in its message.
        compiler = module.startswith("triton.compiler") and "[CUDA]" not in str(error)
        if backend or compiler or module == "triton.runtime.build":
            return True
        frame = frame.tb_next
    return False
