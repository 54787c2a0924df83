"""The normaliser validation table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from micro_model import make, tokenizer
from typer.testing import CliRunner

from grmoe.bingham import log_kummer
from grmoe.cli import app
from grmoe.routing import routers
from grmoe.studies.learned_kappa import learned
from grmoe.studies.normalizer import claims
from grmoe.studies.normalizer_table import NormalizerRow, Plan, run, show, validate
from grmoe.studies.page import Verdict

__all__ = ["make", "tokenizer"]  # fixtures


def test_row_reports_every_method_against_the_exact_value() -> None:
    row = validate(768, 48, 4.2, samples=20_000)
    assert row.log_z == pytest.approx(0.2638509058926054, abs=1e-12)
    assert row.mean_energy == pytest.approx(0.0631453440167, abs=1e-12)
    assert abs(row.series_error) < 1e-13
    # First order misses Stirling's remainder 1/(6d) = 2.2e-4; third order removes it.
    assert row.kume_wood_1 == pytest.approx(1 / (6 * 768), rel=0.05)
    assert abs(row.kume_wood_3) < 1e-9
    # The gradients see the saddle move: without that the third order would be off by 5e-5.
    assert abs(row.gradient_1) < 1e-6
    assert abs(row.gradient_3) < 1e-9
    assert abs(row.monte_carlo) < 4 * row.monte_carlo_standard_error
    assert row.monte_carlo_standard_error < 1e-3


def test_monte_carlo_is_useless_at_high_concentration() -> None:
    row = validate(128, 16, 1000.0, samples=20_000)
    assert row.monte_carlo < -0.9  # nearly all of Z is missed
    assert abs(row.kume_wood_3) < 1e-4


def test_command_prints_the_table_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    result = CliRunner().invoke(
        app,
        [
            "normalizer",
            "--dim",
            "128",
            "--rank",
            "16",
            "--kappa",
            "10",
            "--samples",
            "1000",
            "--json",
            str(path),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "1.340956035" in result.output
    (row,) = json.loads(path.read_text())
    assert row["log_z"] == pytest.approx(1.340956035010131, abs=1e-12)


def test_table_has_one_line_per_row_and_one_section_per_dimension() -> None:
    stages: list[tuple[str, int, int]] = []
    plan = Plan(samples=100, shapes=((32, 4), (16, 4)), kappas=(1.0, 2.0))
    rows = run(plan, lambda *report: stages.append(report))
    assert [(r.dim, r.kappa) for r in rows] == [(32, 1.0), (32, 2.0), (16, 1.0), (16, 2.0)]
    assert stages[-1] == ("d = 16, k = 4", 4, 4)
    (table,) = show(rows, 100)
    assert [len(section) for section in table.sections] == [2, 2]
    assert len(table.headings) == 12


def test_the_formula_of_the_appendix_is_far_off() -> None:
    """Λ* = ŝI − Λ misses log Z by −120 at d = 768, and doubles the gradient. 2(ŝI − Λ) has the right gradient."""
    row = validate(768, 48, 4.2, samples=100)
    assert row.printed_1 == pytest.approx(-120.3, abs=0.1)
    assert row.printed_2 == pytest.approx(-386.7, abs=0.1)
    assert row.printed_gradient_1 == pytest.approx(1.01, abs=0.01)
    assert abs(row.printed_gradient_2) < 1e-4


def page_verdicts(rows: list[NormalizerRow]) -> dict[str, Verdict]:
    found = claims(rows)
    assert all((claim.ours == "") == (claim.verdict is Verdict.OPEN) for claim in found)
    return {claim.text: claim.verdict for claim in found}


def test_orders_and_the_prior_are_judged_by_the_rows() -> None:
    z, gradient = (f"O(d⁻²) for d ≥ 32: {what}" for what in ("Z", "the gradient of log Z"))

    def verdict(rows: list[NormalizerRow], words: str) -> Verdict:
        (found,) = [v for text, v in page_verdicts(rows).items() if text.endswith(words)]
        return found

    assert set(page_verdicts([]).values()) == {Verdict.OPEN}
    rows = run(Plan(samples=100, shapes=((32, 4), (128, 16)), kappas=(0.4, 4.2, 100.0)))
    assert verdict(rows, z) is Verdict.FAILS  # 1/(6d): first order
    assert verdict(rows, gradient) is Verdict.HOLDS
    assert verdict(rows, "lower concentration") is Verdict.FAILS  # Z grows with κ
    assert verdict(rows, "grows to 5 %") is Verdict.FAILS
    (beyond,) = [claim for claim in claims(rows) if "grows to 5 %" in claim.text]
    assert beyond.reason.startswith("The error stays smaller")
    for order, wanted in ((1.95, Verdict.HOLDS), (1.85, Verdict.FAILS)):
        planted = [replace(row, kume_wood_1=row.dim**-order, log_z=-row.kappa) for row in rows]
        assert verdict(planted, z) is wanted
        assert verdict(planted, "lower concentration") is Verdict.HOLDS
    assert verdict(rows, "from 0.4 to 4.2") is Verdict.CHANGED  # the printed formula is not Z
    right = [replace(row, printed_2=0.01) for row in rows]
    assert verdict(right, "from 0.4 to 4.2") is Verdict.HOLDS
    for error, wanted in ((0.002, Verdict.HOLDS), (0.004, Verdict.CHANGED)):  # of the second reading of it
        planted = [replace(row, printed_gradient_2=error, gradient_1=0.001) for row in rows]
        assert verdict(planted, "gradient is within 0.3 %") is wanted
    slow = [replace(row, kume_wood_1=row.dim ** -(1.0 if row.kappa == 0.4 else 3.0)) for row in rows]
    assert verdict(slow, z) is Verdict.FAILS  # at one κ


def test_at_the_learned_concentrations(make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = make()
    monkeypatch.setattr("grmoe.studies.learned_kappa.open_model", lambda path, *_, **__: loaded)
    path = tmp_path / "rows.json"
    arguments = ["normalizer", "--run", "run", "--kappa", "1", "--samples", "500", "--json", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "At the learned κ" in result.output
    first, *rows = json.loads(path.read_text())
    assert (first["dim"], first["rank"], first["kappa"]) == (32, 6, 1.0)
    want = [
        (layer, expert, float(kappa))
        for layer, router in zip(loaded.model.config.moe_layers, routers(loaded.model), strict=True)
        for expert, kappa in enumerate(router.kappa)
    ]
    assert [(row["layer"], row["expert"], row["learned"]) for row in rows] == want
    for row in rows:
        assert row["kappa"] == pytest.approx(32 / 6 * row["learned"])  # the argument of Z is c·κ, c = d/k
        assert row["log_z"] == pytest.approx(float(log_kummer(6, 32, row["kappa"])), abs=1e-12)
    both = CliRunner().invoke(app, [*arguments, "--dim", "32", "--rank", "6"])
    assert (both.exit_code, "got both" in both.output) == (2, True)
    with pytest.raises(ValueError, match="needs a Grassmann router with one κ per expert"):
        learned(make(router="softmax").model)
