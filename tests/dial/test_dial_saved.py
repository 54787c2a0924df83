"""An interrupted dial goes on with what it had measured."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grmoe.dial import Plan, Target, beside, calibration, mass, meter, save
from grmoe.dial.meter import Meter, Point
from grmoe.dial.saved import FILE, Saved
from grmoe.dial.speed import Speed
from grmoe.probe.losses import Measurement, measure
from grmoe.probe.windows import Text
from grmoe.runs.open import LoadedModel, open_model


class Interrupted(BaseException):
    """As Ctrl-C is: no `except Exception` stops it."""


class Count:
    """Counts measurements, and stops before the one that is one too many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.allowed = 0, 1000
        for module in (meter, beside):
            monkeypatch.setattr(module, "measure", self)

    def __call__(self, model: Any, text: Text) -> Measurement:
        if self.made == self.allowed:
            raise Interrupted
        self.made += 1
        return measure(model, text)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    def timed(_: Any, __: Any, points: Iterable[Point], trained: Point, *___: Any) -> dict[Point, Speed]:
        return {p: Speed(1.0, (1.0, 1.0), 1.0, (1.0, 1.0)) for p in [trained, *points]}

    monkeypatch.setattr(calibration, "time_points", timed)  # speeds differ from call to call
    return Count(monkeypatch)


def test_the_same_plan_goes_on_and_finds_the_same(
    run: Path, softmax_run: Path, data: Path, tmp_path: Path, count: Count, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(
        model=run, target=Target("experts", 1.5), tokens=256, checks=(str(data),), beside=(softmax_run,)
    )
    whole = calibration.run(plan).body  # without a folder nothing is kept
    needed, count.made = count.made, 0
    kept = replace(plan, folder=tmp_path / "out")
    for allowed in (12, needed - 3):
        count.allowed = allowed
        with pytest.raises(Interrupted):
            calibration.run(kept)
    assert (tmp_path / "out" / FILE).is_file()
    said = capsys.readouterr().err
    assert said.startswith("12 of about ")
    assert f" measurements were made before ({tmp_path / 'out' / FILE})" in said
    count.allowed = needed  # three more, and no others
    result = calibration.run(kept)
    assert count.made == needed
    assert result.body == whole
    assert capsys.readouterr().err.startswith(f"{needed - 3} of about ")
    save(result, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "pareto.png"}


def test_every_number_of_a_measurement_is_kept(loaded: LoadedModel, text: Text, tmp_path: Path) -> None:
    settings = [mass((1.0, 1.0), 0.4, 2), mass((1.0, 1.0), 0.4001, 2)]
    first = Meter(loaded.model, text, book=Saved(tmp_path).book(loaded, text))
    before = [first.measure(setting, "uniform").measured for setting in settings]
    # With other weights in memory: what is equal now was not measured again.
    loaded.model.lm_head.weight.data.zero_()
    second = Meter(loaded.model, text, book=Saved(tmp_path).book(loaded, text))
    for setting, old in zip(settings, before, strict=True):
        new = second.measure(setting, "uniform").measured
        assert torch.equal(old.losses_W, new.losses_W)
        assert vars(new) | {"losses_W": None} == vars(old) | {"losses_W": None}
    assert second.measure(mass((1.0, 1.0), 0.5, 2), "uniform").loss != pytest.approx(before[0].loss)


def test_another_model_text_or_type_is_measured_afresh(run: Path, tmp_path: Path, text: Text) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    loaded = open_model(copy)
    folder = tmp_path / "kept"
    book = Saved(folder).book(loaded, text)
    book.take("setting", lambda: measure(loaded.model, text))

    def found(loaded: LoadedModel, text: Text) -> int:
        saved = Saved(folder)
        saved.book(loaded, text)
        saved.book(loaded, text)  # opened twice, counted once
        return saved.found

    assert found(loaded, text) == 1
    renamed = Text("another name", text.rows_WS.clone(), text.domains_W)
    assert found(loaded, renamed) == 1
    assert found(loaded, replace(text, domains_W=())) == 0  # domains decide what keeps a promise
    other = text.rows_WS.clone()
    other[-1, -1] += 1
    assert found(loaded, Text(text.name, other)) == 0
    assert found(loaded, text.some(512)) == 0
    assert loaded.checkpoint is not None
    assert found(replace(loaded, checkpoint=replace(loaded.checkpoint, step=7)), text) == 0
    loaded.model.config.norm_topk_prob = True
    assert found(loaded, text) == 0
    loaded.model.config.norm_topk_prob = False
    loaded.model.config.alpha = 3.0  # a setting is no other model
    assert found(loaded, text) == 1
    torch.nn.Module.to(loaded.model, torch.bfloat16)
    assert found(loaded, text) == 0
    torch.nn.Module.to(loaded.model, torch.float32)
    assert found(loaded, text) == 1
    for file in loaded.checkpoint.path.glob("*.distcp"):  # written anew by another training
        os.utime(file, ns=(1, 1))
    assert found(loaded, text) == 0


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "\x00"])
def test_a_damaged_file_holds_nothing(content: str, tmp_path: Path, loaded: LoadedModel, text: Text) -> None:
    (tmp_path / FILE).write_text(content)
    saved = Saved(tmp_path)
    book = saved.book(loaded, text)
    assert saved.found == 0
    made = book.take("setting", lambda: measure(loaded.model, text))
    again = Saved(tmp_path).book(loaded, text).take("setting", pytest.fail)
    assert torch.equal(made.losses_W, again.losses_W)
