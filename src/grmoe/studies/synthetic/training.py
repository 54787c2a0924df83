"""All seeds of a method as one tensor program: real routers with stacked parameters, and `vmap` over seeds.

Legend: S seeds, B tokens, N experts, D width, O target width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from grmoe import checks
from grmoe.optim import GrassmannAdam
from grmoe.regularizers import overlap_penalty
from grmoe.routing import Router, Routing, SlotMixing
from grmoe.routing.prior import next_log_prior
from grmoe.studies.synthetic.task import Task, apply_experts


@dataclass(frozen=True)
class Training:
    """How a method is trained. The defaults hold for every method; `methods` says where one differs."""

    steps: int = 1200
    """Optimiser steps."""
    batch: int = 256
    """Tokens per step and seed."""
    lr: float = 1e-2
    """Adam's rate for experts, linear gates, amortisers and log κ."""
    frame_lr: float = 0.6
    """Frobenius length of a frame's step: √k times 0.15, because the task must be learned in few steps."""
    prior_rate: float = 0.05
    """η of the balanced prior."""


@dataclass(frozen=True)
class Overlap:
    """The overlap penalty β·Σ_{e≠e'} max(0, ‖U_eᵀU_e'‖²_F − ρ₀k) (eq:subspace_reg) in the objective."""

    rho: float
    """ρ₀, or with `relative` a multiple of the overlap of random frames."""
    relative: bool = False
    weight: float = 0.01
    """β, the paper's."""


class StackedRouters:
    """S routers of one kind behind one call: x (S, ..., D) → Routing with a leading S."""

    def __init__(self, routers: list[Router]) -> None:
        self.template = copy.deepcopy(routers[0])
        self.params, self.buffers = stack_module_state(routers)
        self.template.to("meta")

    def __call__(self, x: Tensor, *, train: bool) -> Routing:
        self.template.train(train)

        def one(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
            r: Routing = functional_call(self.template, (params, buffers), (x,))
            slots = (r.slots.to_slots, r.slots.from_slots) if r.slots else ()
            return (r.logits, r.probs, r.selected, r.weights, r.aux_loss, *slots)

        logits, probs, selected, weights, aux_loss, *slots = vmap(one, randomness="different")(
            self.params, self.buffers, x
        )
        return Routing(
            logits=logits,
            probs=probs,
            selected=selected,
            weights=weights,
            aux_loss=aux_loss,
            slots=SlotMixing(*slots) if slots else None,
        )

    def update_prior(self, rate: float) -> None:
        with torch.no_grad():
            prior, sums = self.buffers["log_prior"], self.buffers["counter.prior_sums"]
            prior.copy_(next_log_prior(prior, sums, rate))
            sums.zero_()

    @property
    def alpha(self) -> Tensor:
        return self.buffers["alpha_value"]


class Leaves:
    """A stacked parameter (S, ...) as one leaf per distinct learning rate: optimisers give each its own step."""

    def __init__(self, stack: Tensor, rates: Sequence[float]) -> None:
        blocks = {rate: [s for s, r in enumerate(rates) if r == rate] for rate in dict.fromkeys(rates)}
        order = [s for block in blocks.values() for s in block]
        self.by_rate = {
            rate: nn.Parameter(stack.detach()[torch.tensor(block, device=stack.device)])
            for rate, block in blocks.items()
        }
        sorted_already = order == sorted(order)
        self._places = None if sorted_already else torch.tensor(order, device=stack.device).argsort()

    def stack(self) -> Tensor:
        """All entries in their order. Gradients reach the leaves."""
        leaves: list[Tensor] = list(self.by_rate.values())
        whole = leaves[0] if len(leaves) == 1 else torch.cat(leaves)
        return whole if self._places is None else whole.index_select(0, self._places)


@dataclass
class Trained:
    """Routers and experts of all entries after training."""

    routers: StackedRouters
    maps_SNDO: Tensor


def mixture_output(x_SBD: Tensor, maps_SNDO: Tensor, routing: Routing) -> Tensor:
    """Σ_e weight_e · f_e(x), or Soft MoE's slots through the experts and back; (S, B, O)."""
    if routing.slots is None:
        return torch.einsum("sbn,sbno->sbo", routing.weights, apply_experts(x_SBD, maps_SNDO))
    slots = torch.einsum("sbnp,sbd->snpd", routing.slots.to_slots, x_SBD)
    return torch.einsum("sbnp,snpo->sbo", routing.slots.from_slots, slots @ maps_SNDO)


def train(
    task: Task,
    build: Callable[[int], Router],
    config: Training,
    *,
    rates: Sequence[float] | None = None,
    seed: int = 0,
    supervised: bool = False,
    overlap: Overlap | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> Trained:
    """Train one router and N linear experts per entry on the task loss alone (with `supervised`, on the labels).

    rates: a factor on both learning rates for each entry of the task; all one by default.
    overlap: add the overlap penalty of the router's frames.
    """
    torch.manual_seed(seed)  # routers' noise under vmap draws from the global generator
    S, again = task.entries, task.entries // task.seeds
    rates = [1.0] * S if rates is None else rates
    checks.require(len(rates) == S, f"rates must have one factor per entry, {S}, got {len(rates)}")
    # Seed s starts from the same router and the same experts in every setting and at every rate.
    routers = StackedRouters([build(seed + s).to(task.device) for s in range(task.seeds)] * again)
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (task.seeds, *task.maps_SNDO.shape[1:])
    start = torch.randn(shape, generator=generator) / shape[-2] ** 0.5
    maps = Leaves(start.repeat(again, 1, 1, 1).to(task.device), rates)
    params = {name: Leaves(stack, rates) for name, stack in routers.params.items()}
    optimizers = _optimizers(maps, params, config)
    decay = partial(_cosine, steps=config.steps)
    schedules = [torch.optim.lr_scheduler.LambdaLR(opt, decay) for opt in optimizers]
    for step in range(config.steps):
        x_SBD, label_SB = task.tokens(config.batch)
        routers.params = {name: leaves.stack() for name, leaves in params.items()}
        routing = routers(x_SBD, train=True)
        if supervised:
            logits, labels = routing.logits.flatten(0, 1), label_SB.flatten()
            nll = nn.functional.cross_entropy(logits, labels, reduction="none")
            loss_S = nll.view(S, -1).mean(-1)
        else:
            error = mixture_output(x_SBD, maps.stack(), routing) - task.targets(x_SBD, label_SB)
            loss_S = error.square().mean((-2, -1))
        total_S = loss_S + routing.aux_loss
        if overlap is not None:
            penalty_S = overlap_penalty(routers.params["frames"], overlap.rho, relative=overlap.relative)
            total_S = total_S + overlap.weight * penalty_S
        for opt in optimizers:
            opt.zero_grad(set_to_none=True)
        total_S.sum().backward()  # entries share nothing: the sum gives each its own gradient
        for opt, schedule in zip(optimizers, schedules, strict=True):
            opt.step()
            schedule.step()
        if routers.template.balance:
            routers.update_prior(config.prior_rate * decay(step))
        on_step()
    routers.params = {name: leaves.stack().detach() for name, leaves in params.items()}
    return Trained(routers, maps.stack().detach())


def _cosine(step: int, steps: int) -> float:
    """Cosine from one to a tenth."""
    return 0.1 + 0.45 * (1 + math.cos(math.pi * step / max(1, steps)))


def _optimizers(maps: Leaves, params: dict[str, Leaves], config: Training) -> list[torch.optim.Optimizer]:
    rest = [maps, *(leaves for name, leaves in params.items() if name != "frames")]
    groups = [
        {"params": [leaves.by_rate[rate] for leaves in rest], "lr": rate * config.lr} for rate in maps.by_rate
    ]
    adam = torch.optim.Adam(groups)
    if "frames" not in params:
        return [adam]
    frames = [
        {"params": [leaf], "lr": rate * config.frame_lr} for rate, leaf in params["frames"].by_rate.items()
    ]
    return [adam, GrassmannAdam(frames)]
