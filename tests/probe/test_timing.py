"""The clock, medians and ratios of the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grmoe.probe.timing import Ratio, Timer, Times, pause_ms, peak_bytes, quantile, three_figures, time_ratio

CPU = torch.device("cpu")


def test_a_turn_is_the_time_between_two_readings_of_the_clock() -> None:
    now = [10.0]

    def run() -> None:
        now[0] += 0.25

    assert Timer(CPU, clock=lambda: now[0]).turn(run) == [250.0]


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=30), st.floats(0, 1))
def test_quantile_is_linear_between_the_values(values: list[float], q: float) -> None:
    expected = torch.quantile(torch.tensor(values, dtype=torch.float64), q)
    assert quantile(values, q) == pytest.approx(float(expected), rel=1e-9)


def test_times_pool_the_calls_of_all_rounds() -> None:
    times = Times([[1.0, 2.0], [3.0, 4.0], [100.0]])
    assert times.median == 3.0
    assert times.interval == (quantile([1, 2, 3, 4, 100], 0.1), quantile([1, 2, 3, 4, 100], 0.9))


def test_a_ratio_is_formed_in_each_round() -> None:
    """Before, the value was a ratio of overall medians, here 4 / 3. It could lie outside of its interval."""
    over, under = Times([[2.0], [4.0], [9.0]]), Times([[1.0], [4.0], [3.0]])
    ratio = time_ratio("a / b", over, under)
    assert ratio.value == 2.0
    assert ratio.interval == (quantile([2.0, 1.0, 3.0], 0.1), quantile([2.0, 1.0, 3.0], 0.9))
    assert ratio.interval[0] <= ratio.value <= ratio.interval[1]


def test_a_ratio_of_one_round_has_the_interval_of_its_calls() -> None:
    """Before, an interval without width, as if a single round were certain."""
    over, under = Times([[2.0, 4.0, 6.0]]), Times([[1.0, 2.0, 4.0]])
    (low, high), (least, most) = over.interval, under.interval
    assert time_ratio("a / b", over, under) == Ratio("a / b", 2.0, (low / most, high / least))


def test_a_ratio_leaves_out_rounds_that_only_one_ran() -> None:
    over, under = Times([[2.0], [4.0]]), Times([[1.0], [2.0], [50.0], [60.0]])
    assert time_ratio("a / b", over, under) == Ratio("a / b", 2.0, (2.0, 2.0))


def test_ratios_read_as_factor_share_or_excess() -> None:
    assert str(Ratio("", 1.234)) == "1.23"
    assert str(Ratio("", 12.34, (11.0, 13.0))) == "12.3 (11.0 to 13.0)"
    assert str(Ratio("", 0.815, (0.8, 0.83), "share")) == "81.5 (80.0 to 83.0) %"
    assert str(Ratio("", 0.95, None, "excess")) == "-5.0 %"


@pytest.mark.parametrize(
    ("value", "text"), [(0.05234, "0.0523"), (1.0, "1.00"), (12.34, "12.3"), (1552.3, "1552"), (0.0, "0")]
)
def test_three_figures(value: float, text: str) -> None:
    assert three_figures(value) == text


def test_a_cpu_keeps_no_count_of_memory() -> None:
    assert peak_bytes(lambda: pytest.fail("must not run"), CPU) is None


def test_the_device_pauses_as_long_as_the_host_needs() -> None:
    assert [pause_ms(host) for host in (0.0, 1.0, 8.0, 1e3)] == [40.0, 40.0, 100.0, 200.0]

    class Slow(Timer):
        seen: ClassVar[list[float]] = []

        def turn(self, run: Callable[[], object], host_ms: float = 0.0) -> list[float]:
            self.seen.append(host_ms)
            self.host_ms = 5.0
            return [1.0]

    timer, times = Slow(CPU), Times()
    for _ in range(2):
        times.add(timer, lambda: None)
    assert timer.seen == [0.0, 5.0]  # the first turn knows nothing yet
