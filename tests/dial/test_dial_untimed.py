"""A dial without speeds finds the same, and nothing it leaves behind speaks of speed."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.dial import Plan, Target, calibration, meter, save
from grmoe.dial.meter import Point
from grmoe.dial.speed import Speed
from grmoe.dial.tables import show
from grmoe.probe.losses import Measurement, measure
from grmoe.probe.windows import Text
from grmoe.runs.results import load_results, plain
from grmoe.tables import Table


class Interrupted(BaseException):
    """As Ctrl-C is."""


def fail(*_: Any) -> dict[Point, Speed]:
    pytest.fail("something was timed")


def stub_speeds(_: Any, __: Any, points: Iterable[Point], trained: Point, *___: Any) -> dict[Point, Speed]:
    return {p: Speed(5.0, (4.0, 6.0), 1.25, (1.0, 1.5)) for p in [trained, *points]}


def without_speeds(found: Any) -> Any:
    """Results as plain data, less every speed."""
    if isinstance(found, dict):
        return {k: without_speeds(v) for k, v in found.items() if k != "speed"}
    return [without_speeds(v) for v in found] if isinstance(found, list) else found


def speeds_in(found: Any) -> list[Any]:
    if isinstance(found, dict):
        return [v for k, v in found.items() if k == "speed"] + [
            s for v in found.values() for s in speeds_in(v)
        ]
    return [s for v in found for s in speeds_in(v)] if isinstance(found, list) else []


def words(shown: Iterable[Table | str]) -> str:
    return "\n".join(part if isinstance(part, str) else f"{part.title}\n{part.markdown()}" for part in shown)


def test_it_finds_the_same_and_is_done_sooner(
    run: Path, softmax_run: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(
        model=run, target=Target("perplexity", 0.02), tokens=512, checks=(str(data),), beside=(softmax_run,)
    )
    said: dict[bool, list[tuple[str, int, int]]] = {True: [], False: []}
    found = {}
    for timed, times in ((True, stub_speeds), (False, fail)):
        monkeypatch.setattr(calibration, "time_points", times)
        found[timed] = calibration.run(
            replace(plan, timed=timed), lambda *step, kept=said[timed]: kept.append(step)
        )
    bodies = {timed: plain(result.body) for timed, result in found.items()}
    assert without_speeds(bodies[False]) == without_speeds(bodies[True])
    assert all(speed is None for speed in speeds_in(bodies[False]))
    assert len(speeds_in(bodies[False])) == len(speeds_in(bodies[True]))
    assert bodies[True]["chosen"]["speed"] is not None
    # A pass is two rounds here, and a warm-up.
    assert said[True][-1][2] - said[False][-1][2] == calibration.ROUNDS + 1
    assert "speed" not in {stage for stage, _, _ in said[False]}


def test_tables_picture_card_and_results_leave_speed_out(
    run: Path, softmax_run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "time_points", fail)
    arguments = [
        run, "--target-experts", 1.5, "--tokens", 512, "--check", data, "--beside", softmax_run, "--out", tmp_path,
        "--no-speed", "--write",
    ]  # fmt: skip
    done = CliRunner().invoke(app, ["dial", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    for absent in ("speed", "tokens/s"):
        assert absent not in done.output
    for present in ("Chosen:", "increase", "exp(H)", "Certificates", "Check:", "softmax"):
        assert present in done.output
    body = load_results(tmp_path / "results.json", "dial").body
    assert body["chosen"]["experts_per_token"] <= 1.5
    assert all(speed is None for speed in speeds_in(body))
    best = [p["name"] for p in body["points"] if p["best"]]
    assert len(best) > 3
    assert all(name in done.output for name in best)  # none is missing for want of a speed
    card = (tmp_path / "model" / "README.md").read_text()
    section = card[card.index("## The dial") :]
    assert "speed" not in section
    assert "tokens/s" not in section
    frontier = [p["name"] for p in body["points"] if p["on_frontier"]]
    rows = [line.split(" | ")[1] for line in section.splitlines() if line.startswith("| frontier")]
    assert 1 < len(rows) <= 3
    assert (rows[0], rows[-1]) == (frontier[0], frontier[-1])
    width, height = struct.unpack(">II", (tmp_path / "pareto.png").read_bytes()[16:24])
    assert (width, height) == (715, 572)  # one panel of 5.5 × 4.4 inches


def test_a_target_of_speed_needs_speeds(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"throughput needs measured speeds, got --no-speed \(timed=False\)"):
        Plan(model=run, target=Target("throughput", 1.2), timed=False)
    arguments = ["dial", run, "--throughput", "1.2x", "--no-speed", "--out", tmp_path / "out"]
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 2
    assert "a target of throughput needs measured speeds, got --no-speed" in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_a_dial_interrupted_while_it_was_timed_ends_without_speeds(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any) -> dict[Point, Speed]:
        raise Interrupted

    measured: list[str] = []

    def count(model: Any, text: Text) -> Measurement:
        measured.append(text.name)
        return measure(model, text)

    monkeypatch.setattr(calibration, "time_points", stop)
    monkeypatch.setattr(meter, "measure", count)
    plan = Plan(model=run, target=Target("experts", 1.5), tokens=256, folder=tmp_path)
    with pytest.raises(Interrupted):
        calibration.run(plan)
    made = len(measured)
    result = calibration.run(replace(plan, timed=False))
    assert capsys.readouterr().err.startswith(f"{made} of about ")
    levelled = len(result.body.curve)
    assert 0 < len(measured) - made <= levelled  # only what follows the timing: points of the curve
    save(result, tmp_path)
    # A dial with speeds is another answer: replacing it is said, with the speed that is gone.
    speed = Speed(5.0, (4.0, 6.0), 1.25, (1.0, 1.5))
    timed = replace(result, body=replace(result.body, chosen=replace(result.body.chosen, speed=speed)))
    save(timed, tmp_path)
    capsys.readouterr()
    save(result, tmp_path)
    assert capsys.readouterr().err.endswith(" experts per token, 1.25 times the trained speed\n")
    save(result, tmp_path)
    assert capsys.readouterr().err == ""
    assert "speed" not in words(show(result))
    assert json.loads((tmp_path / "results.json").read_text())["body"]["chosen"]["speed"] is None


def test_the_help_says_why() -> None:
    said = " ".join(CliRunner().invoke(app, ["dial", "--help"]).output.replace("│", " ").split())
    assert "--no-speed" in said
    assert "Time nothing. Quicker, and on a busy machine times mean nothing." in said
