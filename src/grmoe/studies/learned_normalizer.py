"""The normaliser at the κ that trained models have learned: the paper's validation, at the argument the gate uses."""

from __future__ import annotations

from collections.abc import Sequence

from grmoe.studies.judging import MIN_SEEDS
from grmoe.studies.learned_kappa import LearnedRow, layer_table
from grmoe.studies.measured import MeasuredStudy, Models
from grmoe.studies.measuring import Measured
from grmoe.studies.model_analysis import GRMOE, GROUP, KIND
from grmoe.studies.normalizer import PRINTED
from grmoe.studies.page import Claim, Page, Verdict
from grmoe.tables import Table

WHERE = "Bingham Normalizer Validation"


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

    arguments = [row.kappa for row in rows]
    spread = f"{min(arguments):.1f} to {max(arguments):.1f}" if rows else ""
    numbers = {name: _worst(rows, name) for name in ("kume_wood_1", "gradient_1", "monte_carlo")}
    return [
        Claim(
            WHERE,
            "At the learned κ the saddlepoint is within 1.5 % of Z",
            said(f"at most {100 * numbers['kume_wood_1']:.2g} %"),
            judge(numbers["kume_wood_1"] <= 0.015),
            "Kume and Wood's formula of first order against the contour integral.",
        ),
        Claim(
            WHERE,
            "Its gradient is within 0.3 %",
            said(f"at most {100 * numbers['gradient_1']:.2g} %"),
            judge(numbers["gradient_1"] <= 0.003),
            "Gradient of log Z by κ.",
        ),
        Claim(
            WHERE,
            "κ > 10 is never encountered",
            said(f"arguments of Z from {spread}"),
            judge(bool(rows) and max(arguments) <= 10),
            "κ itself stays small, but Z is taken at c·κ.",
        ),
        Claim(
            WHERE,
            "10⁶ Monte Carlo samples validate the formula",
            said(f"Monte Carlo is off by at most {100 * numbers['monte_carlo']:.2g} %"),
            judge(numbers["monte_carlo"] <= 0.015),
            "It must be closer to Z than the 1.5 % it is to confirm.",
        ),
    ]


STUDY = MeasuredStudy(
    name="learned-normalizer",
    title="The normaliser at the learned κ",
    where=WHERE,
    kind=KIND,
    group=GROUP,
    write=write,
)
