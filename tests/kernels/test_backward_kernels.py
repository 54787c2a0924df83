"""The fused kernels of the backward against formulas in fp64, and against the kernels that work in separate passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from grmoe.kernels import fused_backward as module
from grmoe.kernels import rows
from grmoe.kernels.fused_backward import gathered_gradient, hidden_gradient
from grmoe.kernels.grouped_gemm import Tiles, grouped_gemm, weight_gradient

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

NAN = float("nan")
SMALL = Tiles(16, 16, 16, 4, 2)
# Rows of each expert: several tiles, none (first, middle and last), one, exactly one tile.
LOADS = [[20, 0, 1, 16], [0, 5, 0, 18, 0], [0, 0]]
T, M, SPARE = 30, 3, 7  # tokens, most experts per token, unused rows behind


class Case:
    """Random operands. Unused rows hold NaN, and so does token 0, which they name."""

    def __init__(
        self, load: list[int], D: int, I: int, glu: bool, dtype: torch.dtype = torch.float32
    ) -> None:
        g = torch.Generator().manual_seed(0)
        self.load, self.used, self.glu, N = load, sum(load), glu, len(load)
        A = self.used + SPARE
        self.grad, self.x = (torch.randn(T, D, generator=g).to(dtype) for _ in range(2))
        self.grad[0], self.x[0] = NAN, NAN
        self.down = (torch.randn(N, D, I, generator=g) / D**0.5).to(dtype)
        self.inner = torch.randn(A, 2 * I if glu else I, generator=g).to(dtype)
        self.inner[self.used :] = NAN
        self.pair = torch.zeros(A, dtype=torch.int32)
        # Each pair of a token and a slot at most once, and none of token 0.
        self.pair[: self.used] = M + torch.randperm((T - 1) * M, generator=g)[: self.used].int()
        self.token = self.pair // M
        self.weight = torch.rand(T, M, generator=g)
        self.offset = torch.tensor(load).cumsum(0).int()

    def run(self, tiles: Tiles = SMALL, spend: bool = False) -> dict[str, Tensor]:
        """Results of the used rows, and that the others are untouched."""
        inner = self.inner.clone()
        given = (self.grad, self.down, inner, self.token, self.pair, self.weight, self.offset, tiles)
        grad_inner, hidden, grad_weight = hidden_gradient(*given, glu=self.glu, spend=spend)
        assert (grad_inner.data_ptr() == inner.data_ptr()) == spend
        assert grad_inner[self.used :].isnan().all()
        assert hidden[self.used :].isnan().all()
        if not spend:
            assert torch.equal(inner[: self.used], self.inner[: self.used])
        return {"inner": grad_inner[: self.used], "hidden": hidden[: self.used], "weight": grad_weight}

    def exact(self) -> dict[str, Tensor]:
        """The same by autograd, in fp64."""
        token, pair = self.token[: self.used].long(), self.pair[: self.used].long()
        inner = self.inner[: self.used].double().requires_grad_()
        weight = self.weight.double().requires_grad_()
        first, *up = inner.chunk(2, -1) if self.glu else (inner,)
        h = F.silu(first) * up[0] if self.glu else F.gelu(first)
        weighted = weight.flatten()[pair].unsqueeze(1) * h
        parts = zip(weighted.split(self.load), self.down.double(), strict=True)
        y = torch.cat([part @ matrix.T for part, matrix in parts])
        grads = torch.autograd.grad(y, [inner, weight], self.grad.double()[token])
        return {"inner": grads[0], "hidden": weighted.detach(), "weight": grads[1]}

    def separate(self) -> dict[str, Tensor]:
        """The same by the kernels in separate passes."""
        gathered = rows.gather(self.grad, self.token, self.offset)
        hidden = grouped_gemm(gathered, self.down, self.offset, SMALL, transposed=False)
        given = (self.inner, hidden, self.pair, self.weight, self.offset, self.glu)
        grad_inner, grad_weight = rows.activation_backward(*given)
        return {"inner": grad_inner[: self.used], "hidden": hidden[: self.used], "weight": grad_weight}


def agree(ours: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(ours[name].double(), value.double(), **tolerance, msg=name)


# Sums of at most a hundred terms of order one in fp32; GELU's Φ is exact to 1e-7.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize(("load", "glu"), [(LOADS[0], True), (LOADS[1], False), (LOADS[2], True)], ids=str)
def test_gradients_of_hidden_values_and_routing_weights(load: list[int], glu: bool) -> None:
    case = Case(load, D=20, I=20, glu=glu)
    ours = case.run()
    agree(ours, case.exact(), **CLOSE)
    agree(ours, case.separate(), **CLOSE)
    for name, again in case.run(spend=True).items():
        assert torch.equal(again, ours[name])


@pytest.mark.parametrize(("D", "I"), [(4, 4), (16, 16), (36, 40)])
def test_widths(D: int, I: int) -> None:
    case = Case([10, 5], D, I, glu=True)
    agree(case.run(Tiles(32, 16, 8, 4, 2, group=1)), case.exact(), **CLOSE)


def test_grid_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([20, 0, 5], 16, 20, glu=True)
    ours = case.run()
    monkeypatch.setattr(module, "num_programs", lambda _: 1)
    assert all(torch.equal(value, ours[name]) for name, value in case.run().items())


def test_weights_of_another_expert_never_leak() -> None:
    """Expert 1 holds NaN: a tile of expert 0 reaches into it where the width is no whole tile."""
    case = Case([10, 0], 20, 20, glu=False)
    case.down[1] = NAN
    assert all(value.isfinite().all() for value in case.run().values())


def test_half_precision() -> None:
    case = Case([10], 24, 16, glu=True, dtype=torch.float16)
    # One rounding to 11 bits; between them everything is fp32.
    agree(case.run(), case.exact(), rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize(("load", "turned"), [(LOADS[0], True), (LOADS[1], False), (LOADS[2], True)], ids=str)
def test_weight_gradient_with_gathered_rows(load: list[int], turned: bool) -> None:
    case = Case(load, D=20, I=20, glu=False)
    used, listed = case.used, case.inner
    out = gathered_gradient(case.x, listed, case.token, case.offset, SMALL, turned=turned)
    gathered = case.x[case.token.long()]
    parts = zip(gathered[:used].double().split(load), listed[:used].double().split(load), strict=True)
    expected = torch.stack([a.T @ b for a, b in parts])
    torch.testing.assert_close(out.double(), expected.mT if turned else expected, **CLOSE)
    pair = (listed, gathered) if turned else (gathered, listed)
    assert torch.equal(out, weight_gradient(*pair, case.offset, SMALL))  # the same sums in the same order
    for e, rows_of_expert in enumerate(load):
        assert rows_of_expert or not out[e].any()


def test_power_a_wrong_reference_fails() -> None:
    case = Case([10], 16, 16, glu=True)
    ours = case.run()
    for name, value in case.exact().items():
        with pytest.raises(AssertionError):
            agree(ours, {name: value * (1 + 1e-3)}, **CLOSE)
