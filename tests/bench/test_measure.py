"""Contenders take turns, and one that fails keeps nobody else from running."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from grmoe.bench.measure import WARM_UPS, Contender, Runs, measure, parts, pick, relative_error, shorten

CPU = torch.device("cpu")


def quiet(stage: str) -> None: ...


def noting(log: list[str], name: str) -> Callable[[], Runs]:
    timed = {mode: lambda mode=mode: log.append(f"{name} {mode}") for mode in ("forward", "both")}
    return lambda: Runs(timed, lambda: {"y": 0.5})  # type: ignore[arg-type]


def test_contenders_take_turns_in_every_round_and_mode() -> None:
    log: list[str] = []
    contenders = [Contender("a", noting(log, "a")), Contender("b", noting(log, "b"), rounds=1)]
    rows = measure(contenders, CPU, 2, quiet, "")
    assert log[4 * WARM_UPS["cpu"] :] == [
        *("a forward", "b forward", "a both", "b both"),
        *("a forward", "a both"),  # b has had its round
    ]
    assert [len(row.times["both"].rounds) for row in rows] == [2, 1]
    assert [row.errors for row in rows] == [{"y": 0.5}] * 2


def test_a_failure_is_a_row_of_its_own() -> None:
    calls = {"late": 0}

    def missing() -> Runs:
        raise ModuleNotFoundError("No module named 'liger_kernel'", name="liger_kernel")

    def late() -> None:
        calls["late"] += 1
        if calls["late"] > 1 + WARM_UPS["cpu"]:
            raise RuntimeError("CUDA out of memory.\nTried to allocate 2 GiB")

    def unchecked() -> dict[str, float]:
        raise ValueError("no reference")

    contenders = [
        Contender("missing", missing),
        Contender("late", lambda: Runs({"forward": late})),
        Contender("unchecked", lambda: Runs({"forward": int}, unchecked)),
        Contender("fine", lambda: Runs({"forward": int}, facts={"experts": 2.0})),
    ]
    rows = measure(contenders, CPU, 3, quiet, "")
    assert [row.name for row in rows] == [c.name for c in contenders]
    assert rows[0].failure == "not installed: liger_kernel"
    assert rows[1].failure == "RuntimeError: CUDA out of memory."
    assert not rows[0].times
    assert not rows[1].times  # half a measurement is none
    assert rows[2].failure == "ValueError: no reference"
    assert len(rows[2].times["forward"].rounds) == 3
    assert rows[3].failure is None
    assert rows[3].facts == {"experts": 2.0}


def test_progress_adds_up() -> None:
    stages: list[str] = []
    contenders = [Contender(name, noting([], name)) for name in "abc"]
    measure(contenders, CPU, 5, stages.append, "64,32")
    assert len(stages) == parts(contenders, 5)
    assert all(stage.startswith("64,32: ") for stage in stages)


def test_errors_are_shortened_to_one_line() -> None:
    text = shorten(RuntimeError("x" * 500 + "\nsecond line"))
    assert len(text) == 90
    assert text.startswith("RuntimeError: xxx")
    assert text.endswith("…")
    assert shorten(AssertionError()) == "AssertionError"


def test_relative_error() -> None:
    reference = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)


def test_contenders_are_picked_by_part_of_their_name() -> None:
    contenders = [Contender(name, dict) for name in ("ours", "ours, compiled", "ScatterMoE")]  # type: ignore[arg-type]
    assert [c.name for c in pick(contenders, ["scatter", "compiled"])] == ["ours, compiled", "ScatterMoE"]
    assert pick(contenders, None) == contenders
    with pytest.raises(ValueError, match=r"name \(ours; ours, compiled; ScatterMoE\), got liger"):
        pick(contenders, ["liger"])
