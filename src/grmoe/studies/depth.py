"""κ and entropy by layer over seeds, and the paper's idea to set α by depth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

from grmoe.pictures import COLORS, two_panels
from grmoe.studies import kappa_start
from grmoe.studies.judging import MIN_SEEDS, above, below, changed, in_doubt
from grmoe.studies.kappa_start import Kappas, by_start, literal_kappas
from grmoe.studies.measured import MeasuredStudy, Models, labels, read_measured
from grmoe.studies.measuring import Measured
from grmoe.studies.model_analysis import AMORTISED, BY_DEPTH, EXCHANGED, GROUP, KIND, TAU
from grmoe.studies.models.summary import Mean, mean, show_mean
from grmoe.studies.page import Claim, Figure, Page, Verdict
from grmoe.tables import Table

VALUES = "Appendix, Learned Concentration Values"
LAYERS = "Appendix, Per-Layer Sparsity Analysis"
RANGES = ((0.8, 1.5), (0.4, 4.2))  # κ of the paper's first and last layer
OURS = "With our prior, scaling, hinge and amortiser."


def by_layer(runs: Sequence[Measured], value: Any) -> list[list[float]]:
    """Layers × seeds."""
    if not runs:
        return []
    return [[value(run.body["layers"][i]) for run in runs] for i in range(len(runs[0].body["layers"]))]


def kappa_mean(layer: dict[str, Any]) -> float:
    return fmean(layer["kappa"])


def kappa_variance(layer: dict[str, Any]) -> float:
    return pvariance(layer["kappa"])


def entropy(layer: dict[str, Any]) -> float:
    return float(layer["entropy"])


def equal_alpha_loss(rows: Sequence[dict[str, Any]], experts: float) -> float | None:
    """Loss at equal α for this number of experts per token, between the two measured ones beside it."""
    points = sorted((r["experts_per_token"], r["loss"]) for r in rows if r["name"].startswith("α "))
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= experts <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (experts - x0) / (x1 - x0)
    return None


def cost(body: dict[str, Any], name: str) -> float | None:
    """Loss of a setting minus that of equal α with as many experts per token."""
    row = next(r for r in body["settings"] if r["name"] == name)
    equal = equal_alpha_loss(body["settings"], row["experts_per_token"])
    return None if equal is None else row["loss"] - equal


def write(models: Models, literal: Kappas = ()) -> Page:
    """literal: κ of the paper's literal gate."""
    return Page(
        claims=_claims(models[AMORTISED.name], literal),
        tables=[_layer_table(models), _alpha_table(models)] if any(models.values()) else [],
        figures=[
            Figure("depth", "κ and entropy by layer: mean and range over seeds", lambda p: _draw(models, p))
        ]
        if any(models.values())
        else [],
        notes=[
            "Claims are judged on GrMoE with an amortiser, as the paper's; ours reads the energies, the paper's the "
            "token. The paper reports the 1.3B model with 12 MoE layers after 150 K steps; here it is `small`.",
            "The paper's 1.3B model has 24 blocks with MoE in every even one, up to block 24. Its appendix calls layer "
            "12 the latest.",
            "κ multiplies another energy here: (d/k)·‖Uᵀx‖²/‖x‖² in place of ‖Uᵀx‖².",
            "α by depth: the first half of the MoE layers is early. Experts are chosen by the mass rule "
            f"(τ = {TAU:g}), because under top-k α does not change how many compute. The loss is compared with that "
            "of equal α at the same number of experts per token, interpolated between measured ones.",
        ],
    )


def _rises(layers: Sequence[Sequence[float]], sign: int = 1) -> tuple[Verdict, Mean | None]:
    """(verdict, last minus first) of "it rises with depth": last minus first is above zero, and every mean rises.

    It fails if it falls from one layer to the next with an interval that excludes zero. sign: −1 of "it falls".
    """
    if not layers:
        return Verdict.OPEN, None
    change, *steps = (
        mean(sign * (b - a) for a, b in zip(lower, upper, strict=True))
        for lower, upper in ((layers[0], layers[-1]), *pairwise(layers))
    )
    verdict = above(change)
    if any(above(step) is Verdict.FAILS for step in steps):
        verdict = Verdict.FAILS
    elif verdict is Verdict.HOLDS and any(step is not None and step.value < 0 for step in steps):
        verdict = Verdict.UNDECIDED
    return verdict, change


def _near(found: Sequence[float], paper: tuple[float, float]) -> bool:
    """Of a range: both ends are within a factor of two of the paper's."""
    return all(0.5 <= end / said <= 2 for end, said in zip((min(found), max(found)), paper, strict=True))


def _both_near(ends: Sequence[Sequence[float]], seeds: int) -> Verdict:
    """Of κ in the first and in the last layer."""
    if seeds < MIN_SEEDS:
        return Verdict.OPEN
    return Verdict.HOLDS if all(map(_near, ends, RANGES)) else Verdict.FAILS


def _ranges(runs: Sequence[Measured], literal: Kappas) -> Claim:
    ours = [[kappa for run in runs for kappa in run.body["layers"][i]["kappa"]] for i in (0, -1)]
    theirs = [[end for layers in literal for end in layers[i]] for i in (0, -1)]
    parts = [
        f"{name}: last {min(last):.2f} to {max(last):.2f}, first {min(first):.2f} to {max(first):.2f}"
        for name, (first, last) in (("literal gate", theirs), ("ours", ours))
        if first
    ]
    return Claim(
        f"{VALUES}; Token-Level Routing Details",
        "κ ranges from 0.4 to 4.2 in the last layer and from 0.8 to 1.5 in the first",
        "; ".join(parts),
        by_start(_both_near(theirs, len(literal)), _both_near(ours, len(runs)), literal),
        "All experts of the last and of the first MoE layer, all seeds. The four ends must be within a factor of two. "
        f"{kappa_start.REASON} {OURS}",
    )


def _list(layers: Sequence[Sequence[float]], digits: int) -> str:
    return ", ".join(f"{fmean(values):.{digits}f}" for values in layers)


def _claims(runs: Sequence[Measured], literal: Kappas = ()) -> list[Claim]:
    means, variances, entropies = (by_layer(runs, f) for f in (kappa_mean, kappa_variance, entropy))
    rising, kappa_change = _rises(means)
    spreading, variance_change = _rises(variances)
    falling, entropy_change = _rises(entropies, -1)
    gain, other = (
        mean(value for run in runs if (value := cost(run.body, name)) is not None)
        for name in (BY_DEPTH, EXCHANGED)
    )
    order = mean(
        a - b
        for run in runs
        if (a := cost(run.body, BY_DEPTH)) is not None and (b := cost(run.body, EXCHANGED)) is not None
    )
    return [
        Claim(
            VALUES,
            "The mean κ rises monotonically with depth: 1.1, 1.5, 2.1 in layers 2, 6, 12",
            _list(means, 2),
            changed(rising),
            "Means over experts and seeds, layer by layer; only the direction decides. "
            f"{in_doubt(kappa_change, 'Of the last layer minus the first, by seed')} {OURS}",
        ),
        Claim(
            VALUES,
            "Its variance across experts rises with depth",
            _list(variances, 3),
            changed(spreading),
            f"{in_doubt(variance_change, 'Of the last layer minus the first, by seed')} {OURS}",
        ),
        _ranges(runs, literal),
        Claim(
            LAYERS,
            "Entropy falls with depth: 1.65 in early layers, 1.15 in late ones",
            _list(entropies, 2),
            changed(falling),
            "Means over seeds, layer by layer; only the direction decides. The paper's are 60 % and 41 % of its log N. "
            f"{in_doubt(entropy_change, 'Of the first layer minus the last, by seed')} {OURS}",
        ),
        Claim(
            LAYERS,
            "α = 0.8 in early and 1.5 in late layers could improve on equal α",
            show_mean(gain, 4, "+") if gain else "",
            changed(below(gain)),
            f"Loss minus that of equal α with as many experts per token, by seed. {in_doubt(gain)} {OURS}",
        ),
        Claim(
            "Conclusion",
            "Early layers benefit from more experts, later ones tolerate fewer",
            f"{show_mean(order, 4, '+')} (exchanged, against equal α: {show_mean(other, 4, '+')})"
            if order
            else "",
            changed(below(order)),
            "The loss above equal α, of (0.8 early, 1.5 late) minus that of (1.5 early, 0.8 late), by seed. "
            f"{in_doubt(order)} {OURS}",
        ),
    ]


def _layer_table(models: Models) -> Table:
    headings = ["κ, mean", "κ, variance", "κ, range", "H"]
    table = Table("By MoE layer: means over seeds", ["model", "layer", "seeds", *headings])
    for name, runs in models.items():
        columns = [by_layer(runs, f) for f in (kappa_mean, kappa_variance, entropy)]
        for i, (means, variances, entropies) in enumerate(zip(*columns, strict=True)):
            kappas = [kappa for run in runs for kappa in run.body["layers"][i]["kappa"]]
            table.add(
                labels(GROUP)[name], str(runs[0].body["layers"][i]["layer"]), str(len(runs)),
                show_mean(mean(means), 2), show_mean(mean(variances), 3), f"{min(kappas):.2f} to {max(kappas):.2f}",
                show_mean(mean(entropies), 2),
            )  # fmt: skip
    return table


def _alpha_table(models: Models) -> Table:
    table = Table(
        f"α by depth under the mass rule (τ = {TAU:g}): means over seeds",
        ["model", "α", "experts per token", "loss", "minus equal α at as many experts"],
        left=2,
    )
    for name, runs in models.items():
        for setting in (row["name"] for row in runs[0].body["settings"]) if runs else ():
            rows = [r for run in runs for r in run.body["settings"] if r["name"] == setting]
            costs = [cost(run.body, setting) for run in runs]
            found = mean(c for c in costs if c is not None) if setting in (BY_DEPTH, EXCHANGED) else None
            table.add(
                labels(GROUP)[name], setting.removeprefix("α "),
                show_mean(mean(r["experts_per_token"] for r in rows), 2),
                show_mean(mean(r["loss"] for r in rows), 4), show_mean(found, 4, "+"),
            )  # fmt: skip
    return table


def _draw(models: Models, path: Path) -> None:
    with two_panels(path) as (left, right):
        for color, (name, runs) in zip(COLORS, models.items(), strict=False):
            places = [layer["layer"] for layer in runs[0].body["layers"]] if runs else []
            for ax, value, title in (
                (left, kappa_mean, "mean κ"),
                (right, entropy, "entropy of the gate, nats"),
            ):
                found = by_layer(runs, value)
                if found:
                    ax.fill_between(
                        places, [min(v) for v in found], [max(v) for v in found], color=color, alpha=0.2, lw=0
                    )
                    ax.plot(
                        places, [fmean(v) for v in found], color=color, marker="o", label=labels(GROUP)[name]
                    )
                ax.set(title=title, xlabel="layer")
                if places:
                    ax.set_xticks(places)
        left.legend(frameon=False)


class Depth(MeasuredStudy):
    """One claim also reads the models of the paper's literal gate that other studies train."""

    def page(self, results: Path) -> Page:
        return write(read_measured(results, self.kind, self.group), literal_kappas(results))


STUDY = Depth(
    name="depth",
    title="κ and entropy by layer",
    where="Appendix: Learned Concentration Values, Per-Layer Sparsity Analysis",
    kind=KIND,
    group=GROUP,
    write=write,
)
