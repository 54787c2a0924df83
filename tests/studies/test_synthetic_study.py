"""The study end to end: files, resumption, tables, figures, command line."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grmoe.cli import app, main
from grmoe.studies.synthetic import study
from grmoe.studies.synthetic.evaluation import SeedScore
from grmoe.studies.synthetic.figure import draw
from grmoe.studies.synthetic.methods import find_methods
from grmoe.studies.synthetic.saving import save
from grmoe.studies.synthetic.study import Config, MethodResult, Plan, Result, SettingResult
from grmoe.studies.synthetic.tables import HEADINGS, Row, show, table
from grmoe.studies.synthetic.task import EASY, HARD, Setting
from grmoe.studies.synthetic.training import Training

TINY = Config(
    seeds=2,
    num_experts=4,
    dim=16,
    rank=3,
    eval_tokens=256,
    dial_tokens=64,
    training=Training(steps=3, batch=64),
)


def run(
    out: Path,
    config: Config = TINY,
    keys: tuple[str, ...] = ("softmax_top1", "grmoe"),
    setting: Setting = EASY,
) -> SettingResult:
    plan = Plan(out=out, config=config, settings=(setting,), methods=find_methods(keys))
    (result,) = study.run(plan).settings
    return result


def test_results_survive_and_are_not_computed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(tmp_path, keys=("softmax_top1",))
    trained: list[str] = []
    real = study.train
    monkeypatch.setattr(study, "train", lambda *a, **k: (trained.append("x"), real(*a, **k))[1])
    second = run(tmp_path)  # goes on: only grmoe is missing
    assert len(trained) == 1
    assert second.methods[0].scores == first.methods[0].scores
    assert [m.method for m in second.methods] == ["softmax_top1", "grmoe"]
    run(tmp_path)
    assert len(trained) == 1
    run(tmp_path, replace(TINY, seeds=1))  # another configuration is another run
    assert len(trained) == 3


def test_the_same_configuration_gives_the_same_numbers(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b")
    assert [m.scores for m in a.methods] == [m.scores for m in b.methods]
    other = run(tmp_path / "c", replace(TINY, task_seed=5))
    assert [m.scores for m in a.methods] != [m.scores for m in other.methods]


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    run(tmp_path, keys=("hash",))
    path = tmp_path / "easy" / "hash.json"
    path.write_text(path.read_text()[:50])
    with pytest.raises(ValueError, match=r"hash\.json is not valid JSON"):
        run(tmp_path, keys=("hash",))


def test_table_and_json_hold_the_scores(tmp_path: Path) -> None:
    result = run(tmp_path)
    row = Row.of(result.methods[1], TINY.num_experts)
    scores = result.methods[1].scores
    assert row.accuracy == pytest.approx(sum(s.accuracy for s in scores) / 2)
    assert row.seeds == 2
    assert row.collapsed == sum(s.collapsed for s in scores)
    cells = next(cells for cells in table(result).rows if cells[0] == "GrMoE")
    assert len(cells) == len(HEADINGS)
    assert cells[1].startswith(f"{100 * row.accuracy:.1f} ± ")
    assert cells[-1] == "91.7 / 0.058 / 0 % / 1.52"  # the paper stands beside it
    written = save(Result(TINY, [result]), tmp_path / "saved")
    assert list(written) == ["Numbers", "Table", "Figure, easy"]
    text = written["Table"].read_text()
    assert all(part in text for part in (table(result).title, table(result).markdown()))
    saved = json.loads(written["Numbers"].read_text())
    assert saved["settings"][0]["rows"][1]["accuracy"] == pytest.approx(row.accuracy)
    assert saved["config"]["training"]["steps"] == 3
    assert result.overlap_mean == pytest.approx(0.1, abs=1e-3)


def test_load_is_of_received_tokens_and_of_leaders_where_all_are_computed(tmp_path: Path) -> None:
    result = run(tmp_path, keys=("softmax_top2", "expert_choice", "soft_moe", "vmf", "grmoe"))
    rows = {m.method: Row.of(m, 4) for m in result.methods}
    cells = {m.method: dict(zip(HEADINGS, rows[m.method].cells(None), strict=True)) for m in result.methods}
    assert (rows["expert_choice"].load_cv, rows["expert_choice"].collapsed) == (
        0.0,
        0,
    )  # equal by construction
    assert rows["expert_choice"].leading_cv > 0
    assert cells["expert_choice"]["load CV"] == "0.000"
    assert [cells[key]["experts"] for key in cells] == ["2.0", "2.0", "1.0", "4.0", "4.0"]
    for key in ("vmf", "grmoe"):  # trained dense: everybody receives everything
        assert rows[key].dense
        assert cells[key]["load CV"] == cells[key]["collapsed (95 %)"] == cells[key]["< 1 %"] == "–"
        assert cells[key]["leading CV"] == f"{rows[key].leading_cv:.3f}"
    for method in result.methods:
        for s in method.scores:
            fair = 1 / 4 if rows[method.method].dense else s.experts_per_token / 4
            least = s.leading_min_load if rows[method.method].dense else s.min_load
            assert s.least_share(4) == pytest.approx(least / fair)
            assert s.collapsed == (s.min_load < 0.1 * s.experts_per_token / 4)
            assert s.leading_collapsed == (s.leading_min_load < 0.1 / 4)


def test_the_papers_hard_numbers_stand_beside_ours(tmp_path: Path) -> None:
    result = run(tmp_path, keys=("softmax_top1", "switch", "vmf", "grmoe"), setting=HARD)
    assert [cells[-1] for cells in table(result).rows] == [
        "68.1 / – / 62 % / –",
        "–",
        "72.4 / – / – / –",
        "78.3 / – / 0 % / –",
    ]


def test_progress_counts_the_steps_of_all_methods_and_settings(tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    plan = Plan(out=tmp_path, config=TINY, methods=find_methods(["hash", "grmoe"]))
    result = study.run(plan, lambda *report: reports.append(report))
    assert [done for _, done, _ in reports] == list(range(1, 13))  # 2 settings, 2 methods, 3 steps
    assert {total for _, _, total in reports} == {12}
    assert reports[-1][0] == "hard: GrMoE"
    first, second, notes = show(result)
    assert [first.title[:5], second.title[:5]] == ["easy:", "hard:"]
    assert notes.startswith("load CV:")
    reports.clear()
    study.run(plan, lambda *report: reports.append(report))  # read back: one report per method
    assert [done for _, done, _ in reports] == [3, 6, 9, 12]


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    result = run(tmp_path, replace(TINY, seeds=1), keys=("hash",))
    (cells,) = table(result).rows
    assert "±" not in cells[1]
    written = save(Result(TINY, [result]), tmp_path)
    assert "NaN" not in written["Numbers"].read_text()


def test_figure_shows_both_dials(tmp_path: Path) -> None:
    import matplotlib.image

    result = run(tmp_path)
    path = draw(result, tmp_path / "f.png")
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] > 800
    assert pixels.shape[1] > 1200
    # Not an empty canvas: the two dial colours are there.
    for color in ((0x1B, 0x6C, 0xA8), (0xE0, 0x7A, 0x1F)):
        distance = abs(pixels[..., :3] * 255 - color).sum(-1)
        assert (distance < 12).sum() > 200


def test_command_line_runs_the_study(tmp_path: Path) -> None:
    arguments = ["synthetic", "--quick", "--seeds", "1", "--steps", "2", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--method", "grmoe", "--method", "hash"])
    assert result.exit_code == 0, result.output
    assert "GrMoE" in result.output
    assert "Bayes oracle" in result.output
    figure = tmp_path / "synthetic-easy.png"
    assert str(figure) in result.output.splitlines()[-1]
    assert figure.stat().st_size > 20_000
    assert json.loads((tmp_path / "results.json").read_text())["config"]["seeds"] == 1
    assert (tmp_path / "table.md").read_text().count("\n| ") >= 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["synthetic", "--setting", "medium"], "setting must be one of 'easy', 'hard', got 'medium'"),
        (["synthetic", "--method", "magic"], "method must be one of"),
        (["synthetic", "--device", "tpu"], "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (["normalizer", "--dim", "8"], "one --rank for each --dim"),
        (["normalizer", "--dim", "8", "--rank", "9"], "rank must be at most dim = 8, got 9"),
        (["normalizer", "--kappa", "-1"], "kappa must be a finite number >= 0, got -1.0"),
    ],
)
def test_mistakes_get_one_clear_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_missing_extras_name_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "scipy" else real(name))
    result = CliRunner().invoke(app, ["synthetic"])
    assert result.exit_code == 2
    assert 'needs scipy; install with: pip install "grmoe[studies]"' in result.output


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    arguments = ["grmoe", "synthetic", "--quick", "--seeds", "1", "--steps", "1", "--method", "hash"]
    monkeypatch.setattr("sys.argv", [*arguments, "--out", str(blocked / "runs")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    shown = capsys.readouterr().err
    assert "error:" in shown
    assert "Traceback" not in shown
    assert blocked.read_text() == "in the way"


def test_version_and_help() -> None:
    from grmoe import __version__

    assert __version__ in CliRunner().invoke(app, ["--version"]).output
    text = CliRunner().invoke(app, ["synthetic", "--help"]).output
    assert "Example" in text
    assert "--quick" in text


@pytest.mark.parametrize("name", ["easy", "hard"])
def test_the_page_shows_the_stored_results(name: str) -> None:
    root = Path(__file__).parents[2]
    (stored,) = json.loads((root / "results" / f"synthetic-{name}.json").read_text())["settings"]
    rows = stored.pop("rows")
    stored["methods"] = [
        MethodResult(**m | {"scores": [SeedScore(**s) for s in m["scores"]]}) for m in stored["methods"]
    ]
    result = SettingResult(**stored | {"setting": Setting(**stored["setting"])})
    found = [asdict(Row.of(m, result.num_experts)) for m in result.methods]
    assert found == [pytest.approx(row) for row in rows]
    shown = table(result)
    assert f"{shown.title}\n\n{shown.markdown()}\n" in (root / "docs/results/synthetic.md").read_text()
