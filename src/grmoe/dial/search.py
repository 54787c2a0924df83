"""Which settings to measure: top-k, a grid of one α for all layers, least weights at the trained α, one α per layer by
measured sensitivity, and two other rules (`grmoe.dial.rules`).

Legend: L MoE layers, K cap (the most experts per token).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from grmoe.dial.frontier import frontier
from grmoe.dial.gates import Gates
from grmoe.dial.meter import Meter, Point
from grmoe.dial.norms import expert_norms
from grmoe.dial.rules import expected_rules, search_rules
from grmoe.dial.setting import Norms, Setting, at_least, mass, top_k
from grmoe.routing.curve import NO_WEIGHT

ALPHAS = (0.5, 1.0, 2.0, 5.0)  # the paper's
_GRID = (0.08, 0.25, 0.45, 0.65, 0.85)  # experts per token, as a share of the way from 1 to K
_MORE = (0.03, 0.16, 0.35, 0.55, 0.75, 0.93)  # in addition at the trained α, for the curve of budgets
_LEVELS = (0.1, 0.4, 0.7, 0.95)  # the same for a single layer
_BASES = 2  # uniform settings around which single layers are varied
_COMBINED = 6  # combinations of layers measured around each base


@dataclass(frozen=True)
class Option:
    """One α for one layer, and what it changes while the other layers stay."""

    alpha: float
    experts: float
    """Change of experts per token, summed over all layers: later layers see other inputs."""
    loss: float
    """Change of the loss, nats per token."""


@dataclass(frozen=True)
class Sensitivity:
    """Options of every layer around one uniform setting. The first option of a layer is its α in that setting."""

    base: Point
    layers: list[list[Option]]


def expected(layers: int, cap: int) -> int:
    """About how many settings `search` measures."""
    grid = len(ALPHAS) * (len(_GRID[::2]) + 1) + len(_GRID) + len(_MORE) + 1
    return 1 + min(cap, 8) + grid + _BASES * (layers * len(_LEVELS) + _COMBINED) + expected_rules(layers, cap)


def search(meter: Meter, gates: Gates, cap: int, experts: float | None = None) -> list[Sensitivity]:
    """Fill the meter with points. Returns what was measured about single layers.

    gates: of the model at its trained setting.
    experts: a target to aim at, in addition to the grid.
    """
    trained, L = meter.trained.setting, meter.layers
    norms = expert_norms(meter.model, meter.text)  # at the setting the model has now, the trained one
    for k in _top_ks(cap):
        meter.measure(top_k(trained.alphas, k), "top-k")
    counts = [1 + share * (cap - 1) for share in _GRID]
    for alpha in dict.fromkeys((*ALPHAS, *trained.alphas[:1])):
        for count in [*counts[::2], *([experts] if experts else [])]:
            if 1 < count < cap:
                tau = gates.tau_for([alpha] * L, count)
                meter.measure(mass((alpha,) * L, tau, cap), "uniform")
    # At the trained α, for the curve of budgets. Another α is rarely better, because it changes the weights too.
    cut = cutter(meter, gates, cap)
    for share in sorted((*_MORE, *_GRID)):
        meter.measure(cut(1 + share * (cap - 1)), "uniform" if trained.uniform else "per layer")
    if experts is not None and 1 < experts < cap:
        meter.measure(cut(experts), "uniform" if trained.uniform else "per layer")
    search_rules(meter, norms, cap, cutter(meter, gates.times(norms), cap, norms))
    if L == 1:
        return []
    found = []
    for base in _bases(meter, experts):
        sensitivity = _measure_layers(meter, gates, base)
        found.append(sensitivity)
        assert base.setting.tau is not None
        for alphas in combine(sensitivity, _COMBINED):
            meter.measure(mass(alphas, base.setting.tau, cap), "per layer")
    return found


def cutter(meter: Meter, gates: Gates, cap: int, norms: Norms | None = None) -> Callable[[float], Setting]:
    """From experts per token to a setting at the trained α.

    It drops the smallest weights of all tokens. Where weights are renormalised, a dropped one goes to the others, and
    the mass that a token holds decides instead.
    """
    alphas = meter.trained.setting.alphas
    if meter.renormalizes:
        return lambda experts: mass(alphas, gates.tau_for(alphas, experts), cap, norms)
    return lambda experts: at_least(alphas, gates.weight_for(alphas, experts), cap, norms)


def _top_ks(cap: int) -> list[int]:
    """1 … K, at most eight of them."""
    return sorted({max(1, round(cap * i / min(cap, 8))) for i in range(1, min(cap, 8) + 1)} | {1})


def _bases(meter: Meter, experts: float | None) -> list[Point]:
    """Points of the uniform frontier to start from: those nearest to the target, or evenly spread."""
    points = frontier(
        p for p in meter.points.values() if p.family == "uniform" and p.setting.selection == "mass"
    )
    if experts is not None:
        return sorted(points, key=lambda p: abs(p.experts_per_token - experts))[:_BASES]
    return [points[(2 * i + 1) * len(points) // (2 * _BASES)] for i in range(min(_BASES, len(points)))]


def _measure_layers(meter: Meter, gates: Gates, base: Point) -> Sensitivity:
    """Vary the α of one layer at a time. All others stay at `base`."""
    setting = base.setting
    assert setting.tau is not None
    layers = []
    for i, base_alpha in enumerate(setting.alphas):
        options = [Option(base_alpha, 0.0, 0.0)]
        for share in _LEVELS:
            alpha = gates.alpha_for(i, setting.tau, 1 + share * (setting.cap - 1))
            alphas = (*setting.alphas[:i], alpha, *setting.alphas[i + 1 :])
            point = meter.measure(mass(alphas, setting.tau, setting.cap), "per layer")
            change = meter.layers * (point.experts_per_token - base.experts_per_token)
            options.append(Option(point.setting.alphas[i], change, point.loss - base.loss))
        layers.append(options)
    return Sensitivity(base, layers)


def combine(sensitivity: Sensitivity, max_count: int) -> list[tuple[float, ...]]:
    """α of all layers for prices λ of an expert: each layer takes its argmin of loss + λ·experts.

    If the losses of layers add up, these are the best combinations for their number of experts (Lagrange). Whether
    they add up is measured afterwards. Returns at most `max_count`, evenly spread from few experts to many.
    """
    chosen: dict[tuple[float, ...], None] = {}
    for price in _prices(sensitivity.layers):
        picks = [min(options, key=lambda o: o.loss + price * o.experts) for options in sensitivity.layers]
        chosen[tuple(option.alpha for option in picks)] = None
    chosen.pop(sensitivity.base.setting.alphas, None)
    found = list(chosen)
    count = min(max_count, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def _prices(layers: Sequence[Sequence[Option]]) -> list[float]:
    """One price in each interval in which no layer changes its choice."""
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


def halfway(a: Setting, b: Setting) -> Setting | None:
    """The setting in the middle of two: geometric in α, linear in τ or in the weight. None if they cannot be joined.

    Top-k is mass with τ = 1 at its cap, and top-1 mass with τ = 0. By weight, they are nothing and all of it. A k per
    layer has no neighbours.
    """
    if a.norms != b.norms or a.caps or b.caps:
        return None
    cap = max(a.cap, b.cap)
    if "at_least" in (a.selection, b.selection):
        ends = [_weight(setting, cap) for setting in (a, b)]
        if None in ends or a.alphas != b.alphas:
            return None
        return at_least(a.alphas, sum(end for end in ends if end is not None) / 2, cap, a.norms)
    start, end = _tau(a, cap), _tau(b, cap)
    if start is None or end is None or any(x <= 0 for x in (*a.alphas, *b.alphas)):
        return None
    alphas = tuple((x * y) ** 0.5 for x, y in zip(a.alphas, b.alphas, strict=True))
    return mass(alphas, (start + end) / 2, cap, a.norms)


def _weight(setting: Setting, cap: int) -> float | None:
    """The least weight of the "at_least" setting with this cap that selects the same experts; None if there is none."""
    if setting.selection == "at_least" and setting.cap == cap:
        return setting.tau
    if setting.selection == "topk":
        return NO_WEIGHT if setting.cap == cap else 1.0 if setting.cap == 1 else None
    return None


def _tau(setting: Setting, cap: int) -> float | None:
    """τ of the mass setting with this cap that selects the same experts; None if there is none."""
    if setting.selection == "mass" and setting.cap == cap:
        return setting.tau
    if setting.selection in ("topk", "dense"):
        return 1.0 if setting.cap == cap else 0.0 if setting.cap == 1 else None
    return None
