"""At the measured throughput of a softmax model: does one GrMoE model lose less?"""

from __future__ import annotations

from dataclasses import dataclass

from grmoe.studies.benchmarks import Measured
from grmoe.studies.judging import MIN_SEEDS, all_of, any_of, below, changed, with_change
from grmoe.studies.models.recipes import Recipe
from grmoe.studies.models.summary import Mean, mean, mean_of, rows_by_seed, show_mean
from grmoe.studies.page import Claim, Verdict
from grmoe.studies.post_hoc.models import (
    LITERAL,
    OURS,
    RETRAINED,
    Models,
    Speeds,
    name_of,
    relative,
    times,
)
from grmoe.studies.throughput import AS_FAST, loss_at, speed_ratio
from grmoe.tables import Table


@dataclass(frozen=True)
class Place:
    """A GrMoE model at the throughput of a softmax model, if its own throughput is one number."""

    gap: Mean | None
    """Loss minus that of the softmax model, by seed."""
    reached: bool
    """Whether it can be as fast."""
    seeds: int
    """Of the GrMoE model, as fast or not."""

    @property
    def verdict(self) -> Verdict:
        """Of "it loses less"."""
        if self.reached:
            return below(self.gap)
        return Verdict.FAILS if self.seeds >= MIN_SEEDS else Verdict.OPEN


@dataclass(frozen=True)
class Matched:
    """The same where throughput has an interval."""

    low: Place
    middle: Place
    high: Place
    fastest: Measured
    """Its largest throughput over that of the softmax model."""

    @property
    def verdict(self) -> Verdict:
        """Both ends of the throughput must say the same."""
        ends = {self.low.verdict, self.high.verdict}
        return ends.pop() if len(ends) == 1 else Verdict.OPEN if Verdict.OPEN in ends else Verdict.UNDECIDED

    def show(self) -> str:
        if self.low.reached:
            return show_mean(self.middle.gap, 4, "+")
        if self.high.reached:
            return f"as fast in some rounds only, {times(self.fastest)}"
        return f"not as fast, {times(self.fastest)}"


def matched(models: Models, speeds: Speeds, recipe: Recipe, setting: str) -> Matched | None:
    """A GrMoE model at the throughput of the softmax model of this setting. None if one of them was not timed."""
    other = RETRAINED[setting]
    wanted = speeds.get((other.name, setting))
    if wanted is None:
        return None
    ratios = {s: speed_ratio(speed, wanted) for (name, s), speed in speeds.items() if name == recipe.name}
    if not ratios:
        return None
    theirs = rows_by_seed(models[other.name], setting=setting)

    def place(speeds: dict[str, float]) -> Place:
        found = {run.seed: loss_at(run, speeds, 1.0) for run in models[recipe.name]}
        gaps = [loss - theirs[s].loss for s, loss in found.items() if loss is not None and s in theirs]
        return Place(mean(gaps), None not in found.values(), len(found))

    return Matched(
        low=place({s: ratio.low for s, ratio in ratios.items()}),
        middle=place({s: ratio.value for s, ratio in ratios.items()}),
        high=place({s: ratio.high for s, ratio in ratios.items()}),
        fastest=max(ratios.values(), key=lambda ratio: ratio.value),
    )


def matched_table(models: Models, speeds: Speeds) -> Table:
    table = Table(
        "At the measured throughput of a softmax model: loss minus that model's, by seed",
        ["softmax model", "its throughput", "its loss", *map(name_of, (LITERAL, *OURS))],
    )
    for setting, other in RETRAINED.items():
        found = [matched(models, speeds, recipe, setting) for recipe in (LITERAL, *OURS)]
        table.add(
            other.label if other.label.endswith(setting) else f"{other.label}, {setting}",
            times(relative(speeds, other, setting)),
            show_mean(mean_of(models[other.name], lambda row: row.loss, setting=setting), 4),
            *("–" if each is None else each.show() for each in found),
        )
    return table


def dominates(models: Models, speeds: Speeds) -> Claim:
    shown, verdicts = [], []
    for recipe in (LITERAL, *OURS):
        found = {setting: matched(models, speeds, recipe, setting) for setting in RETRAINED}
        verdicts.append(all_of(Verdict.OPEN if m is None else m.verdict for m in found.values()))
        shown += [
            f"{name_of(recipe)}, {setting}: {m.show()}"
            for setting, m in found.items()
            if m is not None and (m.middle.gap is not None or not m.middle.reached)
        ]
    literal, *ours = verdicts
    return Claim(
        "Figure 4, Appendix, Pareto Frontier",
        "One GrMoE model dominates separately trained softmax models at every throughput, by 0.5 to 0.8 of perplexity "
        "(2.7 to 4.3 % of 18.7)",
        "; ".join(shown),
        changed(with_change(literal, any_of(ours))),
        "Loss minus that of the softmax model at its measured throughput, between the measured settings of GrMoE, by "
        "seed. Every interval must be below zero, at both ends of the ratio of the two throughputs: the middle 80 % of "
        f"rounds in which all models take turns. As fast is at most {100 * AS_FAST:g} % slower. Only the sign decides; "
        "the paper's numbers are .027 to .043 nats. The paper's gate with its dense sum decides first. The changes: a "
        "bias balances the softmax models; what holds for ours alone has our prior, scaling and hinge, and random "
        "budgets in training if the model trained dense does not do it.",
    )
