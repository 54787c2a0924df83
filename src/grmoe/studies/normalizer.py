"""The study of the normaliser: what the paper says about its saddlepoint, at fixed shapes and concentrations."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from grmoe.files import read_json, write_file
from grmoe.studies.judging import with_change
from grmoe.studies.normalizer_table import PRINTED, NormalizerRow, Plan, run, show
from grmoe.studies.page import Claim, Page, Verdict
from grmoe.studies.study import Place, State, provenance
from grmoe.terminal import Progress

SAMPLES = 1_000_000
LEARNED = 4.2  # the largest κ the paper encounters
BEYOND = 0.05  # its error above κ = 10
WHERE = "Section 6.4.4, Bingham Normalizer Validation"
APPENDIX = "Appendix, Bingham Normalizing Constant Approximation"
BAYES = "Section 5.1, Routing as Exact Bayesian Inference"


class NormalizerStudy:
    """All shapes and κ as one job."""

    name = "normalizer"
    title = "The normaliser of the Bingham gate"
    where = WHERE
    parts = (name,)

    def path(self, results: Path) -> Path:
        return results / "normalizer.json"

    def state(self, results: Path) -> State:
        return State(int(self.path(results).is_file()), 1)

    def run(self, place: Place, progress: Progress) -> None:
        if place.wants(self.name) and not self.path(place.results).is_file():
            rows = [asdict(row) for row in run(Plan(SAMPLES), progress)]
            content = json.dumps({**provenance(place), "samples": SAMPLES, "rows": rows}, indent=1)
            place.results.mkdir(parents=True, exist_ok=True)
            write_file(self.path(place.results), f"{content}\n".encode())

    def page(self, results: Path) -> Page:
        path = self.path(results)
        rows = [NormalizerRow(**row) for row in read_json(path)["rows"]] if path.is_file() else []
        return Page(claims(rows), list(show(rows, SAMPLES)) if rows else [], notes=[PRINTED])


def claims(rows: Sequence[NormalizerRow]) -> list[Claim]:
    learned = [row for row in rows if row.kappa <= LEARNED]
    return [
        *_errors(learned, [row for row in rows if row.kappa > 10]),
        _order(learned, "kume_wood_1", "The saddlepoint is accurate to O(d⁻²) for d ≥ 32: Z"),
        _order(
            learned, "gradient_1", "The saddlepoint is accurate to O(d⁻²) for d ≥ 32: the gradient of log Z"
        ),
        _printed(learned),
        _prior(learned),
    ]


def _judge(known: bool, holds: bool) -> Verdict:
    return Verdict.OPEN if not known else Verdict.HOLDS if holds else Verdict.FAILS


def _errors(learned: Sequence[NormalizerRow], beyond: Sequence[NormalizerRow]) -> list[Claim]:
    """Of the saddlepoint of first order: as the paper prints it, in the better of two readings, and as it is."""
    asked = (
        ("The saddlepoint is within 1.5 % of Z for κ from 0.4 to 4.2", "kume_wood_1", 0.015),
        ("Its gradient is within 0.3 %", "gradient_1", 0.003),
    )
    return [*(_within(learned, *question) for question in asked), _grows(beyond)]


_HOW = "Largest relative error over three shapes, against the contour integral."


def _worst(rows: Sequence[NormalizerRow], name: str) -> float:
    return max((abs(getattr(row, name)) for row in rows), default=0.0)


def _within(rows: Sequence[NormalizerRow], text: str, name: str, limit: float) -> Claim:
    worst, printed = _worst(rows, name), _as_printed(rows, name)
    verdict = with_change(*(_judge(bool(rows), error <= limit) for error in (printed, worst)))
    formula = (
        "With Kume and Wood's own formula."
        if verdict is Verdict.CHANGED
        else "The formula is Kume and Wood's."
    )
    off = f"{100 * printed:.2g} %" if printed < 0.1 else f"{100 * printed:.0f} %"
    return Claim(
        WHERE,
        text,
        f"at most {100 * worst:.2g} %" if rows else "",
        verdict,
        f"{formula} {_HOW} The one printed in the paper lacks two factors: it is off by {off}, in the better of two "
        "readings.",
    )


def _grows(rows: Sequence[NormalizerRow]) -> Claim:
    worst = _worst(rows, "kume_wood_1")
    smaller = "The error stays smaller than the paper says. " if worst < BEYOND else ""
    return Claim(
        WHERE,
        "Above κ = 10 the error grows to 5 %",
        f"at most {100 * worst:.2g} %" if rows else "",
        _judge(bool(rows), worst >= BEYOND),
        f"{smaller}{_HOW} The formula is Kume and Wood's.",
    )


def _as_printed(rows: Sequence[NormalizerRow], name: str) -> float:
    """The largest relative error of the printed formula of Z or of its gradient, in the better of two readings."""
    if name == "gradient_1":
        readings = [[abs(getattr(row, f"printed_gradient_{i}")) for row in rows] for i in (1, 2)]
    else:
        readings = [[abs(math.expm1(getattr(row, f"printed_{i}"))) for row in rows] for i in (1, 2)]
    return min(max(errors, default=0.0) for errors in readings)


def _order(rows: Sequence[NormalizerRow], name: str, text: str) -> Claim:
    """How fast an error falls with d, from the smallest to the largest, at the κ where it falls slowest."""
    dims = sorted({row.dim for row in rows})
    by_kappa: dict[float, dict[int, float]] = {}
    for row in rows:
        by_kappa.setdefault(row.kappa, {})[row.dim] = abs(getattr(row, name))
    orders = [
        math.log(errors[dims[0]] / errors[dims[-1]]) / math.log(dims[-1] / dims[0])
        for errors in by_kappa.values()
    ]
    slowest = min(orders, default=0.0)
    return Claim(
        APPENDIX,
        text,
        f"the relative error falls like d^−{slowest:.1f} from d = {dims[0]} to {dims[-1]}" if orders else "",
        _judge(bool(orders), slowest >= 1.9),
        "Kume and Wood's formula of first order, κ up to 4.2, at the κ with the slowest fall. It holds if the exponent "
        "is 2, up to 0.1, or more. What Z misses hardly depends on κ, so the gradient does not see it.",
    )


def _printed(rows: Sequence[NormalizerRow]) -> Claim:
    """Of the formula itself, at the κ the paper speaks of."""
    near, gradient = (
        min((abs(getattr(row, name)) for row in rows), default=0.0)
        for name in ("printed_1", "printed_gradient_1")
    )
    second = max((abs(row.printed_gradient_2) for row in rows), default=0.0)
    return Claim(
        APPENDIX,
        "Z(Λ) ≈ (2π)^(d/2) |Λ⋆|^(−1/2) exp(tr(Λ(Λ⋆)⁻¹))",
        f"log Z off by at least {near:.0f}, its gradient by {100 * gradient:.0f} % (Λ⋆ = ŝI − Λ); with "
        f"Λ⋆ = 2(ŝI − Λ) the gradient is off by at most {100 * second:.2g} %"
        if rows
        else "",
        _judge(bool(rows), near <= 0.015),
        "The formula lacks K''(t̂)^(−1/2) and e^(−t̂), and Λ⋆ is not defined. In the second reading the error of log Z "
        "hardly depends on κ, so a training that needs only the gradient would not notice.",
    )


def _prior(rows: Sequence[NormalizerRow]) -> Claim:
    """Z at the largest κ over Z at the smallest: above one, the prior favours the former."""
    ratios = {}
    for dim in sorted({row.dim for row in rows}):
        of = sorted((row for row in rows if row.dim == dim), key=lambda row: row.kappa)
        ratios[dim] = math.exp(of[-1].log_z - of[0].log_z)
    shown = ", ".join(f"{ratio:.2f} at d = {dim}" for dim, ratio in ratios.items())
    return Claim(
        BAYES,
        "The prior p(z = e) ∝ Z(κ_e) favors experts with lower concentration",
        f"Z(4.2) / Z(0.4): {shown}" if ratios else "",
        _judge(bool(ratios), all(ratio < 1 for ratio in ratios.values())),
        "Z grows with κ, so this prior favours experts of higher concentration."
        if ratios and min(ratios.values()) > 1
        else "It holds if Z falls with κ.",
    )


STUDY = NormalizerStudy()
