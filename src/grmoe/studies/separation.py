"""Theorem "Collapse Resistance" and Corollary "Top-k Mass Control" on trained models: do they say anything?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from grmoe.studies.judging import MIN_SEEDS, changed
from grmoe.studies.measured import MeasuredStudy, Models, labels
from grmoe.studies.measuring import Measured
from grmoe.studies.metrics import metric_claims
from grmoe.studies.model_analysis import GROUP, KIND
from grmoe.studies.models.summary import Mean, mean, show_mean
from grmoe.studies.page import Claim, Page, Verdict
from grmoe.tables import Table

THEOREM = "Theorem 2"
COROLLARY = "Corollary 1"
CHANGE = "With our prior, scaling and hinge."


def write(models: Models) -> Page:
    return Page(
        claims=[*_theorem(models), _corollary(models), *metric_claims()],
        tables=[_gap_table(models), _mass_table(models)] if any(models.values()) else [],
        notes=[
            "The own expert of a token is that of its largest affinity. γ is the least such affinity over all tokens, "
            "ργ the largest affinity to any other expert. If the hypothesis Δ = γ(κ_min − ρκ_max) > 0 holds for any "
            "sorting of tokens by expert, it holds for this one. With a prior, the range of log p(z = e) is subtracted "
            "from Δ.",
            "With 5 % left out, γ and ργ are quantiles: at most 5 % of the tokens break one of them. The theorem "
            "allows none.",
            "With the paper's own numbers the hypothesis fails: κ from 0.4 to 4.2 gives κ_min − ρκ_max = "
            "0.4 − 0.28·4.2 = −0.78, if its largest overlap, 0.28, is taken for ρ.",
        ],
    )


def _layers(runs: Iterable[Measured]) -> Iterator[tuple[Measured, dict[str, Any]]]:
    return ((run, layer) for run in runs for layer in run.body["layers"])


def _by_layer(runs: Sequence[Measured]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for _, layer in _layers(runs):
        found.setdefault(layer["layer"], []).append(layer)
    return found


def _gap_table(models: Models) -> Table:
    headings = [
        "γ",
        "ρ",
        "Δ",
        "Δ > 0",
        "Δ, 5 % left out",
        "Δ > 0",
        "tokens with Δ > 0",
        "load CV",
        "Δ needed",
    ]
    table = Table("Theorem 2 by layer: means over seeds", ["model", "layer", "seeds", *headings])
    for name, runs in models.items():
        for place, layers in _by_layer(runs).items():
            found = [layer["separation"] for layer in layers]
            strict, loose = ([f["gaps"][i] for f in found] for i in (0, 1))
            table.add(
                labels(GROUP)[name], str(place), str(len(found)),
                show_mean(mean(g["gamma"] for g in strict), 3), show_mean(mean(g["rho"] for g in strict), 2),
                show_mean(mean(g["gap"] for g in strict), 2), f"{sum(f['holds'] for f in found)}/{len(found)}",
                show_mean(mean(g["gap"] for g in loose), 2), f"{sum(g['holds'] for g in loose)}/{len(loose)}",
                f"{100 * _value(mean(f['leading_tokens'] for f in found)):.0f} %",
                show_mean(mean(f["load_cv"] for f in found), 3), show_mean(_needed(found), 2),
            )  # fmt: skip
    return table


def _value(found: Mean | None) -> float:
    return float("nan") if found is None else found.value


def _needed(found: Sequence[dict[str, Any]]) -> Mean | None:
    return mean(f["gap_needed"] for f in found if f["gap_needed"] is not None)


def _mass_table(models: Models) -> Table:
    headings = ["k", "G_k", "paper's bound", "sharp bound", "tokens where the paper's is above k/N"]
    table = Table("Top-k mass by layer: means over tokens and seeds", ["model", "layer", *headings])
    for name, runs in models.items():
        for place, layers in _by_layer(runs).items():
            for k in dict.fromkeys(m["k"] for layer in layers for m in layer["top_mass"]):
                found = [m for layer in layers for m in layer["top_mass"] if m["k"] == k]
                table.add(
                    labels(GROUP)[name], str(place), str(k),
                    *(show_mean(mean(m[key] for m in found), 3) for key in ("mass", "paper", "sharp")),
                    f"{100 * _value(mean(m['paper_useful'] for m in found)):.0f} %",
                )  # fmt: skip
    return table


def _theorem(models: Models) -> list[Claim]:
    runs = [run for found in models.values() for run in found]
    found = [layer["separation"] for _, layer in _layers(runs)]
    holds = [f for f in found if f["holds"]]
    loose = [f for f in found if f["gaps"][1]["holds"]]
    decided = _seeds(runs) >= MIN_SEEDS
    count = (
        f"{len(holds)} of {len(found)} layers; with 5 % of the tokens left out, {len(loose)}" if found else ""
    )
    kept = [f for f in holds if f["load_cv"] <= f["paper"]]
    cvs = [f["load_cv"] for f in found]
    return [
        Claim(
            f"{THEOREM}, Sections 5.3 and 6.2",
            "The subspace regulariser fulfils the requirements of the theorem, Δ = γ(κ_min − ρκ_max) > 0, and models "
            "without collapse confirm it",
            f"{count}; load CV (mean gate) {min(cvs):.3f} to {max(cvs):.3f}" if cvs else "",
            Verdict.OPEN if not decided else changed(_judge(len(holds) == len(found))),
            f"{CHANGE} Trained layers, the tokens of held-out text. One token between two subspaces is enough to break "
            "it. Where Δ ≤ 0 the load has another cause than the theorem, such as the prior.",
        ),
        Claim(
            THEOREM,
            "CV ≤ (N−1) e^(−αΔ)",
            f"kept in {len(kept)} of {len(holds)} layers with Δ > 0" if found else "",
            *(_bound(holds) if decided else (Verdict.OPEN, _PROVED)),
        ),
    ]


_PROVED = (
    f"{CHANGE} It is proved, and our tests check it on random routers. It applies only where Δ > 0 and every expert is "
    "the own expert of as many tokens."
)


def _bound(holds: Sequence[dict[str, Any]]) -> tuple[Verdict, str]:
    """(verdict, reason) of the theorem's bound, from the layers with Δ > 0."""
    if not holds:
        return (
            Verdict.UNTESTABLE,
            "No trained layer has Δ > 0, so the theorem says nothing about these models.",
        )
    broken = [f for f in holds if f["load_cv"] > f["paper"]]
    if not broken:
        return Verdict.CHANGED, _PROVED
    if not all(f["mixture_cv"] for f in broken):
        return Verdict.FAILS, _PROVED
    uneven = mean(f["mixture_cv"] for f in broken)
    return (
        Verdict.UNTESTABLE,
        f"{_PROVED} Where it is broken, own experts have unequal shares: CV {show_mean(uneven, 2)}.",
    )


def _seeds(runs: Sequence[Measured]) -> int:
    """Two models of one seed are not two seeds."""
    return len({run.seed for run in runs})


def _judge(holds: bool) -> Verdict:
    return Verdict.HOLDS if holds else Verdict.FAILS


def _corollary(models: Models) -> Claim:
    runs = [run for found in models.values() for run in found]
    masses = [m for _, layer in _layers(runs) for m in layer["top_mass"]]
    broken = [m.get("broken") for m in masses]
    verdict, reason = (
        Verdict.OPEN,
        f"{CHANGE} Every token must have a G_k that is not below the bound, in every layer.",
    )
    if masses and None in broken:
        reason += " The stored results do not count such tokens."
    elif _seeds(runs) >= MIN_SEEDS:
        verdict = changed(_judge(not any(broken)))
    shown, useful = [], []
    for k in sorted({m["k"] for m in masses}):
        of = [m for m in masses if m["k"] == k]
        values = (_value(mean(m[key] for m in of)) for key in ("mass", "paper", "sharp"))
        useful.append(f"{100 * _value(mean(m['paper_useful'] for m in of)):.0f} % of tokens at k = {k}")
        shown.append("G_{} {:.2f}, paper's bound {:.2f}, sharp {:.2f}".format(k, *values))
    if shown and None not in broken:
        shown.append(f"tokens below a bound: {sum(broken)}")
    if useful:
        reason += f" The paper's bound is above k/N, true of any gate, for {', '.join(useful)}."
    return Claim(
        COROLLARY,
        "G_k ≥ 1 − (N−k) e^(−αδ_k): the gap at the k-th expert controls the top-k mass",
        "; ".join(shown),
        verdict,
        reason,
    )


STUDY = MeasuredStudy(
    name="separation",
    title="Separation and top-k mass on trained models",
    where="Theorem 2, Corollary 1",
    kind=KIND,
    group=GROUP,
    write=write,
)
