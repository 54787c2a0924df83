"""Measured prefill: the same batch at every setting, settings taking turns under one clock.

On a GPU each setting is a CUDA graph of the model as it is, uncompiled: launching it kernel by kernel would take the
host longer than the device, whatever the setting. α is read when a graph runs, τ and the cap are part of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from grmoe.dial.measure import Point
from grmoe.dial.setting import apply
from grmoe.dial.text import Text
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.timing import Timer, Times, quantile

TOKENS = {"cuda": 16384, "cpu": 1024}  # of the batch
ROUNDS = 9
WARM_UPS = 3  # before a capture


@dataclass(frozen=True)
class Speed:
    """Medians; intervals hold the middle 80 %: of the calls, and of the rounds' ratios to the trained setting."""

    tokens_per_second: float
    interval: tuple[float, float]
    relative: float
    relative_interval: tuple[float, float]


@torch.no_grad()
def time_points(
    model: GrmoeForCausalLM,
    text: Text,
    points: Iterable[Point],
    trained: Point,
    rounds: int = ROUNDS,
    tick: Callable[[str], None] = lambda label: None,
) -> dict[Point, Speed]:
    """Tokens/s of a prefill: all blocks, and the logits of the last position."""
    contenders = list(dict.fromkeys([trained, *points]))
    rows = min(len(text.rows_WS), max(1, TOKENS.get(model.device.type, 1024) // text.rows_WS.shape[1]))
    ids = text.rows_WS[:rows, :-1].contiguous().to(model.device)

    def prefill() -> object:
        return model(input_ids=ids, use_cache=False, logits_to_keep=1)

    timer = Timer(model.device)
    times = {point: Times() for point in contenders}
    runs = {}
    for point in contenders:
        apply(model, point.setting)
        runs[point] = warmed_up(prefill, model.device)
    tick("speed")
    for _ in range(rounds):
        for point in contenders:
            apply(model, point.setting)
            times[point].add(timer, runs[point])
        tick("speed")
    model.reset_routing_metrics()
    return {point: _speed(times[point], times[trained], ids.numel()) for point in contenders}


def warmed_up(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The call after its first time; on a GPU its CUDA graph."""
    if device.type != "cuda":
        run()
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as capturing wants it: nothing may be allocated for the first time inside
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _speed(own: Times, trained: Times, tokens: int) -> Speed:
    slow, fast = (1e3 * tokens / ms for ms in reversed(own.interval))
    # Round by round: what else the machine does changes from round to round, and hits both.
    ratios = [
        statistics.median(a) / statistics.median(b) for a, b in zip(trained.rounds, own.rounds, strict=True)
    ]
    spread = quantile(ratios, 0.1), quantile(ratios, 0.9)
    return Speed(1e3 * tokens / own.median, (slow, fast), statistics.median(ratios), spread)
