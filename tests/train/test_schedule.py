"""Warm-up and cosine decay."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_same, state_of
from hypothesis import given
from hypothesis import strategies as st

from grmoe.runs.config import TrainConfig
from grmoe.runs.config_groups import OptimConfig
from grmoe.runs.folder import read_log, saved_config
from grmoe.train.loop import train
from grmoe.train.schedule import (
    cosine_factor,
    describe_more_steps,
    rate_factors,
    rates,
    remember_peaks,
    set_rates,
)


@given(st.integers(1, 500), st.integers(0, 100), st.floats(0, 1))
def test_rises_to_the_peak_then_falls_to_the_floor(steps: int, warmup: int, floor: float) -> None:
    factors = [cosine_factor(step, steps, warmup, floor) for step in range(steps)]
    rising, falling = factors[:warmup], factors[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(0 < f <= 1 for f in rising)
    assert all(floor - 1e-12 <= f <= 1 for f in falling)
    if len(falling) > 1:
        assert falling[0] == 1
        assert falling[-1] == pytest.approx(floor, abs=1e-12)


def test_factors_of_short_schedules_by_hand() -> None:
    assert [cosine_factor(s, 3, 1, 0.2) for s in range(3)] == pytest.approx([1.0, 1.0, 0.2])
    assert [cosine_factor(s, 4, 1, 0.2) for s in range(4)] == pytest.approx([1.0, 1.0, 0.6, 0.2])
    assert [cosine_factor(s, 6, 4, 0.0) for s in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.0])
    assert [cosine_factor(s, 2, 0, 0.5) for s in range(2)] == pytest.approx([1.0, 0.5])
    assert cosine_factor(0, 1, 0, 0.5) == 1.0


def test_past_the_end_it_stays_at_the_floor() -> None:
    assert cosine_factor(1000, 100, 10, 0.1) == pytest.approx(0.1)


def test_groups_keep_their_own_peaks_also_after_a_resume() -> None:
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    groups = [{"params": [a], "lr": 0.5, "kind": "weights"}, {"params": [b], "lr": 0.1, "kind": "frames"}]
    optimizer = torch.optim.SGD([dict(g) for g in groups])
    remember_peaks([optimizer])
    set_rates([optimizer], {"weights": 0.1, "frames": 0.2})
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.05, 0.02])
    again = torch.optim.SGD([dict(g) for g in groups])
    again.load_state_dict(optimizer.state_dict())
    remember_peaks([again])
    set_rates([again], {"weights": 1.0, "frames": 1.0})
    assert rates([again]) == pytest.approx({"weights": 0.5, "frames": 0.1})


@pytest.fixture
def own(settings: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    """Every kind with a schedule of its own."""
    optim = {
        "lr": 1e-3, "kappa_lr": 1e-2, "frames_lr": 1e-1, "warmup": 2, "floor": 0.1,
        "kappa_warmup": 5, "kappa_floor": 0.0, "frames_warmup": 0, "frames_floor": 1.0,
    }  # fmt: skip

    def make(name: str = "run", **changes: Any) -> TrainConfig:
        return settings(name, **{"steps": 11, "log": {"every": 1}, "optim": optim} | changes)

    return make


def test_each_kind_of_parameters_follows_its_own_schedule(own: Callable[..., TrainConfig]) -> None:
    """Rates of a real run, in its log and in its checkpoint's groups, against the formulas written out."""
    config = own()
    train(config)

    def cosine(t: float) -> float:
        return (1 + math.cos(math.pi * t)) / 2

    weights = [0.5, 1.0, *(0.1 + 0.9 * cosine(i / 8) for i in range(9))]
    kappa = [0.2, 0.4, 0.6, 0.8, 1.0, *(cosine(i / 5) for i in range(6))]
    lines = [line for line in read_log(Path(config.out)) if line["kind"] == "train"]
    assert [x["lr"] for x in lines] == pytest.approx([1e-3 * f for f in weights])
    assert [x["kappa_lr"] for x in lines] == pytest.approx([1e-2 * f for f in kappa], abs=1e-12)
    assert [x["frames_lr"] for x in lines] == [1e-1] * 11
    groups = json.loads(state_of(config, 11)["groups"])
    last = {group["kind"]: (group["lr"], group["peak_lr"]) for group in groups}
    assert last["weights"] == pytest.approx((1e-4, 1e-3))
    assert last["kappa"] == pytest.approx((0.0, 1e-2), abs=1e-12)
    assert last["frames"] == (0.1, 0.1)


def test_own_schedules_resume_to_the_bit(own: Callable[..., TrainConfig]) -> None:
    straight, broken = own("straight"), own("broken", checkpoint={"every": 4})
    train(straight)
    train(broken)
    for step in (8, 11):
        shutil.rmtree(Path(broken.out) / "checkpoints" / f"step-{step:08d}")
    train(broken, resume=True)
    assert_same(broken, straight, steps=[11])


def test_what_is_not_said_is_as_the_weights(settings: Callable[..., TrainConfig]) -> None:
    """The schedule every run had before kinds could have their own, to the bit."""
    config = settings(steps=50, optim={"warmup": 7, "floor": 0.3})
    for step in range(50):
        assert set(rate_factors(config, step).values()) == {cosine_factor(step, 50, 7, 0.3)}


# -- more steps ------------------------------------------------------------------------------------------------


def test_more_steps_continue_a_finished_run_on_the_longer_schedule(
    settings: Callable[..., TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """`steps` was once refused on resume. The warm-up stays, so the rate does not rise a second time."""
    short = settings(steps=6, log={"every": 1}, optim={"lr": 1e-2})
    train(short)
    capsys.readouterr()
    longer = replace(short, steps=10)
    outcome = train(longer, resume=True)
    assert outcome.checkpoint.step == 10
    said = capsys.readouterr().err
    assert "steps raised from 6 to 10: learning rates now follow the schedule of 10 steps. " in said
    assert "The weights' rate goes from 0.001 to 0.00378, then down to 0.001\n" in said
    lines = [line for line in read_log(Path(short.out)) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, 11))
    ours = [cosine_factor(step, 6 if step < 6 else 10, 1, 0.1) for step in range(10)]
    assert [line["lr"] for line in lines] == pytest.approx([1e-2 * factor for factor in ours])
    saved = saved_config(Path(short.out))
    assert (saved.steps, saved.optim.warmup) == (10, 1)  # three tenths of 6, not of 10
    assert train(longer, resume=True).validation is None  # it has ended, and its warm-up is no other setting
    with pytest.raises(ValueError, match=r"steps can be raised on resume, not lowered: .* has 10, got 6"):
        train(short, resume=True)


def test_a_run_of_the_same_length_says_nothing_of_more_steps() -> None:
    config = TrainConfig(steps=10)
    assert describe_more_steps(None, config, 0) is None
    assert describe_more_steps(config, config, 5) is None


def test_more_steps_after_a_first_step_with_nan() -> None:
    """It leaves a checkpoint of step 0. Without a warm-up this was a division by zero."""
    old, new = (TrainConfig(steps=steps, optim=OptimConfig(warmup=0, lr=1e-2)) for steps in (6, 10))
    assert "rate goes from 0.01 to 0.01" in (describe_more_steps(old, new, 0) or "")
