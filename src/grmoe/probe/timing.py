"""Times of calls, and their ratios.

On a GPU two events around a call time it. All calls of a turn are enqueued without waiting, behind a pause of the
device that lets the host get ahead. So the result is the device's time, as inside a model that keeps the queue full.
The host's time to enqueue a call is stored separately. A call that itself waits for the device drains the queue, and
its time includes that. Before each call a buffer larger than the L2 cache is written, so that inputs are not cached.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import torch

_FLUSH_BYTES = 256 << 20
_CALLS_PER_TURN = 10  # on a GPU; one on a CPU, where nothing has to be kept busy
WARM_UPS = 3  # calls before a capture
Style = Literal["times", "share", "excess"]
_CYCLES_PER_MS = 2_000_000  # at 2 GHz
_SHORTEST_PAUSE, _LONGEST_PAUSE = 40.0, 200.0  # ms


class Timer:
    """Times the turns of contenders."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        cuda = device.type == "cuda"
        self.flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device) if cuda else None
        self.host_ms: float | None = None  # per call of the last turn, on a GPU

    def turn(self, run: Callable[[], object], host_ms: float = 0.0) -> list[float]:
        """Milliseconds of each call. host_ms: what the host needed for a call in an earlier turn."""
        if self.flush is None:
            start = self.clock()
            run()
            return [1e3 * (self.clock() - start)]
        new = torch.cuda.Event
        pairs = [(new(enable_timing=True), new(enable_timing=True)) for _ in range(_CALLS_PER_TURN)]
        torch.cuda._sleep(round(_CYCLES_PER_MS * pause_ms(host_ms)))
        host = 0.0
        for start_event, end_event in pairs:
            self.flush.zero_()
            start_event.record()
            before = self.clock()
            run()
            host += self.clock() - before
            end_event.record()
        self.host_ms = 1e3 * host / _CALLS_PER_TURN
        torch.cuda.synchronize()
        return [start_event.elapsed_time(end_event) for start_event, end_event in pairs]


def pause_ms(host_ms: float) -> float:
    """How long the device pauses, so that the host can enqueue a turn meanwhile. Bounded, because a call that waits for
    the device waits for the pause too."""
    return min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, 1.25 * _CALLS_PER_TURN * host_ms))


def warmed_up(run: Callable[[], object], device: torch.device, pool: Any = None) -> Callable[[], object]:
    """The call, after it ran once. On a GPU the replay of its CUDA graph.

    pool: of `torch.cuda.graph_pool_handle`. Graphs that share one use the same memory, so they must run one after the
    other, and what a later one reads must lie outside.
    """
    if device.type != "cuda":
        run()
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a capture must not be the first call that allocates anything
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph.replay


@dataclass
class Times:
    """Milliseconds, by round."""

    rounds: list[list[float]] = field(default_factory=list)
    host: list[float] = field(default_factory=list)  # time to enqueue a call, by round; empty on a CPU

    def add(self, timer: Timer, run: Callable[[], object]) -> None:
        """Time one more turn."""
        self.rounds.append(timer.turn(run, self.host[-1] if self.host else 0.0))
        if timer.host_ms is not None:
            self.host.append(timer.host_ms)

    @property
    def calls(self) -> list[float]:
        return [value for turn in self.rounds for value in turn]

    @property
    def median(self) -> float:
        return statistics.median(self.calls)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the middle 80 % of the calls lie."""
        return quantile(self.calls, 0.1), quantile(self.calls, 0.9)


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios by round. The interval is the middle 80 % of them.

    Of a single round: from the middle 80 % of the calls of both, the widest.
    """

    name: str
    value: float
    interval: tuple[float, float] | None = None
    style: Style = "times"

    def __str__(self) -> str:
        def show(value: float) -> str:
            if self.style == "share":
                return f"{100 * value:.1f}"
            return f"{100 * (value - 1):+.1f}" if self.style == "excess" else three_figures(value)

        spread = f" ({show(self.interval[0])} to {show(self.interval[1])})" if self.interval else ""
        return show(self.value) + spread + ("" if self.style == "times" else " %")


def time_ratio(name: str, over: Times, under: Times, style: Style = "times") -> Ratio:
    """over / under in the rounds that both have, because calls of one round ran at the same clock rate. The median
    round counts, so that the ratio lies inside its interval."""
    shared = min(len(over.rounds), len(under.rounds))  # a slow contender may have fewer
    over, under = Times(over.rounds[:shared]), Times(under.rounds[:shared])
    each = round_ratios(over, under)
    interval = quantile(each, 0.1), quantile(each, 0.9)
    if shared == 1:
        (low, high), (least, most) = over.interval, under.interval
        interval = low / most, high / least
    return Ratio(name, statistics.median(each), interval, style)


def round_ratios(over: Times, under: Times) -> list[float]:
    """over / under in each round: a ratio of two medians."""
    pairs = zip(over.rounds, under.rounds, strict=True)
    return [statistics.median(a) / statistics.median(b) for a, b in pairs]


def three_figures(value: float) -> str:
    """Three significant figures, without an exponent."""
    return f"{value:.{figure_digits(value)}f}"


def figure_digits(value: float) -> int:
    return max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0


def quantile(values: list[float], q: float) -> float:
    """Linear between the sorted values."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """The most memory a call allocates beyond what was allocated before; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
