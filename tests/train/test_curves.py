"""A log in pictures and words: the curves, one line per step, the summary. The logs are made up."""

from __future__ import annotations

import errno
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from grmoe.pictures import COLORS, INK
from grmoe.runs.config import TrainConfig
from grmoe.train import curves, interrupt, log, summary
from grmoe.train.curves import draw_curves
from grmoe.train.loop import Outcome
from grmoe.train.validate import Validation

Settings = Callable[..., TrainConfig]


def layer(entropy: float, load: list[float]) -> dict[str, Any]:
    return {
        "entropy": entropy, "load": load, "load_cv": entropy / 10, "leading_load": [0.9, 0.1], "leading_cv": 0.8,
        "experts_per_token": 1.0,
    }  # fmt: skip


def train_line(step: int, loss: float, dense: bool = False) -> dict[str, Any]:
    loads = [[1.0, 1.0]] * 2 if dense else [[0.2, 1.8], [0.5, 0.5]]
    return {
        "kind": "train", "step": step, "loss": loss, "entropy": 0.6, "load_cv": 0.06, "leading_cv": 0.7,
        "experts_per_token": 2.0 if dense else 1.0, "layers": [layer(0.5, loads[0]), layer(0.7, loads[1])],
    }  # fmt: skip


def validation_line(step: int, loss: float) -> dict[str, Any]:
    return {"kind": "validation", "step": step, "loss": loss, "perplexity": math.exp(loss), "domains": {}}


def write_log(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The four axes of the last figure: loss, imbalance, load, entropy."""
    kept: list[Any] = []
    real = curves.picture

    @contextmanager
    def keep(*arguments: Any) -> Iterator[Any]:
        with real(*arguments) as figure:
            yield figure
            kept[:] = figure.axes
            assert arguments[1:] == (11, 7)  # inches

    monkeypatch.setattr(curves, "picture", keep)
    return kept


def curve(line: Any) -> tuple[list[float], list[float]]:
    return list(line.get_xdata()), list(line.get_ydata())


def band(collection: Any) -> tuple[float, float]:
    y = collection.get_paths()[0].vertices[:, 1]
    return float(y.min()), float(y.max())


def test_the_curves_of_two_runs(axes: list[Any], tmp_path: Path) -> None:
    first = [train_line(1, 5.0), train_line(2, 4.0), validation_line(2, 3.0), train_line(3, 2.0)]
    second = [train_line(1, 6.0), train_line(2, math.inf)]
    runs = [write_log(tmp_path / name, lines) for name, lines in (("a", first), ("b", second))]
    draw_curves(runs, tmp_path / "out" / "x.png", unigram=math.exp(4.5))
    loss, imbalance, load, entropy = axes
    assert [ax.get_title() for ax in axes] == [
        "loss, nats per token (dots: validation)",
        "load imbalance: CV over experts (band: layers)",
        "tokens received (dense: led) over the fair share, least and most used expert",
        "entropy of the gate, nats (band: layers)",
    ]
    assert {ax.get_xlabel() for ax in axes} == {"step"}
    assert {ax.title.get_fontsize() for ax in axes} == {9}
    assert {ax.get_ylim()[0] for ax in (imbalance, load, entropy)} == {0.0}
    assert loss.get_ylim() == pytest.approx((0.95 * 2.0, 1.03 * 6.0))  # of what is finite

    lines = [curve(line) for line in loss.lines]
    assert lines[0] == ([1, 2, 3], [5.0, 4.0, 2.0])
    assert lines[1] == ([2], [3.0])
    assert lines[2] == ([1, 2], [6.0, math.inf])
    assert loss.lines[1].get_marker() == "o"
    unigram = loss.lines[4]
    assert list(unigram.get_ydata()) == pytest.approx([4.5, 4.5])
    assert unigram.get_color() == INK
    (words,) = loss.texts
    assert words.get_text() == "unigram model"
    assert words.xy == pytest.approx((0, 4.5))
    assert words.get_fontsize() == 8
    named = [text.get_text() for text in loss.get_legend().get_texts()]
    assert named == [f"a: validation perplexity {math.exp(3):.2f}", "b"]
    assert not loss.get_legend().get_frame_on()

    # One band per run, from the least to the most of its layers, around their mean.
    for ax, key, low, high in ((imbalance, "load_cv", 0.05, 0.07), (entropy, "entropy", 0.5, 0.7)):
        assert [band(c) for c in ax.collections] == [pytest.approx((low, high))] * 2
        mean = train_line(1, 1.0)[key]
        assert [curve(line) for line in ax.lines] == [([1, 2, 3], [mean] * 3), ([1, 2], [mean] * 2)]
        assert [line.get_color() for line in ax.lines] == list(COLORS[:2])
    # Load over the fair share: 0.2 of 2.0 for two experts is 0.2, and 1.8 is 1.8.
    load_lines = [curve(line) for line in load.lines]
    assert load_lines[0] == ([1, 2, 3], pytest.approx([0.2] * 3))
    assert load_lines[1] == ([1, 2, 3], pytest.approx([1.8] * 3))
    assert list(load.lines[2].get_ydata()) == [1, 1]


def test_without_selection_the_leading_experts_are_drawn(axes: list[Any], tmp_path: Path) -> None:
    draw_curves([write_log(tmp_path / "run", [train_line(1, 3.0, dense=True)])], tmp_path / "x.png")
    loss, imbalance, load, _ = axes
    assert curve(imbalance.lines[0]) == ([1], [0.7])
    assert [curve(line)[1] for line in load.lines[:2]] == [pytest.approx([0.2]), pytest.approx([1.8])]
    assert len(loss.lines) == 2
    assert len(loss.texts) == 0  # no unigram model given
    assert loss.get_ylim() == pytest.approx((0.95 * 3, 1.03 * 3))


def test_the_table_has_the_last_validation_of_each_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    routing = {"entropy": 0.625, "load_cv": 0.25, "min_load": 0.125, "experts_per_token": 1.5}
    lines = [validation_line(step, loss) | routing for step, loss in ((2, 3.0), (4, 2.5), (6, 2.0))]
    done = write_log(tmp_path / "done", [*lines, train_line(7, 1.0)])
    young = write_log(tmp_path / "young", [train_line(1, 5.0)])
    models = {done: {"router": "softmax"}, young: {}}
    data = SimpleNamespace(path=str(tmp_path / "gone"))
    monkeypatch.setattr(curves, "saved_config", lambda run: SimpleNamespace(model=models[run], data=data))
    table = curves.summary([done, young])
    assert table.left == 2
    numbers = ("6", f"{math.exp(2):.2f}", "–", "0.62", "0.250", "0.125", "1.50")
    assert table.rows == [("done", "softmax", *numbers), ("young", "no validation yet", *[""] * 7)]
    monkeypatch.setattr(curves, "TokenDataset", lambda path, split: (path, split))
    monkeypatch.setattr(curves, "unigram_perplexity", lambda given: 12.34)
    models[done] = {}
    assert curves.summary([done]).rows[0][1:5] == ("grassmann", "6", f"{math.exp(2):.2f}", "12.3")


def test_more_runs_than_colours_and_runs_without_a_log(axes: list[Any], tmp_path: Path) -> None:
    count = len(COLORS) + 1
    runs = [write_log(tmp_path / f"run{i}", [train_line(1, 3.0)]) for i in range(count)]
    draw_curves(runs, tmp_path / "x.png")
    assert [line.get_color() for line in axes[3].lines] == [*COLORS, COLORS[0]]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"no training log in {tmp_path / 'empty'}$"):
        draw_curves([runs[0], tmp_path / "empty"], tmp_path / "x.png")
    begun = write_log(tmp_path / "begun", [validation_line(1, 3.0)])  # before the first line of training
    with pytest.raises(ValueError, match=f"no training log in {begun}$"):
        draw_curves([runs[0], begun], tmp_path / "x.png")


def test_the_screen_shows_a_bar_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = train_line(3, 2.0) | {
        "tokens_per_second": 1.0, "mfu": None, "memory_gb": 1.0, "max_overlap": None, "min_load": 0.1,
        "seconds_left": 61.0,
    }  # fmt: skip
    flushed: list[bool] = []
    monkeypatch.setattr(
        "builtins.print", lambda text, file, flush: flushed.append(flush) or file.write(f"{text}\n")
    )
    plain = log.Screen(10, 2, "begins [now]")
    assert plain.bar is None
    plain.write(line)
    plain.write(validation_line(4, 1.0))
    plain.close()
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "begins [now]"
    assert said[1].startswith("step 3: loss 2.000")
    assert said[1].endswith("experts  1:01 left")
    assert said[2].startswith("step 4: validation loss 1.0000")
    assert flushed == [True] * 3  # each is seen at once

    options = {"force_terminal": True, "width": 200, "color_system": "truecolor"}
    monkeypatch.setattr(log, "Console", lambda stderr: Console(stderr=stderr, **options))
    screen = log.Screen(10, 2, "begins [now] at 17")
    assert screen.bar is not None
    (task,) = screen.bar.tasks
    assert (task.total, task.completed, task.description) == (10, 2, "starting")
    assert screen.bar.speed_estimate_period == 300
    assert screen.bar.columns[1].bar_width == 20  # type: ignore[attr-defined]
    screen.write(line)
    assert (task.completed, task.description) == (3, log.describe(line))
    screen.write(validation_line(4, 1.0))
    assert screen.bar.live.is_started
    screen.close()
    assert not screen.bar.live.is_started
    said = capsys.readouterr().err.splitlines()
    assert any(
        "begins [now] at 17" in text for text in said
    )  # brackets are no markup, numbers have no colour
    assert any("step 4: validation loss 1.0000" in text for text in said)
    assert len(flushed) == 3


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_a_narrow_terminal_keeps_step_loss_and_time(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In 80 columns the line once ended before the time left."""
    line = train_line(9000, 2.0) | {
        "tokens_per_second": 123456.0, "mfu": 0.45, "memory_gb": 61.5, "max_overlap": 0.25, "min_load": 0.125,
        "seconds_left": 61.0,
    }  # fmt: skip
    monkeypatch.setattr(
        log, "Console", lambda stderr: Console(stderr=stderr, force_terminal=True, width=width)
    )
    screen = log.Screen(10000, 2, "begins")
    screen.write(line)
    screen.close()
    (shown,) = [text for text in capsys.readouterr().err.splitlines() if "loss" in text][-1:]
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).strip()
    assert len(shown) <= width
    assert re.match(r"step 9000/10000 .*loss 2\.000.* left (0:|-:)", shown), shown
    assert "…" not in shown
    assert ("tok/s" in shown) == (width >= 80)
    assert ("overlap" in shown) == (len(log.describe(line)) + 60 < width)


def test_a_closed_terminal_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGHUP every write to the terminal fails. The checkpoint comes after it."""

    def closed(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    plain = log.Screen(10, 2, "begins")
    monkeypatch.setattr("builtins.print", closed)
    plain.write(validation_line(4, 1.0))
    plain.close()


def test_the_first_steps_say_how_long_the_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.5, 101.0, 101.5, 102.0])
    monkeypatch.setattr(interrupt.time, "perf_counter", lambda: next(times))
    forecast = interrupt.Forecast(first=10, steps=1014)
    assert [forecast.after(done) for done in range(11, 16)] == [
        None, None, None, "step 14: 0.5 s per step, about 8:20 for the 1000 steps left", None,
    ]  # fmt: skip


def test_an_expert_without_any_load_is_drawn_at_zero() -> None:
    assert curves._over_fair([0.0, 0.0], min) == 0.0
    assert curves._over_fair([0.1, 0.3], max) == pytest.approx(1.5)


def test_lines_in_words() -> None:
    line = train_line(3, 2.0) | {
        "tokens_per_second": 12345.6, "mfu": None, "memory_gb": 1.25, "max_overlap": None, "min_load": 0.125,
    }  # fmt: skip
    said = log.describe(line)
    assert said == "loss 2.000  12,346 tok/s  1.2 GB  H 0.60  CV 0.06  min load 0.125  1.00 experts"
    said = log.describe(line | {"mfu": 0.4567, "max_overlap": 0.25})
    assert "tok/s  MFU 45.7%  1.2 GB" in said
    assert said.endswith("experts  overlap 0.250")
    numbers = {"loss": 2.0, "perplexity": 7.389, "domains": {"a": math.log(3), "b": 1e6}}
    assert log._describe_validation(numbers).startswith(
        "validation loss 2.0000, perplexity 7.39 (a 3.00, b 1"
    )
    many = {"x" * 99: 0.0, **{f"d{n}": math.log(n) for n in range(1, 8)}}
    said = log._describe_validation(numbers | {"domains": many})
    assert said.endswith(f"({'x' * 39}… 1.00, d1 1.00, d2 2.00, d3 3.00, d4 4.00, 3 others)")
    five = dict(list(many.items())[:6])
    assert log.describe_domains(five).endswith("d4 4.00, d5 5.00)")  # not "1 others"
    assert log._describe_validation(numbers | {"domains": {"a": 2.0}}).endswith(
        "perplexity 7.39"
    )  # it is the whole
    assert [log.duration(s) for s in (0.4, 59.6, 61, 3599, 3600, 7325)] == [
        "0:00", "1:00", "1:01", "59:59", "1:00:00", "2:02:05",
    ]  # fmt: skip


def test_the_summary_takes_the_last_validation(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = settings()
    lines = [train_line(1, 3.0), validation_line(1, 2.5), validation_line(2, 2.0) | {"domains": {"a": 1.5}}]
    folder = write_log(tmp_path / "run", lines)
    checkpoint: Any = SimpleNamespace(path=folder / "checkpoints" / "x")

    def outcome(validation: Validation | None = None, at: Path = folder) -> summary.Summary:
        return summary.summarize(config, Outcome(at, checkpoint, validation))

    again = outcome()
    assert (again.perplexity, again.domains, again.has_log) == (math.exp(2.0), {"a": 1.5}, True)
    said = list(summary.show(again))
    assert said[0].startswith(f"{folder} had already reached its last step. To train it further, add steps=N")
    assert said[1].startswith("Validation perplexity 7.39; unigram model ")
    assert len(said) == 2
    fresh = outcome(Validation(1.0, {"b": 0.5}, []))
    assert (fresh.perplexity, fresh.domains) == (math.exp(1.0), {"b": 0.5})
    assert len(list(summary.show(fresh))) == 1
    lost = outcome(at=tmp_path / "gone")
    assert (lost.perplexity, lost.domains, lost.has_log) == (None, {}, False)
    assert list(summary.show(lost))[1:] == [f"{tmp_path / 'gone' / 'log.jsonl'} has no lines to draw."]
    for kept in (lines[:1], lines[1:]):  # the figure needs both kinds of lines
        part = write_log(tmp_path / f"part{len(kept)}", kept)
        assert not outcome(at=part).has_log
    drawn: list[Any] = []
    monkeypatch.setattr(
        summary, "draw_curves", lambda runs, path, unigram: drawn.append((runs, path, unigram)) or path
    )
    assert summary.save(again) == {"Figure": folder / "curves.png", "Checkpoint": checkpoint.path}
    assert drawn == [([folder], folder / "curves.png", again.unigram)]
    assert summary.save(lost) == {"Checkpoint": checkpoint.path}
    monkeypatch.setattr(summary.importlib.util, "find_spec", lambda name: None)
    assert summary.save(again) == {"Checkpoint": checkpoint.path}  # without matplotlib
