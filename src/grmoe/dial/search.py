"""Settings worth measuring: top-k, a grid of one α for all layers, and one α per layer by measured sensitivity.

Legend: L MoE layers, K most experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from grmoe import checks
from grmoe.dial.frontier import frontier
from grmoe.dial.gates import Gates
from grmoe.dial.measure import Meter, Point
from grmoe.dial.setting import Setting, mass, top_k

ALPHAS = (0.5, 1.0, 2.0, 5.0)  # the paper's
GRID = (0.08, 0.25, 0.45, 0.65, 0.85)  # experts per token, as a share of the way from 1 to K
LEVELS = (0.1, 0.4, 0.7, 0.95)  # the same for one layer
BASES = 2  # uniform settings whose layers are looked at one by one
COMBINED = 8  # combinations of layers measured around each


@dataclass(frozen=True)
class Option:
    """One layer's α, and what it changes when only that layer is turned."""

    alpha: float
    experts: float  # in that layer and all that follow, summed over layers
    loss: float


@dataclass(frozen=True)
class Sensitivity:
    """Options of every layer around one uniform setting, the first of each being that setting's own α."""

    base: Point
    layers: list[list[Option]]


def expected(layers: int, cap: int) -> int:
    """About how many settings `search` measures."""
    return 1 + min(cap, 8) + len(ALPHAS) * (len(GRID) + 1) + BASES * (layers * len(LEVELS) + COMBINED)


def search(meter: Meter, cap: int, experts: float | None = None) -> list[Sensitivity]:
    """Fill the meter with points; returns what was learnt about single layers.

    experts: a target to aim at, beside the grid.
    """
    checks.require(
        cap >= 2,
        "cap must be at least 2 for a dial to turn: with one expert a token there is nothing to choose (--cap 2 "
        "lets tokens have two)",
    )
    trained, L = meter.trained.setting, meter.layers
    gates = Gates(meter.model, meter.text, cap)
    for k in _counts(cap):
        meter.measure(top_k(trained.alphas, k), "top-k")
    counts = [1 + share * (cap - 1) for share in GRID] + ([experts] if experts else [])
    for alpha in dict.fromkeys((*ALPHAS, *trained.alphas[:1])):
        for count in counts:
            if 1 < count < cap:
                tau = gates.tau_for([alpha] * L, count)
                meter.measure(mass((alpha,) * L, tau, cap), "uniform")
    if L == 1:
        return []
    found = []
    for base in _bases(meter, experts):
        options = measure_layers(meter, gates, base)
        found.append(options)
        assert base.setting.tau is not None
        for alphas in combine(options, COMBINED):
            meter.measure(mass(alphas, base.setting.tau, cap), "per layer")
    return found


def _counts(cap: int) -> list[int]:
    """1 … K, thinned where K is large."""
    return sorted({max(1, round(cap * i / min(cap, 8))) for i in range(1, min(cap, 8) + 1)} | {1})


def _bases(meter: Meter, experts: float | None) -> list[Point]:
    """Points of the uniform frontier to start from: the one next to the target, or evenly along it."""
    points = frontier(p for p in meter.points.values() if p.family == "uniform")
    if experts is not None:
        return sorted(points, key=lambda p: abs(p.experts - experts))[:BASES]
    return [points[(2 * i + 1) * len(points) // (2 * BASES)] for i in range(min(BASES, len(points)))]


def measure_layers(meter: Meter, gates: Gates, base: Point) -> Sensitivity:
    """Turn one layer at a time to several numbers of experts; all others stay at `base`."""
    setting = base.setting
    assert setting.tau is not None
    layers = []
    for i, own in enumerate(setting.alphas):
        options = [Option(own, 0.0, 0.0)]
        for share in LEVELS:
            alpha = gates.alpha_for(i, setting.tau, 1 + share * (setting.cap - 1))
            alphas = (*setting.alphas[:i], alpha, *setting.alphas[i + 1 :])
            point = meter.measure(mass(alphas, setting.tau, setting.cap), "per layer")
            saved = meter.layers * (point.experts - base.experts)
            options.append(Option(point.setting.alphas[i], saved, point.loss - base.loss))
        layers.append(options)
    return Sensitivity(base, layers)


def combine(sensitivity: Sensitivity, most: int) -> list[tuple[float, ...]]:
    """α of all layers for prices λ of an expert: each layer takes its argmin of loss + λ·experts.

    If losses of layers add up, these are the best combinations for their number of experts (Lagrange); whether they
    do is measured. At most `most` of them, evenly from few experts to many.
    """
    prices = _prices(sensitivity.layers)
    chosen: dict[tuple[float, ...], None] = {}
    for price in prices:
        picks = [min(options, key=lambda o: o.loss + price * o.experts) for options in sensitivity.layers]
        chosen[tuple(option.alpha for option in picks)] = None
    chosen.pop(sensitivity.base.setting.alphas, None)
    found = list(chosen)
    return [found[i * len(found) // most] for i in range(most)] if len(found) > most else found


def _prices(layers: Sequence[Sequence[Option]]) -> list[float]:
    """A price between any two at which some layer changes its mind, and one beyond each end."""
    turns = {
        (a.loss - b.loss) / (b.experts - a.experts)
        for options in layers
        for a in options
        for b in options
        if a.experts < b.experts
    }
    ordered = sorted({0.0, *(t for t in turns if t > 0)})
    middles = [(a + b) / 2 for a, b in pairwise(ordered)]
    return [*middles, 2 * ordered[-1] + 1]


def between(a: Setting, b: Setting, share: float) -> Setting | None:
    """A mass setting on the way from a to b: geometric in α, linear in τ. None where there is no way.

    Top-k is mass with τ = 1 at its cap, top-1 with τ so small that one expert always has it.
    """
    cap = max(a.cap, b.cap)
    ends = [_tau(s, cap) for s in (a, b)]
    if ends[0] is None or ends[1] is None:
        return None
    if any(x <= 0 for x in (*a.alphas, *b.alphas)):
        return None
    alphas = tuple(x ** (1 - share) * y**share for x, y in zip(a.alphas, b.alphas, strict=True))
    return mass(alphas, (1 - share) * ends[0] + share * ends[1], cap)


def _tau(setting: Setting, cap: int) -> float | None:
    if setting.selection == "mass" and setting.cap == cap:
        return setting.tau
    if setting.selection in ("topk", "dense"):
        return 1.0 if setting.cap == cap else 0.1 if setting.cap == 1 else None
    return None
