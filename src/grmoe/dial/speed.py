"""Measured prefill: the same batch at every setting, settings taking turns under one clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from grmoe.bench.timing import Timer, Times, quantile
from grmoe.dial.measure import Point
from grmoe.dial.setting import apply
from grmoe.dial.text import Text
from grmoe.model import GrmoeForCausalLM

TOKENS = {"cuda": 16384, "cpu": 1024}  # of the batch
ROUNDS = 9


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
    for turn in range(rounds + 1):  # the first warms up
        for point in contenders:
            apply(model, point.setting)
            if turn == 0:
                prefill()
            else:
                times[point].add(timer, prefill)
        tick("speed")
    model.reset_routing_metrics()
    return {point: _speed(times[point], times[trained], ids.numel()) for point in contenders}


def _speed(own: Times, trained: Times, tokens: int) -> Speed:
    slow, fast = (1e3 * tokens / ms for ms in reversed(own.interval))
    # Round by round: what else the machine does changes from round to round, and hits both.
    ratios = [
        statistics.median(a) / statistics.median(b) for a, b in zip(trained.rounds, own.rounds, strict=True)
    ]
    spread = quantile(ratios, 0.1), quantile(ratios, 0.9)
    return Speed(1e3 * tokens / own.median, (slow, fast), statistics.median(ratios), spread)
