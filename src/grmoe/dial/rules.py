"""Rules beside τ and α, measured at a handful of budgets: top-k with a k per layer, and experts by gate × norm.

Legend: L MoE layers, K cap (the most experts per token).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grmoe.dial.meter import Meter
from grmoe.dial.setting import Norms, Setting, k_per_layer, top_k

_COMBINED = 4  # settings with a k per layer, besides single layers
_SHARES = (0.08, 0.25, 0.5, 0.75)  # experts per token by gate × norm, as a share of the way from 1 to K


def expected_rules(layers: int, cap: int) -> int:
    """The most settings that `search_rules` measures."""
    turned = layers * len(_levels(cap))
    return (turned + min(_COMBINED, turned) if layers > 1 else 0) + len(_SHARES) + 2


def search_rules(meter: Meter, norms: Norms, cap: int, cut: Callable[[float], Setting]) -> None:
    """Fill the meter with points of both rules, at the trained α.

    cut: from experts per token to a setting that chooses by gate × norm.
    """
    alphas = meter.trained.setting.alphas
    if meter.layers > 1:
        _search_k(meter, alphas, cap)
    for k in (1, cap):
        meter.measure(top_k(alphas, k, norms), "gate × norm")
    for share in _SHARES:
        meter.measure(cut(1 + share * (cap - 1)), "gate × norm")


def _search_k(meter: Meter, alphas: tuple[float, ...], cap: int) -> None:
    """Lower each layer alone, then all of them in the order of what they lose."""
    levels, L = [cap, *_levels(cap)], meter.layers
    full = meter.measure(top_k(alphas, cap), "top-k").loss
    losses = []
    for i in range(L):
        alone = [k_per_layer(alphas, [level if j == i else cap for j in range(L)]) for level in levels[1:]]
        losses.append([full, *(meter.measure(setting, "k per layer").loss for setting in alone)])
    settings = [k_per_layer(alphas, caps) for caps in lowered(levels, losses)]
    fresh = [setting for setting in settings if setting not in meter.points]
    count = min(_COMBINED, len(fresh))
    for i in range(count):
        meter.measure(fresh[(2 * i + 1) * len(fresh) // (2 * count)], "k per layer")


def _levels(cap: int) -> list[int]:
    """Other k of a layer: half of K, and one."""
    return sorted({1, (cap + 1) // 2} - {cap}, reverse=True)


def lowered(levels: Sequence[int], losses: Sequence[Sequence[float]]) -> list[tuple[int, ...]]:
    """k of every layer, step by step from all at the first level to all at the last.

    levels: descending. losses: of each layer, the loss with that layer alone at each level.
    Each step lowers the layer that adds the least loss per expert saved. If the losses of layers add up, each step is
    the best for its number of experts.
    """
    at = [0] * len(losses)
    found = []
    while any(place < len(levels) - 1 for place in at):
        prices = {
            (i, new): (losses[i][new] - losses[i][old]) / (levels[old] - levels[new])
            for i, old in enumerate(at)
            for new in range(old + 1, len(levels))
        }
        layer, new = min(prices, key=lambda turn: prices[turn])
        at[layer] = new
        found.append(tuple(levels[place] for place in at))
    return found
