"""The study end to end: files, resumption, tables, figures, command line."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grmoe.cli import app, main
from grmoe.studies.synthetic import heatmap, results, study
from grmoe.studies.synthetic.figure import draw
from grmoe.studies.synthetic.methods import METHODS, find_methods
from grmoe.studies.synthetic.results import Config, Screening, SettingResult
from grmoe.studies.synthetic.saving import save
from grmoe.studies.synthetic.study import Plan, Result, best_rate, missing
from grmoe.studies.synthetic.tables import HEADINGS, Row, rates_table, show, table
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
    rates=(1.0,),
    screening_seeds=2,
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


def test_another_setting_is_added_to_a_file(tmp_path: Path) -> None:
    run(tmp_path, keys=("hash",))
    run(tmp_path, keys=("hash",), setting=HARD)
    found = results.read(tmp_path, "hash")
    assert found is not None
    assert list(found.results) == ["easy", "hard"]
    both = Plan(out=tmp_path, config=TINY, settings=(EASY, HARD), methods=find_methods(["hash"]))
    assert missing(both, both.methods[0]) == ()
    assert missing(replace(both, config=replace(TINY, device="cuda")), both.methods[0]) == ()
    assert missing(replace(both, config=replace(TINY, rank=2)), both.methods[0]) == (EASY, HARD)
    assert missing(both, replace(both.methods[0], supervised=True)) == (EASY, HARD)
    assert missing(both, replace(both.methods[0], title="another name")) == ()


def test_settings_run_together_as_they_do_alone(tmp_path: Path) -> None:
    plan = Plan(out=tmp_path / "both", config=TINY, settings=(EASY, HARD), methods=find_methods(["grmoe"]))
    together = study.run(plan).settings
    for each in together:
        alone = run(tmp_path / each.setting.name, keys=("grmoe",), setting=each.setting)
        for a, b in zip(each.methods[0].scores, alone.methods[0].scores, strict=True):
            assert a.accuracy == pytest.approx(b.accuracy, abs=0.01)  # a near tie may round the other way
            assert a.loss == pytest.approx(b.loss, rel=1e-3)


def test_rates_are_chosen_on_other_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(TINY, rates=(1e-6, 1.0), training=Training(steps=8, batch=64))
    trained: list[list[float]] = []
    real = study.train
    monkeypatch.setattr(study, "train", lambda *a, **k: (trained.append(k["rates"]), real(*a, **k))[1])
    result = run(tmp_path, config, keys=("grmoe",))
    (found,) = result.methods
    assert trained == [[1e-6] * 2 + [1.0] * 2, [1.0] * 2]  # one program for all rates, then the best one
    assert found.rate == 1.0
    assert found.screening is not None
    assert found.screening.rates == [1e-6, 1.0]
    assert min(found.screening.loss[0]) > max(found.screening.loss[1])  # the small rate has not moved
    shown = rates_table(result)
    assert shown is not None
    assert shown.rows[0][-1] == "×1"
    assert [cells[-2] for cells in table(result).rows] == ["×1"]
    # The tasks of the choice are not those that are scored.
    bench = study.Bench(config)
    mine, other = bench.task([EASY]), bench.task([EASY], screening=True)
    assert not mine.frames_SNDK.allclose(other.frames_SNDK)
    assert rates_table(run(tmp_path / "one", keys=("hash",))) is None


def test_a_diverged_rate_is_never_chosen() -> None:
    found = Screening(
        rates=[0.1, 1.0, 3.0], loss=[[0.6, 0.6], [0.5, 0.5], [0.1, math.nan]], accuracy=[[0.9], [0.8], [0.7]]
    )
    assert best_rate(found) == 1.0
    assert best_rate(found, by_accuracy=True) == 0.1


def test_nan_survives_a_file(tmp_path: Path) -> None:
    first = run(tmp_path, keys=("hash",)).methods[0]
    saved = results.read(tmp_path, "hash")
    assert saved is not None
    screening = Screening(rates=[1.0], loss=[[math.nan, 0.5]], accuracy=[[0.1, 0.2]])
    scores = [replace(first.scores[0], loss=math.nan), first.scores[1]]
    results.write(
        replace(saved, results={"easy": replace(first, scores=scores, screening=screening)}), tmp_path / "b"
    )
    assert "NaN" not in (tmp_path / "b" / "hash.json").read_text()
    again = results.read_all(tmp_path / "b")["easy"].methods[0]
    assert math.isnan(again.scores[0].loss)
    assert again.scores[1] == first.scores[1]
    assert again.screening is not None
    assert math.isnan(again.screening.loss[0][0])


def test_jobs_side_by_side_give_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers share the methods. Threads stand in for processes here, because a process costs seconds."""
    import multiprocessing.dummy

    class Worker(multiprocessing.dummy.Process):
        exitcode = 0

    class Context:
        Process = Worker

    monkeypatch.setattr(study, "get_context", lambda kind: Context)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    plan = Plan(
        out=tmp_path, config=TINY, settings=(EASY,), methods=find_methods(["hash", "softmax_top1", "switch"])
    )
    reports: list[tuple[str, int, int]] = []
    result = study.run(replace(plan, at_once=2), lambda *report: reports.append(report))
    apart = study.run(replace(plan, out=tmp_path / "apart"))
    assert [m.scores for m in result.settings[0].methods] == [m.scores for m in apart.settings[0].methods]
    assert {total for _, _, total in reports} == {3}
    monkeypatch.setattr(Worker, "exitcode", 1)
    with pytest.raises(study.JobError, match="a process of the study failed"):
        study.run(replace(plan, out=tmp_path / "failed", at_once=2))


def test_no_job_starts_after_the_time(tmp_path: Path) -> None:
    plan = Plan(
        out=tmp_path,
        config=TINY,
        settings=(EASY,),
        methods=find_methods(["hash"]),
        until=time.monotonic() - 1,
    )
    assert study.run(plan).settings == []
    assert not list(tmp_path.iterdir())


def test_a_job_that_would_not_finish_does_not_start(tmp_path: Path) -> None:
    run(tmp_path, keys=("hash",))
    saved = results.read(tmp_path, "hash")
    assert saved is not None
    assert saved.revision
    slow = {name: replace(found, seconds=100.0) for name, found in saved.results.items()}
    results.write(replace(saved, results=slow), tmp_path)
    plan = Plan(out=tmp_path, config=TINY, settings=(EASY,), methods=find_methods(["softmax_top1"]))
    assert study.run(replace(plan, until=time.monotonic() + 50)).settings == []
    assert study.run(replace(plan, until=time.monotonic() + 200)).settings


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    run(tmp_path, keys=("hash",))
    path = tmp_path / "hash.json"
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
    written = save(Result(TINY, [result]), tmp_path)
    assert list(written) == ["Numbers", "Table", "Figure, easy"]
    text = written["Table"].read_text()
    assert all(part in text for part in (table(result).title, table(result).markdown()))
    saved = json.loads((tmp_path / "grmoe.json").read_text())
    assert saved["settings"]["easy"]["scores"]["accuracy"] == pytest.approx([s.accuracy for s in scores])
    assert saved["config"]["training"]["steps"] == 3
    assert saved["machine"] == "CPU"
    assert result.methods[0].overlap[0] == pytest.approx(0.1, abs=1e-3)


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


def test_progress_counts_the_steps_of_all_methods(tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    plan = Plan(out=tmp_path, config=replace(TINY, rates=(0.5, 1.0)), methods=find_methods(["hash", "grmoe"]))
    result = study.run(plan, lambda *report: reports.append(report))
    assert [done for _, done, _ in reports] == list(range(1, 13))  # 2 methods, 2 stages, 3 steps
    assert {total for _, _, total in reports} == {12}
    assert reports[0][0] == "Hash: learning rates"
    assert reports[-1][0] == "GrMoE"
    *tables, notes = list(show(result))[:4]
    assert [shown.title.split(":")[0] for shown in tables] == ["easy", "hard", "skewed"]
    assert notes.startswith("load CV:")
    reports.clear()
    study.run(plan, lambda *report: reports.append(report))  # read back: one report per method
    assert [done for _, done, _ in reports] == [6, 12]


def test_map_has_a_cell_for_every_pair(tmp_path: Path) -> None:
    settings = heatmap.grid((0.1, 0.4), (0.2, 0.5, 0.7))
    result = study.run(heatmap.map_plan(tmp_path, TINY, settings))
    found = heatmap.Map.of(result.settings)
    assert (found.rhos, found.sigma2s) == ([0.1, 0.4], [0.2, 0.5, 0.7])
    oracle, top1, top2, ours = heatmap.tables(found)
    assert [len(t.rows) for t in (oracle, top1, top2, ours)] == [2, 2, 2, 2]
    one = found.at(0.4, 0.5, "grmoe")
    assert one is not None
    assert one.dial is None
    assert ours.rows[1][2].startswith(f"{100 * sum(s.share for s in one.scores) / 2:.1f} ± ")
    assert oracle.rows[0][1] == f"{100 * one_oracle(found, 0.1, 0.2):.1f}"
    written = heatmap.save(result, tmp_path)
    assert written["Figure"].stat().st_size > 10_000
    assert {(0.1, 0.1), (0.4, 0.5)} <= {(s.rho, s.sigma2) for s in heatmap.grid()}  # the paper's settings


def one_oracle(found: heatmap.Map, rho: float, sigma2: float) -> float:
    cell = found.cells[rho, sigma2]
    assert cell.setting == heatmap.own_setting(rho, sigma2)
    return cell.methods[0].oracle_accuracy


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    result = run(tmp_path, replace(TINY, seeds=1), keys=("hash",))
    (cells,) = table(result).rows
    assert "±" not in cells[1]


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
    assert "Bayes classifier" in result.output
    figure = tmp_path / "synthetic-easy.png"
    assert str(figure) in result.output.splitlines()[-1]
    assert figure.stat().st_size > 20_000
    assert json.loads((tmp_path / "grmoe.json").read_text())["config"]["seeds"] == 1
    assert (tmp_path / "table.md").read_text().count("\n| ") >= 3


def test_command_line_takes_settings_of_ones_own(tmp_path: Path) -> None:
    arguments = ["synthetic", "--quick", "--seeds", "1", "--steps", "1", "--method", "hash", "--rank", "4"]
    own = [
        "--rho",
        "0.2",
        "--sigma2",
        "0.3",
        "--sigma2",
        "0.4",
        "--ratio",
        "0.5",
        "--rate",
        "1",
        "--rate",
        "2",
    ]
    result = CliRunner().invoke(app, [*arguments, *own, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = results.read(tmp_path, "hash")
    assert found is not None
    assert list(found.results) == ["rho0.2-sigma0.3-ratio0.5", "rho0.2-sigma0.4-ratio0.5"]
    assert (found.fingerprint["rank"], found.fingerprint["rates"]) == (4, [1.0, 2.0])
    result = CliRunner().invoke(app, [*arguments, "--map", "--out", str(tmp_path / "map")])
    assert result.exit_code == 0, result.output
    assert "Accuracy of the Bayes" in result.output
    assert (tmp_path / "map" / "synthetic-map.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["synthetic", "--setting", "medium"],
            "setting must be one of 'easy', 'hard', 'skewed', got 'medium'",
        ),
        (["synthetic", "--setting", "easy", "--rho", "0.2"], "--setting cannot be given with --map, --rho"),
        (["synthetic", "--rho", "2"], "rho must be in [0, 1)"),
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


def test_stored_results_are_readable() -> None:
    found = results.read_all(Path(__file__).parents[2] / "results" / "synthetic")
    assert {"easy", "hard"} <= set(found)
    for setting in found.values():
        assert [m.key for m in METHODS if setting.find(m.key)] == [m.method for m in setting.methods]
        for method in setting.methods:
            assert len(method.scores) == 50
            row = Row.of(method, setting.num_experts)
            assert row.accuracy <= method.oracle_accuracy + 0.01
            if method.screening is not None:
                supervised = method.method == "supervised"
                assert method.rate == best_rate(method.screening, by_accuracy=supervised)
