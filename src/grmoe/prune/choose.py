"""Which expert goes next: one rule a method, each step takes one expert from every layer.

Legend: T tokens, G groups of a layer's present layout, D model width.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Protocol

import torch
from torch import Tensor

from grmoe.prune.gates import route, similarity
from grmoe.prune.site import Layout, Site, combine, dropped, merged
from grmoe.prune.units import outputs

DROPS, MERGES = 8, 4  # candidates of a layer that are measured in the model, the best by its output
RANDOM = ("random drop", "random merge")

Rule = Callable[[Site, Layout], Layout]


class Method(Protocol):
    """Layouts of all layers with one group fewer in each."""

    def __call__(self, found: Sequence[Site], layouts: Sequence[Layout]) -> list[Layout]: ...


def methods() -> dict[str, Method]:
    """What a model may be pruned by, without the one that looks at predictions."""
    return {
        "overlap merge": _everywhere(overlap_merge),
        "overlap drop": _everywhere(overlap_drop),
        "output merge": _everywhere(lambda site, layout: output_merges(site, layout)[0]),
        "output drop": _everywhere(lambda site, layout: output_drops(site, layout)[0]),
        "load drop": _everywhere(load_drop),
    }


def random_method(kind: str, seed: int) -> Method:
    """One draw of a baseline: its choices follow from the seed alone."""
    draw = random.Random(seed)

    def drop(site: Site, layout: Layout) -> Layout:
        return dropped(layout, draw.randrange(len(layout)))

    def merge(site: Site, layout: Layout) -> Layout:
        a, b = draw.sample(range(len(layout)), 2)
        return merged(layout, a, b)

    return _everywhere({"random drop": drop, "random merge": merge}[kind])


def _everywhere(rule: Rule) -> Method:
    def step(found: Sequence[Site], layouts: Sequence[Layout]) -> list[Layout]:
        return [rule(site, layout) for site, layout in zip(found, layouts, strict=True)]

    return step


# -- by the gate alone -----------------------------------------------------------------------------------------


def overlap_merge(site: Site, layout: Layout) -> Layout:
    """The two that ask for the same tokens most become one."""
    return merged(layout, *_nearest(site, layout))


def overlap_drop(site: Site, layout: Layout) -> Layout:
    """The less loaded of these two goes."""
    load_G = loads(site, layout)
    return dropped(layout, min(_nearest(site, layout), key=lambda g: load_G[g]))


def load_drop(site: Site, layout: Layout) -> Layout:
    load_G = loads(site, layout)
    return dropped(layout, min(range(len(layout)), key=lambda g: load_G[g]))


def loads(site: Site, layout: Layout) -> list[float]:
    """The load the groups had in the trained model."""
    return [float(site.load_N[list(group)].sum()) for group in layout]


def _nearest(site: Site, layout: Layout) -> tuple[int, int]:
    alike = similarity(site.gate(layout)).tolist()
    pairs = combinations(range(len(layout)), 2)
    return max(pairs, key=lambda pair: alike[pair[0]][pair[1]])


# -- by what experts do to calibration tokens ------------------------------------------------------------------


@torch.no_grad()
def output_drops(site: Site, layout: Layout) -> list[Layout]:
    """One group dropped, the smallest change of the trained layer's output first. Tokens go to the groups that stay."""
    target_TD = site.output()
    f_GTD = outputs(site.weights(layout), site.x_TD)
    errors = []
    for g in range(len(layout)):
        keep = [h for h in range(len(layout)) if h != g]
        y_TD = combine(route(site.gate(dropped(layout, g)), site.x_TD), f_GTD[keep])
        errors.append(float((y_TD - target_TD).square().sum()))
    order = sorted(range(len(layout)), key=lambda g: errors[g])
    return [dropped(layout, g) for g in order]


@torch.no_grad()
def output_merges(site: Site, layout: Layout) -> list[Layout]:
    """Two groups merged, the most alike in output first.

    Of a token with weights w_i, w_j a merged expert f̄ computes (w_i + w_j)f̄. With the load-weighted mean of the two
    outputs, f̄ = l_i f_i + l_j f_j (l_i + l_j = 1), it is off by (w_i l_j − w_j l_i)(f_i − f_j): the squares of that,
    summed over tokens, say what the best average could cost. What merged weights really give is another matter.
    """
    w_TG = route(site.gate(layout), site.x_TD).float()
    f_GTD, load_G = outputs(site.weights(layout), site.x_TD), loads(site, layout)
    cost = {}
    for i in range(len(layout)):
        far_GT = (f_GTD - f_GTD[i]).square().sum(-1)
        for j in range(i + 1, len(layout)):
            both = max(load_G[i] + load_G[j], 1e-12)
            off_T: Tensor = (w_TG[:, i] * load_G[j] - w_TG[:, j] * load_G[i]) / both
            cost[i, j] = float((off_T.square() * far_GT[j]).sum())
    return [merged(layout, *pair) for pair in sorted(cost, key=lambda pair: cost[pair])]


# -- by what the model predicts --------------------------------------------------------------------------------


def prediction_method(damage: Callable[[], float]) -> Method:
    """Layer by layer, from the first: of the candidates with the best outputs, drops and merges, the least damage.

    damage: of the model as it stands, on calibration text.
    """

    def step(found: Sequence[Site], layouts: Sequence[Layout]) -> list[Layout]:
        now = list(layouts)
        for site, layout in zip(found, layouts, strict=True):
            site.install(layout)
        for i, (site, layout) in enumerate(zip(found, layouts, strict=True)):
            candidates = output_drops(site, layout)[:DROPS] + output_merges(site, layout)[:MERGES]
            found_damage = []
            for candidate in candidates:
                site.install(candidate)
                found_damage.append(damage())
            now[i] = candidates[found_damage.index(min(found_damage))]
            site.install(now[i])
        return now

    return step
