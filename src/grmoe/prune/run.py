"""`grmoe prune` from a model's folder to results: every method, measured on the same text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from grmoe import checks
from grmoe.dial.measure import Point, increase, measure
from grmoe.dial.text import Text, default_tokens, read_text, window_length
from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.prune.choose import DROPS, MERGES, RANDOM, Method, methods, prediction_method, random_method
from grmoe.prune.gates import check_router, similarity
from grmoe.prune.measure import Divergence
from grmoe.prune.site import Layout, Site, install, sites, whole
from grmoe.prune.write import Size, size
from grmoe.runs.open import LoadedModel, open_model

DRAWS = 10  # of each random baseline


@dataclass(frozen=True)
class Plan:
    """What to do: so many experts in every layer, or as few as keep the perplexity within `increase`."""

    experts: int | None = None
    increase: float = 0.01
    text: str | None = None
    checks: Sequence[str] = ()
    tokens: int | None = None  # default: 8192, on a GPU 131072
    length: int | None = None  # default: the run's sequence length
    checkpoint: str = "best"

    def __str__(self) -> str:
        if self.experts is not None:
            return f"{self.experts} experts in every layer"
        return f"the fewest experts with a perplexity at most {100 * self.increase:g} % higher"


@dataclass(frozen=True)
class Outcome:
    """A method's model with so many experts, measured."""

    method: str
    draw: int | None  # of a random one
    layouts: tuple[Layout, ...]  # one a MoE layer
    point: Point
    divergence: float | None  # from the trained predictions, nats a token; not taken of random ones
    checks: tuple[Point, ...] = ()  # on the other texts, where this number of experts was the final one

    @property
    def experts(self) -> int:
        return len(self.layouts[0])


@dataclass(frozen=True)
class Overlaps:
    """Of all pairs of experts in one layer, as trained."""

    block: int
    least: float
    most: float


@dataclass(frozen=True)
class Result:
    opened: LoadedModel  # the model is left as `chosen` says, its configuration as it was
    plan: Plan
    text: Text
    others: list[Text]
    trained: Point
    trained_checks: list[Point]
    outcomes: list[Outcome]  # of every number of experts measured, most experts first
    experts: int  # the number the methods are compared at
    chosen: Outcome | None  # None: nothing meets the bound
    overlaps: list[Overlaps]
    before: Size
    after: Size  # with `experts`

    @property
    def final(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.experts == self.experts]


def run_prune(
    path: str | Path, plan: Plan, tick: Callable[[str, int], None] = lambda label, total: None
) -> Result:
    """tick: called after every measurement with what was measured and how many there may be at most."""
    opened = _open(path, plan)
    model = opened.model
    check_router(model.config)
    least = fewest(model.config) if plan.experts is None else _asked(plan.experts, model.config)
    length = plan.length or window_length(opened)
    tokens = plan.tokens or default_tokens(length, on_gpu=model.device.type == "cuda")
    # All text is read before anything is measured: a mistake in a name should not cost minutes.
    text = read_text(plan.text, opened, length, tokens)
    others = [read_text(source, opened, length, tokens) for source in plan.checks]
    total = _expected(model.config, least, len(others))

    def count(label: str) -> None:
        tick(label, total)

    def measured(on: Text, label: str) -> Point:
        point = measure(model, on, "pruned")
        count(label)
        return point

    trained = measured(text, "as trained")
    trained_checks = [measured(other, "as trained") for other in others]
    before, found = size(model), sites(model, text)
    overlaps = [_overlaps(site) for site in found]
    divergence = Divergence(model, text)

    def damage(label: str) -> float:
        value = divergence()
        count(label)
        return value

    outcomes: list[Outcome] = []
    chosen: Outcome | None = None
    paths = _Paths(found, lambda label: measured(text, label), damage)
    while paths.experts > least:
        reached = paths.step()
        outcomes += reached
        best = _best(plan, reached, trained)
        if best is None:
            break
        chosen = best
    experts = chosen.experts if chosen is not None else outcomes[0].experts
    for i, outcome in enumerate(outcomes):
        if others and outcome.experts == experts:
            install(found, outcome.layouts)
            outcomes[i] = replace(outcome, checks=tuple(measured(other, "check") for other in others))
    if chosen is not None:
        chosen = next(o for o in outcomes if o.method == chosen.method and o.experts == experts)
    install(found, (chosen or next(o for o in outcomes if o.experts == experts)).layouts)
    return Result(
        opened,
        plan,
        text,
        others,
        trained,
        trained_checks,
        outcomes,
        experts,
        chosen,
        overlaps,
        before,
        size(model),
    )


def fewest(config: GrmoeConfig) -> int:
    """A token needs its experts; a gate needs two."""
    assert config.num_experts_per_tok is not None
    return max(2, config.num_experts_per_tok if config.selection in ("topk", "mass") else 2)


def _asked(experts: int, config: GrmoeConfig) -> int:
    least, most = fewest(config), config.num_experts - 1
    checks.require(
        least <= experts <= most,
        f"experts must be from {least} to {most} for a model with {config.num_experts} and at most "
        f"{config.num_experts_per_tok} a token, got {experts}",
    )
    return experts


def _open(path: str | Path, plan: Plan) -> LoadedModel:
    opened = open_model(path, plan.checkpoint)
    # A run is saved in fp32 and served in bf16; on a GPU it is measured as it will be used.
    if opened.step is not None and opened.model.device.type == "cuda":
        torch.nn.Module.to(opened.model, torch.bfloat16)
    return opened


class _Paths:
    """Every method on its way to fewer experts, side by side."""

    def __init__(
        self, found: list[Site], measured: Callable[[str], Point], damage: Callable[[str], float]
    ) -> None:
        self.found, self.measured, self.damage = found, measured, damage
        self.experts = found[0].num_experts
        ways: dict[tuple[str, int | None], Method] = {
            ("prediction", None): prediction_method(lambda: damage("prediction"))
        }
        ways |= {(name, None): method for name, method in methods().items()}
        ways |= {(kind, draw): random_method(kind, draw) for kind in RANDOM for draw in range(DRAWS)}
        self.ways = ways
        start = [whole(self.experts)] * len(found)
        self.layouts: dict[tuple[str, int | None], list[Layout]] = dict.fromkeys(ways, start)

    def step(self) -> list[Outcome]:
        reached = []
        for way, method in self.ways.items():
            name, draw = way
            self.layouts[way] = method(self.found, self.layouts[way])
            install(self.found, self.layouts[way])
            point = self.measured(name)
            moved = self.damage(name) if draw is None else None
            reached.append(Outcome(name, draw, tuple(self.layouts[way]), point, moved))
        self.experts -= 1
        return reached


def _best(plan: Plan, reached: list[Outcome], trained: Point) -> Outcome | None:
    """The least moved predictions that the plan allows; chance is no method.

    Not the lowest loss: that one is partly luck, and the bound would then be read off a lucky number.
    """
    able = [o for o in reached if o.method not in RANDOM]
    if plan.experts is None:
        able = [o for o in able if increase(o.point, trained).high <= plan.increase]
    return min(able, key=_moved, default=None)


def _moved(outcome: Outcome) -> float:
    assert outcome.divergence is not None
    return outcome.divergence


def _overlaps(site: Site) -> Overlaps:
    alike = similarity(site.router)
    pairs = alike[torch.triu(torch.ones_like(alike, dtype=torch.bool), 1)]
    return Overlaps(site.block, float(pairs.min()), float(pairs.max()))


def _expected(config: GrmoeConfig, least: int, texts: int) -> int:
    own = len(methods()) + 1
    each = own + len(RANDOM) * DRAWS
    tries = sum(
        min(DROPS, n) + min(MERGES, n * (n - 1) // 2) for n in range(least + 1, config.num_experts + 1)
    )
    return (
        1 + texts * (1 + each) + (config.num_experts - least) * (each + own) + len(config.moe_layers) * tries
    )
