"""Recipes side by side from the command line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from test_models_store import TINY, FakeProcess, a_run, seed_of
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.studies import tasks
from grmoe.studies.compare import Plan, Result, show
from grmoe.studies.models import Recipe, worker


def test_a_comparison_and_the_same_again(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real training, in this process."""

    def really(order: dict[str, Any]) -> int:
        started.append((order["settings"][-6], seed_of(order)))
        return worker.main(order["result"].replace(".result.", ".order."))

    started: list[tuple[str, int]] = []
    monkeypatch.setattr(tasks, "POLL", 0.0)
    monkeypatch.setattr(tasks.subprocess, "Popen", FakeProcess)
    monkeypatch.setattr(FakeProcess, "behave", staticmethod(really), raising=False)
    arguments = [
        "compare", *TINY, f"data.path={prepared}", "steps=2", "device=cpu", "checkpoint.every=0", "--recipe",
        "mine: elastic.unit=off", "--vary", "optim.lr=1e-3,3e-3", "--seeds", "1", "--tokens", "256", "--out",
        str(tmp_path / "out"),
    ]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert [seed for _, seed in started] == [0, 0]
    assert (tmp_path / "out" / "curves.png").is_file()
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| mine, lr 1e-3 | 1 | 2.00 |" in table
    assert "| mine, lr 3e-3: top-1 | 1 | 1.00 |" in table
    assert (tmp_path / "out" / "models" / "compare" / "mine-lr-3e-3.json").is_file()
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0, again.output
    assert len(started) == 2
    # Models that were removed to save room: their numbers are shown, their curves are not drawn.
    for name, figures in (("mine-lr-1e-3-0", True), ("mine-lr-3e-3-0", False)):
        shutil.rmtree(tmp_path / "out" / "models" / "compare" / name)
        without = CliRunner().invoke(app, arguments)
        assert without.exit_code == 0, without.output
        assert ("curves.png" in without.output) == figures
    assert len(started) == 2
    # Losses of other text cannot be compared with these, so nothing is shown.
    for other, said in (
        (["--tokens", "512"], "was measured with --tokens 256"),
        (["--text", str(tmp_path / "web.txt")], "was measured on texts []"),
    ):
        (tmp_path / "web.txt").write_text("other words " * 400)
        refused = CliRunner().invoke(app, [*arguments, *other])
        assert refused.exit_code == 2, refused.output
        assert said in " ".join(refused.output.split())
    assert len(started) == 2


def test_differences_are_by_seed(tmp_path: Path) -> None:
    recipes = (Recipe("a", "A", ()), Recipe("b", "B", ()))
    plan = Plan(tree={}, recipes=recipes, out=tmp_path)
    models = {"a": [a_run(0, 3.0), a_run(1, 4.0)], "b": [a_run(0, 3.5), a_run(1, 4.5), a_run(2, 9.0)]}
    (table,) = show(Result(plan, models))
    assert [row[5] for row in table.rows] == ["–", "+0.5000 ± 0.0000"]  # type: ignore[union-attr]


def test_settings_of_a_file_and_names(tmp_path: Path) -> None:
    mine = Recipe("a", "A", ())
    plan = Plan(
        tree={"steps": 3, "model": {"router_options": {"balance": True}}}, recipes=(mine,), out=tmp_path
    )
    assert plan.base.settings == ("steps=3", "model.router_options.balance=true")
    with pytest.raises(ValueError, match="recipes must have different names, got a, a"):
        Plan(tree={}, recipes=(mine, mine), out=tmp_path)
    for key in ("seed", "out"):
        with pytest.raises(ValueError, match=f"{key} is not a setting of a comparison"):
            Plan(tree={key: 3}, recipes=(mine,), out=tmp_path)
