"""Argument checks: what passes comes back unchanged, what does not is named together with its value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grmoe import checks

NAN, INF = math.nan, math.inf


def test_require() -> None:
    checks.require(True, "not shown")
    with pytest.raises(ValueError, match=r"^shown$"):
        checks.require(False, "shown")


@given(value=st.integers(-5, 20), at_least=st.integers(-2, 5))
def test_positive_int(value: int, at_least: int) -> None:
    if value >= at_least:
        assert checks.positive_int("n", value, at_least=at_least) == value
    else:
        with pytest.raises(ValueError, match=f"n must be an integer >= {at_least}, got {value}"):
            checks.positive_int("n", value, at_least=at_least)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3", None, torch.tensor(3.0), torch.tensor([3, 3])])
def test_not_a_positive_int(value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"n must be an integer >= 1, got {value!r}")):
        checks.positive_int("n", value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [NAN, INF, -INF, "1", None, True, 1j, torch.tensor(NAN), torch.ones(2)])
def test_not_a_finite_number(value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"rate must be a finite number, got {value!r}")):
        checks.finite("rate", value)  # type: ignore[arg-type]


@pytest.mark.parametrize("three", [3, np.int64(3), torch.tensor(3), torch.tensor([3])])
def test_numbers_of_any_library_become_python_s(three: object) -> None:
    assert type(checks.positive_int("n", three)) is int
    assert checks.positive_int("n", three) == 3
    assert checks.finite("rate", three) == 3.0
    assert type(checks.finite("rate", three)) is float


def test_finite_and_its_limits() -> None:
    assert checks.finite("rate", -3) == -3.0
    assert isinstance(checks.finite("rate", -3), float)
    assert checks.finite("rate", 0, at_least=0) == 0.0
    with pytest.raises(ValueError, match=r"rate must be a finite number >= 0, got -1e-09"):
        checks.finite("rate", -1e-9, at_least=0)
    assert checks.finite("rate", 1e-300, above=0) == 1e-300
    with pytest.raises(ValueError, match=r"rate must be a finite number > 0, got 0"):
        checks.finite("rate", 0, above=0)


@given(value=st.floats(-2, 2) | st.just(NAN) | st.just(INF))
def test_fraction(value: float) -> None:
    if 0 < value <= 1:
        assert checks.fraction("tau", value) == value
    else:
        with pytest.raises(ValueError, match=f"tau must be .*got {re.escape(repr(value))}"):
            checks.fraction("tau", value)


def test_one_of() -> None:
    assert checks.one_of("mode", "a", ("a", "b")) == "a"
    with pytest.raises(ValueError, match="mode must be one of 'a', 'b', got 'c'"):
        checks.one_of("mode", "c", ("a", "b"))


def test_one_of_many() -> None:
    names = ("softmax", "softmax-bias", "grmoe")
    assert checks.one_of_many("recipe", "grmoe", names, "list") == "grmoe"
    for wrong, near in (
        ("gromoe", r"; did you mean 'grmoe'\?"),
        ("softmx", r"; did you mean 'softmax' or 'softmax-bias'\?"),
        ("xyz", r"\."),
    ):
        with pytest.raises(ValueError, match=rf"^unknown recipe '{wrong}'{near} `list` lists all 3$"):
            checks.one_of_many("recipe", wrong, names, "list")


@given(dim=st.integers(-1, 6), rank=st.integers(-1, 6))
def test_subspace(dim: int, rank: int) -> None:
    if 1 <= rank <= dim:
        checks.subspace(dim, rank)
        return
    want = f"dim .*{dim}" if dim < 1 else f"rank .*{rank}"
    with pytest.raises(ValueError, match=want):
        checks.subspace(dim, rank)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_floating(dtype: torch.dtype) -> None:
    value = torch.zeros(2, dtype=dtype)
    assert checks.floating("x", value) is value


@pytest.mark.parametrize("check", [checks.floating, checks.frames, lambda n, v: checks.last_dim(n, v, 3)])
@pytest.mark.parametrize(
    ("value", "got"),
    [
        (torch.zeros(3, 3, dtype=torch.int64), "torch.int64"),
        (torch.ones(3, 3) > 0, "torch.bool"),
        ([1.0], "list"),
    ],
)
def test_not_floating(check: Callable[[str, object], object], value: object, got: str) -> None:
    with pytest.raises(ValueError, match=f"x must be a floating-point tensor, got {got}"):
        check("x", value)


def test_last_dim() -> None:
    for shape in [(3,), (2, 3), (0, 3), (4, 2, 3)]:
        value = torch.zeros(shape)
        assert checks.last_dim("x", value, 3) is value
    for shape in [(), (2,), (3, 2)]:
        with pytest.raises(ValueError, match=re.escape(f"x must have shape (..., 3), got {shape}")):
            checks.last_dim("x", torch.zeros(shape), 3)


def test_frames() -> None:
    for shape in [(3, 1), (3, 3), (2, 5, 3)]:
        value = torch.zeros(shape)
        assert checks.frames("U", value) is value
    for shape in [(3,), (2, 3), (4, 2, 3), (3, 0)]:
        with pytest.raises(
            ValueError, match=re.escape(f"U must have shape (..., d, k) with k <= d, got {shape}")
        ):
            checks.frames("U", torch.zeros(shape))


def test_all_finite() -> None:
    value = torch.zeros(2, 3)
    assert checks.all_finite("x", value) is value
    assert checks.all_finite("x", torch.zeros(0)).numel() == 0
    value[0, 1] = NAN
    with pytest.raises(ValueError, match="x holds 1 non-finite value of 6"):
        checks.all_finite("x", value)
    value[1] = torch.tensor([INF, 1.0, -INF])
    with pytest.raises(ValueError, match="x holds 3 non-finite values of 6"):
        checks.all_finite("x", value)


@pytest.mark.parametrize("value", [2, np.int64(2), np.array(2), torch.tensor(2), torch.tensor([2])], ids=repr)
def test_numbers_of_any_kind_become_python_numbers(value: Any) -> None:
    assert type(checks.positive_int("n", value)) is int
    assert type(checks.finite("n", value)) is float
    assert checks.alphas("alpha", [value, 3.0]) == [2.0, 3.0]


@pytest.mark.parametrize(
    "value", ["2", None, True, np.bool_(True), 2j, [2], torch.ones(2), np.ones(0)], ids=repr
)
def test_what_is_no_number_is_refused(value: Any) -> None:
    for check in (checks.finite, checks.fraction, checks.positive_int, checks.alpha):
        with pytest.raises(ValueError, match=r"^n must be"):
            check("n", value)


def test_alphas_are_one_or_several() -> None:
    assert checks.alphas("alpha", torch.tensor(2.0)) == 2.0
    assert checks.alphas("alpha", torch.tensor([2.0])) == [2.0]
    assert checks.alphas("alpha", (a for a in (0, 1e30))) == [0.0, 1e30]
    for wrong in (1.0000001e30, -1e-9, float("nan"), [1.0, float("inf")], "12", torch.ones(1, 1)):
        with pytest.raises(ValueError, match="alpha must be"):
            checks.alphas("alpha", wrong)
