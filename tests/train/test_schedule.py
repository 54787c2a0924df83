"""Warm-up and cosine decay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grmoe.train.schedule import cosine_factor, remember_peaks, set_rates


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


def test_past_the_end_it_stays_at_the_floor() -> None:
    assert cosine_factor(1000, 100, 10, 0.1) == pytest.approx(0.1)


def test_groups_keep_their_own_peaks_also_after_a_resume() -> None:
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.5}, {"params": [b], "lr": 0.1}])
    remember_peaks([optimizer])
    set_rates([optimizer], 0.1)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.05, 0.01])
    again = torch.optim.SGD([{"params": [a], "lr": 0.5}, {"params": [b], "lr": 0.1}])
    again.load_state_dict(optimizer.state_dict())
    remember_peaks([again])
    set_rates([again], 1.0)
    assert [g["lr"] for g in again.param_groups] == pytest.approx([0.5, 0.1])
