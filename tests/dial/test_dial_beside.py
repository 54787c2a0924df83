"""Round budgets, and other models on the same text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.config import from_dict
from grmoe.dial import beside
from grmoe.dial.beside import BudgetRow, measure_budgets, model_names, round_budgets, short_names
from grmoe.dial.curve import measured_at
from grmoe.dial.figure import _by_model
from grmoe.dial.meter import Point
from grmoe.dial.setting import top_k
from grmoe.dial.tables import budget_table
from grmoe.probe.losses import Increase, Measurement, measure
from grmoe.probe.windows import Text, read_windows
from grmoe.runs.config import TrainConfig
from grmoe.runs.open import open_model
from grmoe.runs.results import load_results
from grmoe.train.loop import train

MODEL = {
    "preset": None, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "moe_every": 1, "num_experts": 4, "router_rank": 8, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip


def test_budgets_people_ask_for() -> None:
    assert round_budgets(1) == [1]
    assert round_budgets(2) == [2, 1.5, 1.25, 1]
    assert round_budgets(4) == [4, 3, 2, 1]
    assert round_budgets(8) == [8, 6, 4, 2, 1]


def test_names_are_as_long_as_they_must_be(tmp_path: Path) -> None:
    a, b, c = tmp_path / "a" / "model", tmp_path / "b" / "model", tmp_path / "other"
    assert short_names([a]) == ["model"]
    assert short_names([a, c]) == ["model", "other"]
    assert short_names([a, b, c]) == ["a/model", "b/model", f"{tmp_path.name}/other"]
    assert short_names([a, a]) == ["model", "model"]


def test_checkpoints_of_one_run_are_told_apart(tmp_path: Path) -> None:
    """Under one name, tables would show the numbers of one for both."""
    first, second = (SimpleNamespace(path=tmp_path / "run", step=step) for step in (20, 40))
    other = SimpleNamespace(path=tmp_path / "other", step=40)
    models: Any = [second, first, other]
    assert model_names(models) == ["run, step 40", "run, step 20", "other"]
    assert model_names(models[1:]) == ["run", "other"]


def test_a_model_is_not_compared_with_itself(run: Path, data: Path, tmp_path: Path) -> None:
    """Before anything is measured: its rows would stand twice in the table of texts."""
    command = ["dial", run, "--tokens", 512, "--out", tmp_path / "out", "--check", data, "--beside", run]
    done = CliRunner().invoke(app, list(map(str, command)))
    assert done.exit_code == 2
    assert "differ from each other" in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def compared(run: Path, softmax_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run beside a model that was never dialled."""
    out = tmp_path_factory.mktemp("beside")
    command = ["dial", run, "--tokens", 512, "--out", out, "--write", "--beside", softmax_run]
    done = CliRunner().invoke(app, list(map(str, command)))
    assert done.exit_code == 0, done.output
    return out, done.output


def test_a_model_along_its_budgets_and_another_as_trained(
    compared: tuple[Path, str], run: Path, softmax_run: Path
) -> None:
    folder, said = compared
    rows = load_results(folder / "results.json", "dial").body["budgets"]
    assert [(row["model"], row["budget"]) for row in rows] == [
        ("run", 2.0), ("run", 1.5), ("run", 1.25), ("run", 1.0), ("softmax", 2.0),
    ]  # fmt: skip
    text = read_windows(None, open_model(run), 32, 512)
    model = open_model(folder / "model").model
    for row in rows[:4]:
        model.set_budget(row["budget"])
        found = measure(model, text)
        assert found.perplexity == pytest.approx(row["perplexity"], rel=1e-9)
        assert found.experts_per_token == pytest.approx(row["experts_per_token"], rel=1e-9)
        assert row["experts_per_token"] == pytest.approx(row["budget"], abs=0.06)
    other = measure(open_model(softmax_run).model, text)
    assert rows[4]["perplexity"] == pytest.approx(other.perplexity, rel=1e-9)
    assert rows[0]["increase"]["value"] == rows[4]["increase"]["value"] == 0  # each against itself as trained
    assert "Perplexity by experts per token" in said
    tables = [
        said.index(title) for title in ("Chosen:", "Certificates of", "Perplexity by experts per token")
    ]
    assert tables == sorted(tables)  # the answer first, the budgets last
    assert f"{rows[3]['perplexity']:.2f}" in said


def test_points_of_the_curve_are_not_measured_again(
    compared: tuple[Path, str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = open_model(compared[0] / "model")
    curve = loaded.model.config.budget_curve
    text = read_windows(None, open_model(run), 32, 512)
    wanted = measure_budgets("it", loaded, None, text)
    points = []
    for at in curve:
        loaded.model.set_budget(at["experts_per_token"])
        points.append(Point(top_k((1.0, 1.0), 2), "uniform", measure(loaded.model, text)))
    known = measured_at(curve, points)
    assert list(known) == [at["experts_per_token"] for at in curve]
    assert measured_at(curve, points[1:]).keys() == known.keys() - {1.0}
    asked: list[float | None] = []

    def note(model: Any, text: Text) -> Measurement:
        asked.append(model.config.budget)
        return measure(model, text)

    monkeypatch.setattr(beside, "measure", note)
    assert measure_budgets("it", loaded, None, text, known=known) == wanted
    assert asked == [None, 1.5, 1.25]  # as trained, and between points of the curve


def test_a_dialled_model_is_measured_along_its_own_curve(compared: tuple[Path, str], run: Path) -> None:
    loaded = open_model(compared[0] / "model")
    before = loaded.model.config.budget_curve
    text = read_windows(None, open_model(run), 32, 512)
    rows = measure_budgets("it", loaded, None, text)
    assert [row.budget for row in rows] == [2.0, 1.5, 1.25, 1.0]
    assert loaded.model.config.budget is None
    assert loaded.model.config.budget_curve == before


def row(model: str, budget: float, perplexity: float, change: float) -> BudgetRow:
    figures: dict[str, Any] = {
        "experts_per_token": budget + 0.01,
        "loss": 1.0,
        "perplexity": perplexity,
        "load_cv": 0.1,
    }
    return BudgetRow(model=model, budget=budget, **figures, increase=Increase(change, 0.0, 0.0))


def test_one_column_per_model() -> None:
    rows = [row("a", 2, 10.0, 0.0), row("a", 1, 10.5, 0.05), row("b", 1.0, 11.0, 0.0), row("c", 2, 12.0, 0.0)]
    text = budget_table(rows).markdown().splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in text]
    assert cells[0] == ["experts per token", "a", "b", "c"]
    assert cells[2][0] == "2"
    assert [c.split(" ")[0] for c in cells[2][1:]] == ["10.00", "–", "12.00"]
    assert [c.split(" ")[0] for c in cells[3][1:]] == ["10.50", "11.00", "–"]
    assert "5" in cells[3][1].split("(")[1]


def test_other_models_are_drawn(compared: tuple[Path, str]) -> None:
    class Body:
        budgets = [row("own", 2, 10, 0), row("own", 1, 11, 0), row("x", 2, 9, 0), row("y", 1, 8, 0)]  # noqa: RUF012

    found = _by_model(Body())  # type: ignore[arg-type]
    assert {name: [r.perplexity for r in rows] for name, rows in found.items()} == {
        "own": [10, 11],
        "x": [9],
        "y": [8],
    }
    assert (compared[0] / "pareto.png").stat().st_size > 10_000


def test_models_that_read_other_tokens_are_refused(run: Path, tmp_path: Path, data: Path) -> None:
    tree = {
        "out": str(tmp_path / "short"), "steps": 1, "device": "cpu", "optim": {"lr": 1e-3},
        "model": MODEL | {"max_position_embeddings": 16}, "data": {"path": str(data), "batch_size": 8},
        "validation": {"every": 0, "tokens": 100}, "checkpoint": {"every": 0},
    }  # fmt: skip
    train(from_dict(TrainConfig, tree))
    short = tmp_path / "short"
    command = ["dial", run, "--tokens", 512, "--out", tmp_path / "out", "--beside", short]
    done = CliRunner().invoke(app, list(map(str, command)))
    assert done.exit_code == 2
    flat = " ".join(done.output.split())
    assert "beside must be models that read the calibration text as the same tokens" in flat
