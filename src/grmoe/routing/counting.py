"""Counting what a router does: sums for the metrics and for the balanced prior, on the device, fused or not.

Legend: N experts, T tokens (all leading dimensions together).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grmoe.kernels.runtime import attempt, available, has_failed
from grmoe.routing.budget import Budget
from grmoe.routing.buffers import Restarted
from grmoe.routing.metrics import RoutingMetrics, routing_sums, summarize
from grmoe.routing.result import Routing
from grmoe.routing.selection import BY_RANK


class LoadCounter(Restarted):
    """Buffers of sums. None is part of a checkpoint.

    sums: what `summarize` turns into metrics, since `reset`. See `routing_sums` for the layout.
    prior_sums: each expert's summed share of tokens (N), then the token count, since the last prior update.
    leading_sums: how many tokens each expert led (N), since the last prior update. None unless `count_leads` asks.
    """

    sums: Tensor
    prior_sums: Tensor
    leading_sums: Tensor | None

    def __init__(self, num_experts: int, identity_experts: int = 0) -> None:
        super().__init__()
        self.num_experts, self.identity_experts = num_experts, identity_experts
        self.paused = False
        # fp64, because a count in fp32 stops growing at 2^24 tokens.
        self.register_buffer("sums", torch.zeros(3 * num_experts + 4, dtype=torch.float64), persistent=False)
        self.register_buffer("prior_sums", torch.zeros(num_experts + 1), persistent=False)
        self.register_buffer("leading_sums", None, persistent=False)

    def restart(self, name: str) -> None:
        getattr(self, name).zero_()

    def count_leads(self, on: bool) -> None:
        """Whether `leading_sums` exist, from zero."""
        self.leading_sums = self.prior_sums.new_zeros(self.num_experts) if on else None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, nothing is counted. May be nested."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    @torch.no_grad()
    def add(
        self, routing: Routing, *, prior: Budget | None = None, leads: bool = False, kernels: bool = False
    ) -> None:
        """Count one forward pass. No value is read by the host.

        prior: count for the balanced prior too, as its `balances` says. leads: count `leading_sums` too.
        kernels: by Triton where it runs.
        Activation checkpointing runs the forward a second time, inside the backward; that run is not counted.
        """
        # The graph task is set during a backward. Dynamo cannot trace the call.
        in_backward = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if self.paused or in_backward:
            return
        counts = self.leading_sums if leads else None
        if counts is None:
            self._add(routing, prior, kernels)
            return
        # `sums` have what each expert led. The difference spares a second pass over the gates.
        led = slice(self.num_experts, 2 * self.num_experts)
        before_N = self.sums[led].clone()
        self._add(routing, prior, kernels)
        counts.add_((self.sums[led] - before_N).to(counts.dtype))

    def _add(self, routing: Routing, prior: Budget | None, kernels: bool) -> None:
        fused = kernels and routing.slots is None and _kernel_knows(prior)
        if fused and available(routing.probs) and not has_failed("metrics"):
            attempt("metrics", lambda: self._add_fused(routing, prior), lambda: None)
            if not has_failed("metrics"):
                return
        self.sums.add_(routing_sums(routing.probs, routing.weights, routing.selected, _slot_rows(routing)))
        if prior is not None:
            shares = prior_shares(routing.probs, routing.selected, prior)
            self.prior_sums.add_(shares.to(self.prior_sums.dtype))

    def _add_fused(self, routing: Routing, prior: Budget | None) -> None:
        from grmoe.kernels.metrics import add_counts

        tensors = (routing.probs, routing.weights, routing.selected)
        probs, weights, selected = (t.reshape(-1, self.num_experts) for t in tensors)
        rule = {} if prior is None else _prior_rule(prior)
        add_counts(probs, weights, selected, self.sums, self.prior_sums, **rule)

    def read(self) -> RoutingMetrics:
        """The metrics since the last `reset`, without a router's own figures. Waits for the device."""
        return summarize(self.sums, self.num_experts, self.identity_experts)

    def reset(self) -> None:
        """Restart the metrics. The balanced prior's sums stay."""
        self.sums.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LoadCounter:
        """Moves between devices; the sums stay fp64, because `model.float()` must not shorten the counts."""

        def keep_precision(t: Tensor) -> Tensor:
            out = fn(t)
            return t.to(out.device) if t is self.sums and out.dtype != t.dtype else out

        return super()._apply(keep_precision, recurse)


def read_all(
    counters: Sequence[LoadCounter], figures: Sequence[Mapping[str, Tensor]] = ()
) -> list[RoutingMetrics]:
    """`LoadCounter.read` of several. All numbers are on their way before the host waits, once for all.

    figures: each router's own (`Router.geometry_figures`), to be put into its metrics.
    """
    device = counters[0].sums.device
    flat = [figure.to(device, torch.float32) for each in figures for figure in each.values()]
    values = torch.stack(flat) if flat else None
    sums = torch.cat([c.sums.to(device) for c in counters]).cpu().split([len(c.sums) for c in counters])
    counted = [
        summarize(own, c.num_experts, c.identity_experts) for own, c in zip(sums, counters, strict=True)
    ]
    if values is None:
        return counted
    numbers = iter(values.tolist())
    return [
        replace(metrics, **{name: next(numbers) for name in each})
        for metrics, each in zip(counted, figures, strict=True)
    ]


def prior_shares(probs: Tensor, selected: Tensor, budget: Budget) -> Tensor:
    """Each expert's share of every token, summed over tokens, then the number of tokens; (N+1,).

    A token divides one unit among experts, as `budget.balances` says: among those that compute it; among those that
    would compute it at the full budget; to the leading one; or the mean of the last two.
    """
    N = probs.shape[-1]
    probs_TN, chosen_TN = probs.detach().reshape(-1, N), selected.reshape(-1, N)
    finite_T1 = torch.isfinite(probs_TN).all(-1, keepdim=True)
    kind = budget.balances
    if kind in ("candidates", "both"):
        chosen_TN = budget.select(probs.detach(), training=False).reshape(
            -1, N
        )  # τ and cap may be per sequence
    if kind != "leading":
        chosen_TN = chosen_TN & finite_T1
        share_TN = chosen_TN.to(probs.dtype) / chosen_TN.sum(-1, keepdim=True).clamp(min=1)
    if kind in ("leading", "both"):
        leads_TN = probs_TN.argmax(-1, keepdim=True) == torch.arange(N, device=probs.device)
        leads_TN = (leads_TN & finite_T1).to(probs.dtype)
        share_TN = leads_TN if kind == "leading" else (share_TN + leads_TN) / 2
    return torch.cat([share_TN.sum(0), finite_T1.sum(0).to(probs.dtype)])


def _kernel_knows(prior: Budget | None) -> bool:
    """The kernel finds candidates by rank only, with one τ and one cap for all sequences."""
    if prior is None or prior.balances not in ("candidates", "both"):
        return True
    return type(prior.policy) in BY_RANK and prior.tau.ndim == prior.cap.ndim == 0


def _prior_rule(budget: Budget) -> dict[str, Any]:
    return {"prior": budget.balances, "tau": budget.tau, "cap": budget.cap, "room": budget.room}


def _slot_rows(routing: Routing) -> int | None:
    """Rows each expert computes in a Soft MoE pass: sequences times slots. None for all other routers."""
    if routing.slots is None:
        return None
    *sequences, _, _, slots = routing.slots.to_slots.shape
    return math.prod(sequences) * slots
