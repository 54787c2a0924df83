"""Measured prefill speed: the same batch at every setting, settings taking turns.

On a GPU the compiled model runs as a CUDA graph. Launching kernel by kernel would time the host, not the device. τ, α
and caps are numbers on the device, so settings share one graph, as they do in a served model: its dispatch has room for
the largest of them. On a CPU the model is not compiled: that would take longer than everything else.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grmoe.dial.meter import Point
from grmoe.dial.setting import Setting, apply
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.timing import Timer, Times, quantile, round_ratios, warmed_up
from grmoe.probe.windows import Text
from grmoe.routing import TopK, routers
from grmoe.routing.controls import set_layer_numbers

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
    how: str = "eager"
    """What was timed: the eager model, or the compiled one in a CUDA graph."""


@torch.no_grad()
def time_points(
    model: GrmoeForCausalLM,
    text: Text,
    points: Iterable[Point],
    trained: Point,
    rounds: int,
    step: Callable[[str], None] = lambda stage: None,
) -> dict[Point, Speed]:
    """Tokens per second of a prefill: all blocks, and the logits of the last position."""
    contenders = list(dict.fromkeys([trained, *points]))
    ids = text.some(TOKENS.get(model.device.type, 1024)).inputs_WS.contiguous().to(model.device)

    graphs = model.device.type == "cuda"
    room = max((p.setting.cap for p in contenders if _by_rank(p.setting)), default=1) if graphs else None
    put(model, trained.setting, room)
    forward, how = _compiled(model, ids) if graphs else (model, "eager")

    def prefill() -> object:
        return forward(input_ids=ids, use_cache=False, logits_to_keep=1)

    timer = Timer(model.device)
    times = {point: Times() for point in contenders}
    calls: dict[Any, Callable[[], object]] = {}
    for point in contenders:
        put(model, point.setting, room)
        key = _shared(point.setting) if graphs else point
        if key not in calls:
            calls[key] = warmed_up(prefill, model.device)
    step("speed")
    for _ in range(rounds):
        for point in contenders:
            put(model, point.setting, room)
            times[point].add(timer, calls[_shared(point.setting) if graphs else point])
        step("speed")
    model.reset_routing_metrics()
    return {point: _speed(times[point], times[trained], ids.numel(), how) for point in contenders}


def put(model: GrmoeForCausalLM, setting: Setting, room: int | None) -> None:
    """`apply`; with `room` also one policy for all settings that take the most probable experts.

    Nothing that a graph has fixed then differs between such settings. Their numbers are filled in place.
    """
    apply(model, setting)
    if room is not None and _by_rank(setting):
        policy = TopK(room, renormalize=model.config.norm_topk_prob)
        set_layer_numbers(routers(model), policy, model.config.numbers)


def _by_rank(setting: Setting) -> bool:
    return setting.selection in ("topk", "mass", "at_least")


def _shared(setting: Setting) -> tuple[str, bool]:
    """Settings with the same answer share a graph. Gate × norm has a gate of its own."""
    return "by rank" if _by_rank(setting) else str(setting), setting.bias is not None


def _compiled(model: GrmoeForCausalLM, ids: Tensor) -> tuple[Callable[..., object], str]:
    """The compiled model and what to call it; the eager one where it does not compile."""
    forward = torch.compile(model, dynamic=False)
    try:
        forward(input_ids=ids, use_cache=False, logits_to_keep=1)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # as Dynamo's and Inductor's errors are
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        warnings.warn(f"speed is that of the eager model, it does not compile: {reason}", stacklevel=3)
        return model, "eager, CUDA graph"
    return forward, "compiled, CUDA graph"


def _speed(times: Times, trained: Times, tokens: int, how: str = "eager") -> Speed:
    slow, fast = (1e3 * tokens / ms for ms in reversed(times.interval))
    # Round by round: other load on the machine changes between rounds and slows both settings alike.
    ratios = round_ratios(trained, times)
    spread = quantile(ratios, 0.1), quantile(ratios, 0.9)
    return Speed(1e3 * tokens / times.median, (slow, fast), statistics.median(ratios), spread, how)
