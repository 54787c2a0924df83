"""The contract between selection and experts: a flat list of (token, expert, weight), sorted by expert.

Its length is a static bound, A = T · M, so that building it reads nothing on the host. The last offset says how many of
its rows are used. A token may have any number of experts up to M, also none.

Legend: T tokens, N experts, A rows of the list, M most experts per token, D model width.
    pair_A     token · M + slot of a row, its place in the token's list (0 on unused rows)
    token_A    which token a row belongs to (0 on unused rows)
    offset_N   ends: rows [offset_N[e−1], offset_N[e]) are expert e's, rows past offset_N[−1] are unused
    slot_TM    rows of a token's assignments in the list, in expert order (A where it has fewer than M)
    weight_TM  their combine weights (0 there)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grmoe import checks
from grmoe.kernels.runtime import attempt


@dataclass(frozen=True)
class Dispatch:
    """The list. See the legend above."""

    token_A: Tensor
    pair_A: Tensor
    offset_N: Tensor  # int32, as grouped_mm needs it
    slot_TM: Tensor
    weight_TM: Tensor  # carries the gradient to the router

    @property
    def num_rows(self) -> int:
        """A, the static length of the list."""
        return self.token_A.shape[0]

    @classmethod
    def build(
        cls, weights_TN: Tensor, selected_TN: Tensor, max_experts: int, *, kernels: bool = False
    ) -> Dispatch:
        """From combine weights and the selection mask.

        Positions come from running counts over tokens (row within an expert) and over experts (slot within a token).
        This is integer arithmetic without a sort, so the list is always the same.

        max_experts: M. kernels: build it with Triton.
        """
        T, N = selected_TN.shape
        M = max_experts
        checks.require(1 <= M <= N, f"max_experts must be between 1 and {N}, got {M}")
        if kernels:
            from grmoe.kernels.dispatch import dispatch

            return attempt(
                "dispatch",
                lambda: cls(*dispatch(weights_TN, selected_TN, M)),
                lambda: cls.build(weights_TN, selected_TN, M),
            )
        A, device = T * M, selected_TN.device
        count_TN = selected_TN.long()
        offset_N = count_TN.sum(0).cumsum(0)
        start_N = offset_N - count_TN.sum(0)
        row_TN = start_N + count_TN.cumsum(0) - 1
        rank_TN = count_TN.cumsum(1) - 1
        pair_TN = torch.arange(T, device=device).unsqueeze(1) * M + rank_TN
        # Unselected pairs write into a spare place behind the end, which is cut off.
        row_TN = torch.where(selected_TN, row_TN, A)
        pair_A = torch.zeros(A + 1, dtype=torch.long, device=device)
        pair_A = pair_A.scatter(0, row_TN.flatten(), pair_TN.flatten())[:A]
        rank_TN = torch.where(selected_TN, rank_TN, M)
        slot_TM = torch.full((T, M + 1), A, device=device).scatter(1, rank_TN, row_TN)[:, :M]
        weight_TM = weights_TN.new_zeros(T, M + 1).scatter(1, rank_TN, weights_TN)[:, :M]
        return cls(pair_A // M, pair_A, offset_N.to(torch.int32), slot_TM, weight_TM)


def gather(x_TD: Tensor, dispatch: Dispatch) -> Tensor:
    """Each row's token, (A, D). The backward sums a token's rows slot by slot: no atomics, always the same bits."""
    return _Gather.apply(x_TD, dispatch.token_A, dispatch.slot_TM)


def combine(y_AD: Tensor, dispatch: Dispatch) -> Tensor:
    """Σ over a token's rows of weight · row, (T, D), summed in fp32 (fp64 for fp64 rows)."""
    d = dispatch
    return _Combine.apply(y_AD, d.weight_TM, d.token_A, d.pair_A, d.slot_TM, d.offset_N)


def _slots(y_AD: Tensor, slot_TM: Tensor) -> Iterator[Tensor]:
    """The rows (T, D) of each slot m in wide precision, zero where the slot is empty.

    One slot at a time, so that (T, M, D) never exists. Unused rows may hold anything, also NaN.
    """
    A, wide = y_AD.shape[0], _wide(y_AD.dtype)
    if A == 0:
        return
    empty_TM = slot_TM == A
    # Masking is a pass over the rows. On the CPU, checking whether it is needed costs nothing.
    can_check = y_AD.device.type == "cpu" and not torch.compiler.is_compiling()
    masked = not can_check or bool(empty_TM.any())
    for m in range(slot_TM.shape[1]):
        slot_T = torch.where(empty_TM[:, m], 0, slot_TM[:, m]) if masked else slot_TM[:, m]
        rows_TD = y_AD.index_select(0, slot_T).to(wide)
        yield torch.where(empty_TM[:, m : m + 1], 0.0, rows_TD) if masked else rows_TD


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_A: Tensor, slot_TM: Tensor) -> Tensor:
        ctx.save_for_backward(slot_TM)
        return x_TD.index_select(0, token_A)

    @staticmethod
    def backward(ctx: Any, grad_AD: Tensor) -> tuple[Tensor, None, None]:
        (slot_TM,) = ctx.saved_tensors
        total: Tensor | float = 0.0
        for rows_TD in _slots(grad_AD, slot_TM):
            total = total + rows_TD if isinstance(total, float) else total.add_(rows_TD)
        return _as_tokens(total, grad_AD, slot_TM), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_AD: Tensor,
        weight_TM: Tensor,
        token_A: Tensor,
        pair_A: Tensor,
        slot_TM: Tensor,
        offset_N: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(y_AD, weight_TM, token_A, pair_A, slot_TM, offset_N)
        total: Tensor | float = 0.0
        for m, rows_TD in enumerate(_slots(y_AD, slot_TM)):
            weight_T1 = weight_TM[:, m : m + 1].to(rows_TD.dtype)
            if isinstance(total, float):
                total = rows_TD * weight_T1
            elif (
                torch.compiler.is_compiling()
            ):  # in place saves nothing here, and PyTorch 2.11 loses the gradient
                total = torch.addcmul(total, rows_TD, weight_T1)
            else:
                total.addcmul_(rows_TD, weight_T1)
        return _as_tokens(total, y_AD, slot_TM)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        y_AD, weight_TM, token_A, pair_A, slot_TM, offset_N = ctx.saved_tensors
        grad_weight_TM = torch.zeros_like(weight_TM)
        for m, rows_TD in enumerate(_slots(y_AD, slot_TM)):
            grad_weight_TM[:, m] = torch.einsum("td,td->t", rows_TD, grad_TD.to(rows_TD.dtype))
        # A row's gradient is its token's, weighted; unused rows get zero.
        used_A = torch.arange(len(token_A), device=token_A.device) < offset_N[-1]
        weight_A = torch.where(used_A, weight_TM.flatten().index_select(0, pair_A), 0.0)
        grad_AD = grad_TD.index_select(0, token_A).to(_wide(y_AD.dtype)).mul_(weight_A.unsqueeze(-1))
        return grad_AD.to(y_AD.dtype), grad_weight_TM, None, None, None, None


def _as_tokens(total: Tensor | float, rows_AD: Tensor, slot_TM: Tensor) -> Tensor:
    """The sum in the rows' precision; zeros if there were no rows."""
    if isinstance(total, float):
        return rows_AD.new_zeros(slot_TM.shape[0], rows_AD.shape[1])
    # Not `to` the same dtype: an alias, and the compiler of PyTorch 2.11 loses the gradient of such an output.
    return total if total.dtype == rows_AD.dtype else total.to(rows_AD.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
