"""Measured prefill speed: the same batch at every setting, settings taking turns.

On a GPU each setting is one CUDA graph of the uncompiled model. Launching kernel by kernel would time the host, not the
device. A graph reads α when it runs; τ and the cap are fixed in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from grmoe.dial.meter import Point
from grmoe.dial.setting import apply
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.timing import Timer, Times, quantile, round_ratios, warmed_up
from grmoe.probe.windows import Text

TOKENS = {"cuda": 16384, "cpu": 1024}  # per batch
ROUNDS = 9


@dataclass(frozen=True)
class Speed:
    """Medians. Intervals hold the middle 80 % of the calls, or of the ratios by round."""

    tokens_per_second: float
    interval: tuple[float, float]
    relative: float
    """To the trained setting."""
    relative_interval: tuple[float, float]


@torch.no_grad()
def time_points(
    model: GrmoeForCausalLM,
    text: Text,
    points: Iterable[Point],
    trained: Point,
    rounds: int = ROUNDS,
    step: Callable[[str], None] = lambda stage: None,
) -> dict[Point, Speed]:
    """Tokens per second of a prefill: all blocks, and the logits of the last position."""
    contenders = list(dict.fromkeys([trained, *points]))
    ids = text.first(TOKENS.get(model.device.type, 1024)).inputs_WS.contiguous().to(model.device)

    def prefill() -> object:
        return model(input_ids=ids, use_cache=False, logits_to_keep=1)

    timer = Timer(model.device)
    times = {point: Times() for point in contenders}
    calls = {}
    for point in contenders:
        apply(model, point.setting)
        calls[point] = warmed_up(prefill, model.device)
    step("speed")
    for _ in range(rounds):
        for point in contenders:
            apply(model, point.setting)
            times[point].add(timer, calls[point])
        step("speed")
    model.reset_routing_metrics()
    return {point: _speed(times[point], times[trained], ids.numel()) for point in contenders}


def _speed(times: Times, trained: Times, tokens: int) -> Speed:
    slow, fast = (1e3 * tokens / ms for ms in reversed(times.interval))
    # Round by round: other load on the machine changes between rounds and slows both settings alike.
    ratios = round_ratios(trained, times)
    spread = quantile(ratios, 0.1), quantile(ratios, 0.9)
    return Speed(1e3 * tokens / times.median, (slow, fast), statistics.median(ratios), spread)
