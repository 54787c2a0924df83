"""Which experts go next. A method takes one expert from every layer per step.

Legend: T tokens, G groups of a layer's present layout, D model width.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from torch import Tensor

from grmoe.prune.gates import combine_weights, similarity
from grmoe.prune.layers import Layout, PrunableLayer, combine, drop, install, merge
from grmoe.prune.units import outputs

MAX_DROPS, MAX_MERGES = 8, 4  # candidates per layer that the prediction method measures, the best by output
RANDOM = ("random drop", "random merge")

# One group fewer in one layer.
Rule = Callable[[PrunableLayer, Layout], Layout]
# One group fewer in every layer.
Method = Callable[[Sequence[PrunableLayer], Sequence[Layout]], list[Layout]]


def methods() -> dict[str, Method]:
    """The methods that need no more than a layer's own tokens and outputs."""
    return {
        "overlap merge": everywhere(overlap_merge),
        "overlap drop": everywhere(_overlap_drop),
        "output merge": everywhere(lambda layer, layout: _output_merges(layer, layout)[0]),
        "output drop": everywhere(lambda layer, layout: output_drops(layer, layout)[0]),
        "load drop": everywhere(_load_drop),
    }


def random_method(kind: str, seed: int) -> Method:
    """One draw of a random baseline. Its choices depend on the seed alone."""
    draw = random.Random(seed)

    def random_drop(layer: PrunableLayer, layout: Layout) -> Layout:
        return drop(layout, draw.randrange(len(layout)))

    def random_merge(layer: PrunableLayer, layout: Layout) -> Layout:
        return merge(layout, *draw.sample(range(len(layout)), 2))

    return everywhere({"random drop": random_drop, "random merge": random_merge}[kind])


def everywhere(rule: Rule) -> Method:
    """A method that follows a rule in each layer on its own."""

    def step(layers: Sequence[PrunableLayer], layouts: Sequence[Layout]) -> list[Layout]:
        return [rule(layer, layout) for layer, layout in zip(layers, layouts, strict=True)]

    return step


# -- by the gate alone -----------------------------------------------------------------------------------------


def overlap_merge(layer: PrunableLayer, layout: Layout) -> Layout:
    """Merge the two groups with the most similar gates."""
    return merge(layout, *_most_similar(layer, layout))


def _overlap_drop(layer: PrunableLayer, layout: Layout) -> Layout:
    """Drop the less loaded of these two."""
    load_G = loads(layer, layout)
    return drop(layout, min(_most_similar(layer, layout), key=lambda g: load_G[g]))


def _load_drop(layer: PrunableLayer, layout: Layout) -> Layout:
    """Drop the least loaded group."""
    load_G = loads(layer, layout)
    return drop(layout, min(range(len(layout)), key=lambda g: load_G[g]))


def loads(layer: PrunableLayer, layout: Layout) -> list[float]:
    """Load of each group in the trained model."""
    return [float(layer.load_N[list(group)].sum()) for group in layout]


def _most_similar(layer: PrunableLayer, layout: Layout) -> tuple[int, int]:
    similar_GG = similarity(layer.small_router(layout)).tolist()
    pairs = combinations(range(len(layout)), 2)
    return max(pairs, key=lambda pair: similar_GG[pair[0]][pair[1]])


# -- by what experts compute on calibration tokens -------------------------------------------------------------


@torch.no_grad()
def output_drops(layer: PrunableLayer, layout: Layout) -> list[Layout]:
    """All drops of one group, the smallest change of the trained layer's output first."""
    target_TD = layer.output()
    f_GTD = outputs(layer.small_experts(layout), layer.x_TD)
    errors = []
    for g in range(len(layout)):
        keep = [h for h in range(len(layout)) if h != g]
        # Tokens of the dropped group go to the groups that stay.
        weights_TG = combine_weights(layer.small_router(drop(layout, g)), layer.x_TD)
        errors.append(float((combine(weights_TG, f_GTD[keep]) - target_TD).square().sum()))
    order = sorted(range(len(layout)), key=lambda g: errors[g])
    return [drop(layout, g) for g in order]


@torch.no_grad()
def _output_merges(layer: PrunableLayer, layout: Layout) -> list[Layout]:
    """All merges of two groups, the cheapest first.

    For a token with weights w_i, w_j a merged expert f̄ contributes (w_i + w_j)f̄. With the load-weighted mean of the
    outputs, f̄ = l_i f_i + l_j f_j (l_i + l_j = 1), the error is (w_i l_j − w_j l_i)(f_i − f_j). The cost is its square,
    summed over tokens. Averaging weights instead of outputs costs more; this is an estimate for ranking.
    """
    w_TG = combine_weights(layer.small_router(layout), layer.x_TD).float()
    f_GTD, load_G = outputs(layer.small_experts(layout), layer.x_TD), loads(layer, layout)
    cost = {}
    for i in range(len(layout)):
        distance_GT = (f_GTD - f_GTD[i]).square().sum(-1)
        for j in range(i + 1, len(layout)):
            both = max(load_G[i] + load_G[j], 1e-12)
            off_T: Tensor = (w_TG[:, i] * load_G[j] - w_TG[:, j] * load_G[i]) / both
            cost[i, j] = float((off_T.square() * distance_GT[j]).sum())
    return [merge(layout, *pair) for pair in sorted(cost, key=lambda pair: cost[pair])]


# -- by what the model predicts --------------------------------------------------------------------------------


def prediction_method(damage: Callable[[], float]) -> Method:
    """Layer by layer, from the first: measure the drops and merges with the best outputs, keep the least damage.

    damage: of the model as it is now, on calibration text.
    """

    def step(layers: Sequence[PrunableLayer], layouts: Sequence[Layout]) -> list[Layout]:
        install(layers, layouts)
        chosen = []
        for layer, layout in zip(layers, layouts, strict=True):
            candidates = output_drops(layer, layout)[:MAX_DROPS] + _output_merges(layer, layout)[:MAX_MERGES]
            damages = []
            for candidate in candidates:
                layer.install(candidate)
                damages.append(damage())
            chosen.append(candidates[damages.index(min(damages))])
            layer.install(chosen[-1])
        return chosen

    return step
