"""The normaliser at the κ that trained models have learned: the paper's validation, at the argument the gate uses."""

from __future__ import annotations

from collections.abc import Sequence

from grmoe.studies.judging import MIN_SEEDS, changed
from grmoe.studies.learned_kappa import LearnedRow, layer_table
from grmoe.studies.measured import MeasuredStudy, Models
from grmoe.studies.measuring import Measured
from grmoe.studies.model_analysis import GRMOE, GROUP, KIND
from grmoe.studies.normalizer_table import PRINTED
from grmoe.studies.page import OWN, Claim, Page, Verdict
from grmoe.tables import Table

WHERE = "Section 6.4.4, Bingham Normalizer Validation"
CHANGE = "With our prior, scaling and hinge."


def write(models: Models) -> Page:
    runs = models[GRMOE.name]
    rows = [LearnedRow(**row) for run in runs for row in run.body["normalizer"]]
    tables: list[Table] = [layer_table(rows)] if rows else []
    return Page(
        claims=_claims(runs, rows),
        tables=tables,
        notes=[
            "At the smallest and the largest κ of each layer, all seeds. The density of a unit token is "
            "exp(cκ‖Uᵀx‖²)/Z, so the argument of Z is c·κ, with c = d/k here. The paper speaks of κ itself.",
            PRINTED,
        ],
    )


def _worst(rows: Sequence[LearnedRow], name: str) -> float:
    return max((abs(getattr(row, name)) for row in rows), default=0.0)


def _claims(runs: Sequence[Measured], rows: Sequence[LearnedRow]) -> list[Claim]:
    decided = len(runs) >= MIN_SEEDS

    def judge(holds: bool) -> Verdict:
        return Verdict.OPEN if not decided else Verdict.HOLDS if holds else Verdict.FAILS

    def said(text: str) -> str:
        return text if rows else ""

    numbers = {name: _worst(rows, name) for name in ("kume_wood_1", "gradient_1", "monte_carlo")}
    kappas, arguments = [row.learned for row in rows], [row.kappa for row in rows]
    return [
        Claim(
            WHERE,
            "At the learned κ the saddlepoint is within 1.5 % of Z",
            said(f"at most {100 * numbers['kume_wood_1']:.2g} %"),
            changed(judge(numbers["kume_wood_1"] <= 0.015)),
            f"{CHANGE} Kume and Wood's formula of first order against the contour integral, at c·κ.",
        ),
        Claim(
            WHERE,
            "Its gradient is within 0.3 %",
            said(f"at most {100 * numbers['gradient_1']:.2g} %"),
            changed(judge(numbers["gradient_1"] <= 0.003)),
            f"{CHANGE} Gradient of log Z by κ, at c·κ.",
        ),
        Claim(
            WHERE,
            "κ > 10 is never encountered",
            said(f"κ from {_span(kappas)}"),
            changed(judge(max(kappas, default=0.0) <= 10)),
            f"{CHANGE} The paper speaks of κ; Z is taken at c·κ, which is judged below.",
        ),
        Claim(
            WHERE,
            "10⁶ Monte Carlo samples validate the formula",
            said(f"Monte Carlo is off by at most {100 * numbers['monte_carlo']:.2g} %"),
            changed(judge(numbers["monte_carlo"] <= 0.015)),
            f"{CHANGE} It must be closer to Z than the 1.5 % it is to confirm.",
        ),
        Claim(
            OWN,
            "The argument c·κ of Z stays below 10",
            said(f"c·κ from {_span(arguments)}"),
            judge(max(arguments, default=0.0) <= 10),
            "With d/k scaling the density of a unit token is exp(cκ‖Uᵀx‖²)/Z.",
        ),
    ]


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}" if values else ""


STUDY = MeasuredStudy(
    name="learned-normalizer",
    title="The normaliser at the learned κ",
    where=WHERE,
    kind=KIND,
    group=GROUP,
    write=write,
)
