"""Runs warp-specialised kernels on a CPU: Gluon has no interpreter.

The kernel's own Python runs, with other meanings for Gluon's names. Each group of warps is a thread, and one of them
runs at a time. At every barrier a seeded choice says who goes on. Copies arrive some time after they were asked for. A
product reads its operands when it is issued or when it is waited for, the other choice that a GPU has. So a missing
wait, a buffer that is refilled too early or a barrier that is used once too often is a wrong number, or a wait without
end. Every access is checked to be inside its tensor, and no place is written twice. Tensor cores refuse what threads
have copied without a fence since. Integers have 32 bits as on a GPU, and places in a matrix must have 64.

Layouts mean nothing here, and results are not rounded as on a GPU. tests/gpu compares bits.
"""

from __future__ import annotations

import math
import random
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TIMEOUT = 60.0  # seconds that a group may compute between two barriers


class Tile(Tensor):
    """A tensor of the kernel, with what Gluon has and PyTorch does not."""

    @property
    def type(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(layout=types.SimpleNamespace(parent=None))

    def split(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        assert self.shape[-1] == 2
        return self[..., 0], self[..., 1]


def tile(value: Any, dtype: torch.dtype | None = None) -> Tensor:
    made: Tensor = torch.as_tensor(value, dtype=dtype).as_subclass(Tile)
    return made


def number(value: Any) -> Tensor:
    """An integer has 32 bits unless it says otherwise."""
    return tile(value, torch.int32 if isinstance(value, int) else None)


class Deadlock(AssertionError):
    pass


class _Stop(BaseException):
    """Ends the other groups of warps once one has failed."""


@dataclass
class Barrier:
    """Of shared memory: a phase ends when all have arrived and all announced bytes are there."""

    count: int = 0
    left: int = 0
    bytes: int = 0
    phase: int = 0

    def arrive(self, times: int = 1) -> None:
        self.left -= times
        assert self.left >= 0, "more arrivals than a phase of this barrier has"
        self.turn()

    def turn(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase + 1, self.count


@dataclass
class Shared:
    """Shared memory, or a part of it."""

    data: Tensor
    copied: Tensor  # when threads copied to it, 0 where the copy engine did

    def part(self, view: Callable[[Tensor], Tensor]) -> Shared:
        return Shared(view(self.data), view(self.copied))

    def index(self, i: Any) -> Shared:
        return self.part(lambda x: x[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return self.part(lambda x: x.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return self.part(lambda x: x.permute(order))

    def load(self, layout: Any = None) -> Tensor:
        return tile(self.data.clone())


@dataclass
class Barriers:
    of: list[Barrier]

    def index(self, i: Any) -> Barrier:
        return self.of[int(i)]


@dataclass
class Pointer:
    memory: Tensor
    matrix: bool
    written: Tensor
    place: Tensor = field(default_factory=lambda: number(0))

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        small, offset = isinstance(offset, int), number(offset)
        small = small or offset.ndim == 1 or not self.matrix  # a constant, or a list
        wide = torch.promote_types(self.place.dtype, offset.dtype)
        assert small or wide == torch.int64, "32 bits do not reach all of a large matrix"
        return Pointer(self.memory, self.matrix, self.written, self.place.to(wide) + offset.to(wide))

    def __sub__(self, offset: Any) -> Pointer:
        return self + (-offset)

    def at(self, mask: Any) -> tuple[Tensor, Tensor]:
        """(places, whether each is touched), of one shape."""
        place, inside = torch.broadcast_tensors(self.place, torch.as_tensor(mask))
        place, inside = place.as_subclass(Tensor).long(), inside.as_subclass(Tensor).bool()
        touched = place[inside]
        assert not len(touched) or 0 <= int(touched.min()) <= int(touched.max()) < len(self.memory)
        return place, inside


class Descriptor:
    """A matrix that the copy engine reads; zeros outside."""

    def __init__(self, given: Any) -> None:
        self.base, self.block, self.layout = given.base, list(given.block_shape), given.layout
        self.dtype = given.base.dtype
        self.block_type = types.SimpleNamespace(nbytes=math.prod(self.block) * given.base.element_size())

    def read(self, place: list[int]) -> Tensor:
        found = torch.zeros(self.block, dtype=self.dtype)
        ends = [
            max(0, min(size, start + length) - start)
            for size, start, length in zip(self.base.shape, place, self.block, strict=True)
        ]
        assert min(place) >= 0
        (r, c), (m, n) = place, ends
        found[:m, :n] = self.base[r : r + m, c : c + n]
        return found


@dataclass(eq=False)
class Group:
    """Warps that run as one thread."""

    thread: threading.Thread
    go: threading.Event = field(default_factory=threading.Event)
    blocked: Callable[[], bool] = lambda: False
    done: bool = False
    fenced: int = 0  # tensor cores see what this group's or other threads copied before
    copies: deque[Callable[[], None]] = field(default_factory=deque)  # ordinary ones arrive in order


class Machine:
    """One multiprocessor."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.groups: list[Group] = []
        self.arriving: list[Callable[[], None]] = []  # copies of the engine arrive in any order
        self.back = threading.Event()
        self.failure: BaseException | None = None
        self.here: Group | None = None
        self.time = 0  # counts the copies of threads

    def run(self, functions: list[Callable[[], None]]) -> None:
        self.groups = [
            Group(threading.Thread(target=self._work, args=(f, i))) for i, f in enumerate(functions)
        ]
        for group in self.groups:
            group.thread.start()
        weights = [self.random.choice([0.05, 0.3, 1.0]) for _ in self.groups]
        while self.failure is None and not all(group.done for group in self.groups):
            ready = [
                (g, w) for g, w in zip(self.groups, weights, strict=True) if not g.done and not g.blocked()
            ]
            late = [*self.arriving, *(g.copies[0] for g in self.groups if g.copies)]
            if not ready and not late:
                self.failure = Deadlock("every group of warps waits")
            elif late and (not ready or self.random.random() < 0.5):
                self._arrive(self.random.choice(late))
            else:
                (group,) = self.random.choices([g for g, _ in ready], [w for _, w in ready])
                self._resume(group)
        for group in self.groups:
            while not group.done:
                self._resume(group)
            group.thread.join(TIMEOUT)
        if self.failure is not None:
            raise self.failure

    def _arrive(self, copy: Callable[[], None]) -> None:
        if copy in self.arriving:
            self.arriving.remove(copy)
        else:
            next(g for g in self.groups if g.copies and g.copies[0] is copy).copies.popleft()
        try:
            copy()
        except AssertionError as error:  # `run` ends the groups first
            self.failure = error

    def _resume(self, group: Group) -> None:
        self.here = group
        self.back.clear()
        group.go.set()
        assert self.back.wait(TIMEOUT), "a group of warps does not come back"

    def _work(self, function: Callable[[], None], number: int) -> None:
        group = self.groups[number]
        try:
            self._pause(group)
            function()
        except _Stop:
            pass
        except BaseException as error:
            self.failure = error
        group.done = True
        self.back.set()

    def _pause(self, group: Group) -> None:
        group.go.wait()
        group.go.clear()
        if self.failure is not None:
            raise _Stop

    def wait(self, blocked: Callable[[], bool] = lambda: False) -> None:
        """Let others go on, at least until this is no longer blocked."""
        assert self.here is not None
        group = self.here
        group.blocked = blocked
        self.back.set()
        self._pause(group)


class Sums:
    """What tensor cores add up, with products that were issued and not waited for."""

    def __init__(self, total: Tensor) -> None:
        self.total, self.open = total, deque[Callable[[], Tensor]]()


class Emulator:
    """Gluon's names for one program."""

    def __init__(self, seed: int, program: int, programs: int) -> None:
        self.machine = Machine(seed)
        self.program, self.programs = program, programs

    # -- who goes on ----------------------------------------------------------------------------------------------

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.left = count

    def wait(self, barrier: Barrier, phase: Any, pred: Any = True) -> None:
        if pred:
            self.machine.wait(lambda: barrier.phase & 1 == int(phase))

    def arrive(self, barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        if pred:
            barrier.arrive(count)
        self.machine.wait()

    def expect(self, barrier: Barrier, bytes: int) -> None:
        barrier.bytes += bytes
        barrier.arrive()

    def specialize(self, parts: list[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
        self.machine.run([(lambda f=f, args=args: f(*args)) for f, args in parts])

    # -- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared | Barriers:
        if dtype == torch.int64:
            return Barriers([Barrier() for _ in range(shape[0])])
        return Shared(torch.full(shape, torch.nan, dtype=dtype), torch.zeros(shape, dtype=torch.int64))

    def load(self, pointer: Pointer, mask: Any = True, other: Any = 0) -> Tensor:
        place, inside = pointer.at(mask)
        found = torch.full(place.shape, other, dtype=pointer.memory.dtype)
        found[inside] = pointer.memory[place[inside]]
        return tile(found)

    def store(self, pointer: Pointer, value: Any, mask: Any = True) -> None:
        place, inside = pointer.at(mask)
        touched = place[inside]
        assert not pointer.written[touched].any(), "a place is written twice"
        assert len(touched.unique()) == len(touched), "a place is written twice"
        pointer.written[touched] = True
        values = torch.as_tensor(value).as_subclass(Tensor).expand(place.shape)
        pointer.memory[touched] = values[inside].to(pointer.memory.dtype)

    def copy_engine(self, source: Descriptor, place: list[Any], barrier: Barrier, to: Shared) -> None:
        assert list(to.data.shape) == source.block
        start = [int(p) for p in place]

        def arrive() -> None:
            to.data.copy_(source.read(start))
            to.copied.zero_()
            barrier.bytes -= source.block_type.nbytes
            assert barrier.bytes >= 0, "bytes that nobody announced"
            barrier.turn()

        self.machine.arriving.append(arrive)

    def copy(self, to: Shared, pointer: Pointer, mask: Any = True) -> None:
        """By threads, asynchronously."""
        found = self.load(pointer, mask)
        assert found.shape == to.data.shape

        def arrive() -> None:
            self.machine.time += 1
            to.data.copy_(found)
            to.copied.fill_(self.machine.time)

        assert self.machine.here is not None
        self.machine.here.copies.append(arrive)

    def arrive_when_copied(self, barrier: Barrier, increment_count: bool) -> None:
        """Each thread of the group arrives when its copies have."""
        assert not increment_count
        assert self.machine.here is not None
        self.machine.here.copies.append(lambda: barrier.arrive(128))

    # -- tensor cores ---------------------------------------------------------------------------------------------

    def fence(self) -> None:
        if self.machine.here is not None:
            self.machine.here.fenced = self.machine.time

    def multiply(self, a: Shared, b: Shared, total: Any, is_async: bool) -> Sums:
        assert self.machine.here is not None
        copied = max(int(a.copied.max()), int(b.copied.max()))
        assert copied <= self.machine.here.fenced, "no fence since threads copied this"
        sums = total if isinstance(total, Sums) else Sums(total)
        product = lambda: a.data.float() @ b.data.float()  # noqa: E731
        if self.machine.random.random() < 0.5:
            early = product()
            product = lambda: early  # noqa: E731
        sums.open.append(product)
        return sums

    def wait_products(self, num_outstanding: int, deps: tuple[Any]) -> Any:
        (sums,) = deps
        if not isinstance(sums, Sums):  # there was no product
            return sums
        while len(sums.open) > num_outstanding:
            sums.total = sums.total + sums.open.popleft()()
        return sums if num_outstanding else tile(sums.total)


def _names(emulator: Emulator) -> dict[str, Any]:
    """What a kernel's global names mean."""

    def counted(*limits: Any) -> Iterator[Tensor]:
        return (number(i) for i in range(*map(int, limits)))

    def kept(x: Tensor) -> torch.dtype:  # of a sum
        return x.dtype if x.dtype.is_floating_point or x.dtype == torch.int64 else torch.int32

    def plain(value: Any) -> Any:
        return getattr(value, "value", value)  # of a constant

    def layout(*_: Any, **__: Any) -> None:
        return None

    layout.get_default_for = layout  # type: ignore[attr-defined]
    both = {
        "load": emulator.load, "store": emulator.store,
        "arange": lambda start, end, _=None: tile(torch.arange(start, end, dtype=torch.int32)),
        "zeros": lambda shape, dtype, _=None: tile(torch.zeros(shape, dtype=dtype)),
        "where": lambda c, a, b: tile(torch.where(torch.as_tensor(c), a, b)),
        "sum": lambda x, axis: tile(x.sum(axis, dtype=kept(x))),
        "max": lambda x, axis: tile(x.amax(axis)),
        "min": lambda x, axis: tile(x.amin(axis)),
        "minimum": lambda a, b: torch.minimum(number(plain(a)), number(plain(b))),
        "maximum": lambda a, b: torch.maximum(number(plain(a)), number(plain(b))),
        "abs": torch.abs, "exp": torch.exp, "exp2": torch.exp2, "rsqrt": torch.rsqrt,
        "float32": torch.float32, "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8,
    }  # fmt: skip
    gl = types.SimpleNamespace(
        **both,
        associative_scan=lambda x, axis, _: tile(x.cumsum(axis, dtype=kept(x))),
        convert_layout=lambda x, *_, **__: x,
        allocate_shared_memory=emulator.allocate,
        warp_specialize=emulator.specialize,
        static_range=range,
        program_id=lambda _: number(emulator.program),
        num_programs=lambda _: emulator.programs,
        constexpr=None,
        **dict.fromkeys(
            ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "NVMMASharedLayout"), layout
        ),
    )
    barriers = types.SimpleNamespace(
        init=emulator.init, wait=emulator.wait, arrive=emulator.arrive, expect=emulator.expect, MBarrierLayout=layout
    )  # fmt: skip
    copies = types.SimpleNamespace(
        async_copy_global_to_shared=emulator.copy, mbarrier_arrive=emulator.arrive_when_copied
    )
    return {
        "gl": gl,
        "tl": types.SimpleNamespace(**both),
        "mbarrier": barriers,
        "async_copy": copies,
        "tma": types.SimpleNamespace(async_copy_global_to_shared=emulator.copy_engine),
        "warpgroup_mma": emulator.multiply,
        "warpgroup_mma_wait": emulator.wait_products,
        "fence_async_shared": emulator.fence,
        "await_inputs": lambda: None,
        "range": counted,
    }


def _rebind(kernel: Any, names: dict[str, Any], known: dict[int, Any]) -> Any:
    """The kernel's Python, and that of all kernels it calls, with these names."""
    function = kernel.fn
    if id(function) in known:
        return known[id(function)]
    spaces: dict[str, Any] = {}
    known[id(function)] = made = types.FunctionType(
        function.__code__, spaces, function.__name__, function.__defaults__, function.__closure__
    )
    for name, value in function.__globals__.items():
        spaces[name] = _rebind(value, names, known) if _is_kernel(value) else value
    spaces.update(names)
    return made


def _is_kernel(value: Any) -> bool:
    return hasattr(value, "fn") and hasattr(value, "arg_names")


def emulate(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: tuple[Any, ...], seed: int
) -> None:
    """The kernel for every program of a grid, one after the other."""
    written: dict[int, Tensor] = {}

    def given(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            flags = written.setdefault(arg.data_ptr(), torch.zeros(arg.numel(), dtype=torch.bool))
            return Pointer(arg.view(-1), arg.ndim > 1, flags)
        return Descriptor(arg) if hasattr(arg, "block_shape") else number(arg)

    (programs,) = grid
    for program in range(programs):
        names = _names(Emulator(seed + program, program, programs))
        _rebind(kernel, names, {})(*map(given, args), *constants)
