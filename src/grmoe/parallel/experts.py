"""Expert parallelism: a row travels to the process that holds its expert, and its output travels back.

Every process has all frames, so it routes its own tokens. The dispatch list is sorted by expert, and processes hold
experts in order. So each process receives one contiguous piece of the list, and the all-to-all needs no packing. The
receiver builds its own dispatch list, with one expert per row, and runs any backend over it.

Legend: T tokens, D model width, N experts, E processes that divide them, L = N/E experts of one process, A rows of the
dispatch list, S of them sent, R rows received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from grmoe.experts import BACKENDS, Dispatch, ExpertWeights
from grmoe.experts.dispatch import combine, gather
from grmoe.experts.weights import Activation


class ExpertParallel:
    """An `ExpertTransport` for a group of processes that share the experts.

    The weights are DTensors, divided over the group along the experts. Results are bit for bit reproducible: rows are
    ordered by (sender, expert, token), and no sum depends on the order of arrival.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, group.size()

    # The number of rows is known only when they arrive, so the compiler cannot use it.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x_TD: Tensor, dispatch: Dispatch, experts: ExpertWeights, backend: str) -> Tensor:
        """The same as `reference_experts` with all experts. All processes of the group call it together."""
        end_N = dispatch.offset_N.long()
        sent_EL = torch.diff(end_N, prepend=end_N.new_zeros(1)).view(self.size, -1)
        received_EL = torch.empty_like(sent_EL)
        dist.all_to_all_single(received_EL, sent_EL, group=self.group)
        # The only read on the host: an all-to-all needs its sizes as Python numbers.
        sends, receives = torch.stack([sent_EL.sum(1), received_EL.sum(1)]).tolist()

        rows_SD = gather(x_TD, dispatch)[: sum(sends)]
        rows_RD: Tensor = _Exchange.apply(rows_SD, sends, receives, self.group)
        out_RD = self._run_local(rows_RD, received_EL, experts, backend)
        out_SD: Tensor = _Exchange.apply(out_RD, receives, sends, self.group)
        unused = dispatch.num_rows - len(out_SD)
        return combine(pad(out_SD, (0, 0, 0, unused)) if unused else out_SD, dispatch)

    def _run_local(
        self, rows_RD: Tensor, received_EL: Tensor, experts: ExpertWeights, backend: str
    ) -> Tensor:
        """Run rows through the experts of this process. Rows come by sender, and by expert within a sender."""
        R, L = len(rows_RD), received_EL.shape[1]
        local_L = torch.arange(L, device=rows_RD.device)
        expert_R = local_L.repeat(self.size).repeat_interleave(received_EL.flatten(), output_size=R)
        if R == 0:
            # One row without an expert, so that the weights get gradients: other processes wait to reduce them.
            rows_RD, expert_R = pad(rows_RD, (0, 0, 0, 1)), pad(expert_R, (0, 1), value=L)
        selected_RL = expert_R.unsqueeze(1) == local_L
        dispatch = Dispatch.build(selected_RL.to(torch.float32), selected_RL, 1, kernels=backend == "triton")

        def local(x_TD: Tensor, dispatch: Dispatch, weights: ExpertWeights) -> Tensor:
            return BACKENDS[backend](x_TD, dispatch, LocalExperts.of(weights, self.size))

        return experts.run(local, rows_RD, dispatch)[:R]


@dataclass(frozen=True)
class LocalExperts:
    """The experts of this process."""

    activation: Activation
    up: Tensor
    down_proj: Tensor
    whole: ExpertWeights

    @classmethod
    def of(cls, whole: ExpertWeights, processes: int) -> LocalExperts:
        """The local parts of weights that are divided among `processes`.

        The loss is a mean over processes, and so is a gradient: it is averaged over the processes that hold the same
        experts. But here the rows of all processes of the group meet, and the gradient is the sum over the group. That
        is `processes` times too large, so it is divided.
        """
        up, down = (_divide_gradient(_local(w), processes) for w in (whole.up, whole.down_proj))
        return cls(whole.activation, up, down, whole)

    def activate(self, inner: Tensor, *, in_place: bool = False) -> Tensor:
        return self.whole.activate(inner, in_place=in_place)


def _local(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


def _divide_gradient(tensor: Tensor, divisor: int) -> Tensor:
    """The tensor itself, with its gradient divided by `divisor`."""
    return _DivideGradient.apply(tensor, divisor)


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.divisor, None


class _Exchange(torch.autograd.Function):
    """All-to-all of rows: `sends[i]` rows to process i, `receives[i]` rows from it. The backward reverses it."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return _all_to_all(rows, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.receives, ctx.sends, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(receives), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), receives, sends, group=group)
    return out
