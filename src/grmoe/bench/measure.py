"""Contenders take turns: warm-up, rounds, peak memory, errors. A contender that fails becomes a row with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from grmoe.bench.shapes import Shape
from grmoe.kernels import runtime
from grmoe.probe.timing import Ratio, Style, Timer, Times, peak_bytes, time_ratio

SEED = 0
WARM_UPS = {"cpu": 1, "cuda": 3}  # the first may compile or tune, the second may still allocate
_ERROR_LENGTH = 90
COPIED = {"cpu": 1 << 25, "cuda": 1 << 30}  # bytes: larger than the cache of a GPU

Kind = Literal["ours", "peer", "ceiling"]
Choice = tuple[ModuleType, str, object]  # a module, a name in it, and what it is to be
Report = Callable[[str], None]  # called after each part of the work with its stage


@contextmanager
def chosen(*choices: Choice) -> Iterator[None]:
    """Inside, each `module.name` is `value`. As a decorator: in every call.

    A kernel that does not compile under these choices is an error: its fallback would be timed under another's name.
    """
    before, failed = [getattr(module, name) for module, name, _ in choices], runtime.failures()
    for module, name, value in choices:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(choices, before, strict=True):
            setattr(module, name, value)
        if new := set(runtime.failures()) - set(failed):
            runtime.try_again(new)
            raise RuntimeError(f"did not compile: {', '.join(sorted(new))}")


@dataclass(frozen=True)
class Runs:
    """A contender once it is built: the calls to time by mode, its errors (relative, against fp64), its facts."""

    timed: Mapping[str, Callable[[], object]]
    errors: Callable[[], dict[str, float]] = dict
    facts: dict[str, float] = field(default_factory=dict)

    def with_choice(self, *choices: Choice) -> Runs:
        """The same under these choices, whatever is the default."""
        inside = chosen(*choices)
        return Runs(
            {mode: inside(call) for mode, call in self.timed.items()}, inside(self.errors), self.facts
        )


@dataclass(frozen=True)
class Contender:
    name: str
    build: Callable[[], Runs]
    kind: Kind = "ours"
    library: str = "grmoe"
    rounds: int | None = None  # a limit, for a reference that is slow on purpose


@dataclass
class Row:
    """What was measured of a contender: times in ms by mode, peak memory of the last mode, errors, or a failure."""

    name: str
    kind: Kind
    library: str
    times: dict[str, Times] = field(default_factory=dict)
    peak: int | None = None
    errors: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Keep what a contender raises as its failure. The others go on."""
        try:
            yield
        except Exception as error:
            self.failure = shorten(error)
            torch.cuda.empty_cache()  # nothing to do without CUDA


@dataclass
class Result:
    """One shape: its rows, their ratios, and what else a benchmark found."""

    shape: Shape
    rows: list[Row]
    ratios: list[Ratio] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)

    def times(self, name: str, mode: str) -> Times | None:
        row = self.row(name)
        return None if row is None else row.times.get(mode)

    def add_ratio(self, name: str, over: str, under: str, mode: str, style: Style = "times") -> None:
        """Add the time of one contender over that of another, if both were measured."""
        above, below = self.times(over, mode), self.times(under, mode)
        if above and below:
            self.ratios.append(time_ratio(name, above, below, style))


def parts(contenders: list[Contender], rounds: int) -> int:
    """How often `measure` reports."""
    return 2 * len(contenders) + rounds


def measure(
    contenders: list[Contender], device: torch.device, rounds: int, report: Report, label: str
) -> list[Row]:
    """Rows in the order of the contenders. Errors come last: kernels must be tuned at the sizes that are timed."""
    rows = [Row(c.name, c.kind, c.library) for c in contenders]
    runs: list[Runs | None] = [None] * len(rows)
    for i, (row, contender) in enumerate(zip(rows, contenders, strict=True)):
        with row.catching():
            built = contender.build()
            for run in built.timed.values():
                for _ in range(WARM_UPS[device.type]):
                    run()
            _wait(device)
            runs[i], row.facts = built, built.facts
        report(f"{label}: warm-up of {row.name}")
    live = [(row, c, r) for row, c, r in zip(rows, contenders, runs, strict=True) if r is not None]
    timer = Timer(device)
    for i in range(rounds):
        for mode in dict.fromkeys(mode for _, _, r in live for mode in r.timed):
            for row, contender, r in live:
                if row.failure or mode not in r.timed or i >= (contender.rounds or rounds):
                    continue
                with row.catching():
                    row.times.setdefault(mode, Times()).add(timer, r.timed[mode])
        report(f"{label}: timing")
    for row, done in zip(rows, runs, strict=True):
        if row.failure:
            row.times.clear()  # an incomplete measurement does not count
        elif done is not None:
            with row.catching():
                row.peak = peak_bytes(list(done.timed.values())[-1], device)
                row.errors = done.errors()
        report(f"{label}: memory and errors")
    return rows


def shorten(error: Exception) -> str:
    """The error in one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error.name}"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text if len(text) <= _ERROR_LENGTH else text[: _ERROR_LENGTH - 1] + "…"


@cache
def bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, read and written: the median of several, measured once."""
    size = COPIED[device.type]
    source, target = (torch.zeros(size, dtype=torch.int8, device=device) for _ in range(2))
    target.copy_(source)
    timer, times = Timer(device), Times()
    for _ in range(3):
        times.add(timer, lambda: target.copy_(source))
    return 2e3 * size / times.median


def relative_error(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖ / ‖reference‖ in fp64."""
    wide = reference.detach().double()
    return float((value.detach().double() - wide).norm() / wide.norm())


def pick(contenders: list[Contender], wanted: list[str] | None) -> list[Contender]:
    """Contenders named by one of the words, or containing it if no name equals it. Without words: all."""
    if not wanted:
        return contenders
    names = {c.name.lower() for c in contenders}

    def meant(word: str, name: str) -> bool:
        return word == name if word in names else word in name

    kept = [c for c in contenders if any(meant(word.lower(), c.name.lower()) for word in wanted)]
    if not kept:
        known = "; ".join(c.name for c in contenders)
        raise ValueError(f"--contender must be part of a contender's name ({known}), got {', '.join(wanted)}")
    return kept


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
