"""The loop: what happens at which step, in which order. Steps, validation, checkpoints and log are made up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grmoe.parallel.world import World
from grmoe.runs.checkpoint import CheckpointError
from grmoe.runs.config import TrainConfig
from grmoe.train import loop as loop_module
from grmoe.train.interrupt import Clock
from grmoe.train.loop import TrainingStopped, _memory_gb, _train_line
from grmoe.train.step import NonFiniteError, StepResult

Settings = Callable[..., TrainConfig]
CPU = torch.device("cpu")
ONE = World(0, 1, 0, CPU, None)


def run_loop(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    first: int = 0,
    bad: int | None = None,
    signal_at: int | None = None,
    failed_at: int | None = None,
    world: World = ONE,
    **changes: Any,
) -> tuple[list[Any], Any]:
    """The real loop, with steps, validation, checkpoints and log that only tell. Returns (what was told, its end)."""
    told: list[Any] = []
    config = settings(**changes)
    now = {"step": -1}

    def step(trainer: Any, number: int, batch: int) -> int:
        now["step"] = number
        told.append(f"step {number} batch {batch}")
        if signal_at == number:
            signals[0].caught = 15
        return number

    def resolved(trainer: Any, in_flight: int, newest: int) -> str:
        told.append(f"resolve {in_flight} at {newest}")
        if bad == in_flight:
            raise NonFiniteError("loss nan", in_flight)
        return f"result {in_flight}"

    signals: list[Any] = []

    class Signals(loop_module.Signals):
        def __init__(self) -> None:
            super().__init__()
            signals.append(self)

    class Checkpoints:
        @property
        def failed(self) -> bool:
            return failed_at is not None and now["step"] >= failed_at

        def save(self, step: int, state: Any, about: dict[str, Any], background: bool) -> Any:
            told.append(
                f"save {step}{' behind' if background else ''} {about['metric']} {about['processes']}"
            )
            assert (state, about["data"]) == ("state", "d")
            return SimpleNamespace(path=Path(f"at{step}"))

        def wait(self) -> None:
            raise CheckpointError("disk full")

    class Watch(Clock):
        def count(self, tokens: int) -> None:
            told.append(f"count {tokens}")

        def lap(self) -> None:
            told.append("lap")
            super().lap()

        @contextlib.contextmanager
        def paused(self) -> Iterator[None]:
            told.append("pause")
            yield

    def batches(rows: int, length: int, seed: int, rank: int, size: int, start_step: int) -> Iterator[int]:
        assert (rows, length, seed, rank, size) == (4, 16, config.seed, world.rank, world.size)
        return iter(range(start_step, 100))

    stubs: dict[str, Any] = {
        "train_step": step, "resolve": resolved, "Signals": Signals, "Clock": Watch,
        "any_process": lambda world, flag: flag, "gather": lambda model, optimizers: "state",
        "find_bad_state": lambda state, world: None,
        "sync_metrics": lambda model, world: told.append("sync"),
        "validate": lambda trainer: told.append("validate") or SimpleNamespace(loss=2.5),
        "_train_line": lambda trainer, done, result, clock: f"line {done} {result}",
        "_validation_line": lambda done, validation: f"validation line {done}",
    }  # fmt: skip
    for name, stub in stubs.items():
        monkeypatch.setattr(loop_module, name, stub)
    model = SimpleNamespace(reset_routing_metrics=lambda: told.append("reset"))
    trainer: Any = SimpleNamespace(
        config=config, model=model, world=world, optimizers=[], rows=4, length=16, tokens_per_step=64,
        data=SimpleNamespace(batches=batches),
    )  # fmt: skip
    logger: Any = SimpleNamespace(write=told.append, say=lambda text: None)
    begin: Any = SimpleNamespace(step=first, metric=None) if first else None
    checkpoints: Any = Checkpoints()
    try:
        return told, loop_module._loop(trainer, checkpoints, logger, begin, {"data": "d"})
    except (TrainingStopped, CheckpointError) as error:
        return told, error


EVERY = {"log": {"every": 2}, "validation": {"every": 4}, "checkpoint": {"every": 3}}


def test_what_happens_at_which_step(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    told, outcome = run_loop(settings, monkeypatch, steps=5, **EVERY)
    logged = ["sync", "LINE", "reset", "lap", "pause"]
    assert told[0] == "lap"  # the clock starts

    def line(number: int) -> list[str]:
        return [f"line {number + 1} result {number}" if part == "LINE" else part for part in logged]

    assert told[1:] == [
        "step 0 batch 0", "count 64", "pause",  # its numbers are read while the next step runs
        "step 1 batch 1", "resolve 0 at 1", "resolve 1 at 1", "count 64", *line(1),
        "step 2 batch 2", "resolve 2 at 2", "count 64", "pause", "save 3 None 1",
        "step 3 batch 3", "resolve 3 at 3", "count 64", *line(3), "validate", "validation line 4",
        "step 4 batch 4", "resolve 4 at 4", "count 64", *line(4), "validate", "validation line 5", "save 5 2.5 1",
    ]  # fmt: skip
    assert outcome.checkpoint.path == Path("at5")
    assert outcome.validation.loss == 2.5
    assert outcome.folder == Path(settings().out)


def test_a_resumed_loop_goes_on_where_it_was(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    told, _ = run_loop(settings, monkeypatch, first=3, steps=5, log={"every": 100})
    assert [t for t in told if t.startswith(("step", "save"))] == [
        "step 3 batch 3", "step 4 batch 4", "save 5 2.5 1",
    ]  # fmt: skip


def test_other_processes_neither_log_nor_stay_behind(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, _ = run_loop(settings, monkeypatch, steps=4, world=World(1, 2, 1, CPU, None), **EVERY)
    assert not any("line" in t for t in told)
    assert told.count("sync") == told.count("reset") == 2
    assert told.count("validate") == 1
    assert [t for t in told if t.startswith("save")] == ["save 3 None 2", "save 4 2.5 2"]


def test_checkpoints_in_the_background_but_the_last(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = {"checkpoint": {"every": 2, "background": True}}
    told, _ = run_loop(settings, monkeypatch, steps=6, **behind)
    assert [t for t in told if t.startswith("save")] == [
        "save 2 behind None 1",
        "save 4 behind None 1",
        "save 6 2.5 1",
    ]
    # A thread that failed ends the run at the next step. Without a thread nobody asks.
    told, error = run_loop(settings, monkeypatch, steps=6, failed_at=2, **behind)
    assert str(error) == "disk full"
    assert told[-1] == "pause"
    assert [t for t in told if t.startswith("step")][-1] == "step 2 batch 2"
    _, outcome = run_loop(settings, monkeypatch, steps=6, failed_at=2, checkpoint={"every": 2})
    assert outcome.checkpoint.path == Path("at6")


def test_a_signal_saves_and_stops(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"steps": 6, "log": {"every": 100}, "checkpoint": {"every": 0, "background": True}}
    told, error = run_loop(settings, monkeypatch, signal_at=1, **options)
    assert isinstance(error, TrainingStopped)
    assert error.status == 128 + 15
    assert str(error).startswith(
        "SIGTERM: stopped after step 2, saved as at2\nContinue with: grmoe train --resume"
    )
    assert told[-3:] == ["count 64", "pause", "save 2 None 1"]  # not in the background
    # At the last step there is nothing left to stop.
    _, outcome = run_loop(settings, monkeypatch, signal_at=5, **options)
    assert outcome.checkpoint.path == Path("at6")
    assert TrainingStopped("x").status == 1


def test_a_bad_step_saves_the_last_good_one(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"log": {"every": 100}, "checkpoint": {"every": 0, "background": True}}
    told, error = run_loop(settings, monkeypatch, bad=1, steps=9, **options)
    assert isinstance(error, TrainingStopped)
    assert error.status == 1
    assert "loss nan. The last good step is saved: at1" in str(error)
    assert told[-2:] == [
        "resolve 1 at 2",
        "save 1 None 1",
    ]  # found one step later; written before the run ends


def test_a_line_of_the_log_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(loop_module, "routing_line", lambda metrics: {"experts_per_token": metrics})
    monkeypatch.setattr(loop_module, "flops_per_token", lambda *given: asked.append(given) or 1e3)
    monkeypatch.setattr(loop_module, "_memory_gb", lambda device: 1.5)
    groups = [{"kind": "weights", "lr": 0.1}, {"kind": "kappa", "lr": 0.5}]
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(steps=10), world=World(0, 4, 0, CPU, None), tokens_per_step=100, peak_flops=1e6,
        optimizers=[SimpleNamespace(param_groups=groups)],
        model=SimpleNamespace(alpha=[2.0], routing_metrics=lambda: "as counted", head_metrics=list),
    )  # fmt: skip
    clock: Any = SimpleNamespace(rate=lambda: 50.0, tokens=300)
    result = StepResult(loss=1.0, router_loss=0.25, divergence=0.5, overlap=0.125, norm=3.0)
    line = _train_line(trainer, 4, result, clock)
    assert line == {
        "kind": "train", "step": 4, "tokens": 400, "loss": 1.0, "router_loss": 0.25, "divergence": 0.5,
        "overlap": 0.125, "norm": 3.0, "lr": 0.1, "kappa_lr": 0.5, "frames_lr": None, "alpha": [2.0],
        "tokens_per_second": 50.0, "flops_per_token": 1e3, "mfu": 50 * 1e3 / 4e6, "memory_gb": 1.5,
        "seconds_left": 6 * 100 / 50, "experts_per_token": "as counted",
    }  # fmt: skip
    assert asked == [(trainer, range(1, 4), "as counted")]  # the three steps since the last line
    trainer.peak_flops = None
    assert _train_line(trainer, 4, result, clock)["mfu"] is None


def test_memory_in_the_units_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3_000_000))
    for platform, gb in (("linux", 3.072), ("darwin", 0.003)):
        monkeypatch.setattr(loop_module.sys, "platform", platform)
        assert _memory_gb(CPU) == pytest.approx(gb)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5_000_000_000)
    assert _memory_gb(torch.device("cuda")) == 5.0


def test_a_run_starts_anew_unless_told(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(loop_module, "start", lambda parallel, device: ONE)
    monkeypatch.setattr(loop_module, "_train", lambda config, resume, world: told.append(resume))
    loop_module.train(settings())
    loop_module.train(settings(), resume=True)
    assert told == [False, True]


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_run_that_fails_leaves_the_process_group_it_joined(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, joined: bool, fails: bool
) -> None:
    """Then the others do not wait for it. A group of the caller's stays, and one of a run that ended well."""
    left: list[str] = []

    def ends(*given: Any) -> None:
        if fails:
            raise KeyError("broken")

    monkeypatch.setattr(loop_module, "start", lambda parallel, device: replace(ONE, joined=joined))
    monkeypatch.setattr(loop_module, "stop", lambda: left.append("left"))
    monkeypatch.setattr(loop_module, "_train", ends)
    with pytest.raises(KeyError, match="broken") if fails else contextlib.nullcontext():
        loop_module.train(settings())
    assert left == (["left"] if joined and fails else [])


def test_things_that_happen_every_few_steps() -> None:
    assert [done for done in range(1, 10) if loop_module._every(3, done)] == [3, 6, 9]
    assert [done for done in range(1, 4) if loop_module._every(1, done)] == [1, 2, 3]
    assert not any(loop_module._every(0, done) for done in range(1, 10))
