"""The page of the token-level analysis: specialists, entropy by token type, and κ against specialisation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from grmoe.studies.kappa_start import Kappas, literal_kappas
from grmoe.studies.measured import MeasuredStudy, Models, labels, read_measured
from grmoe.studies.model_analysis import AMORTISED, GROUP, KIND
from grmoe.studies.models.summary import mean, show_mean
from grmoe.studies.page import Page
from grmoe.studies.token_analysis.claims import WHERE, claims
from grmoe.studies.token_analysis.reading import specialists, type_entropies
from grmoe.tables import Table


def write(models: Models, literal: Kappas = ()) -> Page:
    """literal: κ of the paper's literal gate."""
    return Page(
        claims=claims(models[AMORTISED.name], literal),
        tables=[_share_table(models), _entropy_table(models), _correlation_table(models)]
        if any(models.values())
        else [],
        notes=[
            "Claims are judged on GrMoE with an amortiser, as the paper's; ours reads the energies, the paper's the "
            "token. The models are `small` with 8 experts, on held-out text of all domains; the paper's is 1.3B with "
            "16 experts, on 10 K tokens of OpenWebText.",
            "A number of the paper counts as found if the mean over seeds is at least nine tenths of it and the 95 % "
            "interval excludes half of it. It is not found if the whole interval is below nine tenths.",
            "log N is 2.08 for 8 experts and 2.77 for 16. The paper's H > 1.8 is 65 % of its log N.",
        ],
    )


def _share_table(models: Models) -> Table:
    headings = ["layer", "code", "κ", "math by the same", "proper nouns by another", "κ"]
    table = Table("The largest specialists", ["model", "seed", *headings], left=2)
    table.add("paper, 1.3B", "–", "–", "78 %", "> 3", "65 %", "71 %", "> 3")
    for name, runs in models.items():
        for run in runs:
            s = specialists(run.body)
            table.add(
                labels(GROUP)[name], str(run.seed), str(s.layer), f"{100 * s.code:.0f} %", f"{s.kappas[0]:.2f}",
                f"{100 * s.math:.0f} %", f"{100 * s.nouns:.0f} %", f"{s.kappas[1]:.2f}",
            )  # fmt: skip
    return table


def _entropy_table(models: Models) -> Table:
    types = next(run.body["types"] for runs in models.values() for run in runs)
    table = Table("Entropy of the gate by token type, nats", ["model", "seeds", *types, "log N"])
    for name, runs in models.items():
        if runs:
            found = [type_entropies(run.body) for run in runs]
            table.add(
                labels(GROUP)[name], str(len(runs)),
                *(show_mean(mean(f[kind] for f in found if kind in f), 2) for kind in types),
                f"{math.log(runs[0].body['experts']):.2f}",
            )  # fmt: skip
    return table


def _correlation_table(models: Models) -> Table:
    table = Table(
        "κ against the entropy of an expert's token types",
        ["model", "seed", "experts", "r", "95 % interval", "r within layers", "95 % interval"],
        left=2,
    )
    for name, runs in models.items():
        for run in runs:
            pooled, inner = run.body["kappa_correlation"], run.body["kappa_correlation_within"]
            cells = [cell for found in (pooled, inner) for cell in _correlation(found)]
            table.add(labels(GROUP)[name], str(run.seed), str(pooled["n"]), *cells)
    return table


def _correlation(found: dict[str, Any]) -> tuple[str, str]:
    if found["r"] is None:
        return "–", "–"
    known = found["lower"] is not None
    return f"{found['r']:.2f}", f"{found['lower']:.2f} to {found['upper']:.2f}" if known else "–"


class TokenAnalysis(MeasuredStudy):
    """One claim also reads the models of the paper's literal gate that other studies train."""

    def page(self, results: Path) -> Page:
        return write(read_measured(results, self.kind, self.group), literal_kappas(results))


STUDY = TokenAnalysis(
    name="token-analysis",
    title="What experts specialise on",
    where=f"{WHERE}, Figure 3",
    kind=KIND,
    group=GROUP,
    write=write,
)
