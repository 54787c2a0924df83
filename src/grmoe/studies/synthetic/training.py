"""All seeds of a method as one tensor program: real routers with stacked parameters, and `vmap` over seeds.

Legend: S seeds, B tokens, N experts, D width, O target width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from grmoe.optim import GrassmannAdam
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


@dataclass
class Trained:
    """Routers and experts of all seeds after training."""

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
    seed: int = 0,
    supervised: bool = False,
    on_step: Callable[[], None] = lambda: None,
) -> Trained:
    """Train one router and N linear experts per seed on the task loss alone (with `supervised`, on the labels)."""
    torch.manual_seed(seed)  # routers' noise under vmap draws from the global generator
    S = task.seeds
    routers = StackedRouters([build(seed + s).to(task.device) for s in range(S)])
    generator = torch.Generator().manual_seed(seed + 1)
    start = torch.randn(task.maps_SNDO.shape, generator=generator) / task.maps_SNDO.shape[-2] ** 0.5
    maps_SNDO = nn.Parameter(start.to(task.device))
    optimizers = _optimizers(routers, maps_SNDO, config)
    decay = partial(_cosine, steps=config.steps)
    schedules = [torch.optim.lr_scheduler.LambdaLR(opt, decay) for opt in optimizers]
    for step in range(config.steps):
        x_SBD, label_SB = task.tokens(config.batch)
        routing = routers(x_SBD, train=True)
        if supervised:
            logits, labels = routing.logits.flatten(0, 1), label_SB.flatten()
            nll = nn.functional.cross_entropy(logits, labels, reduction="none")
            loss_S = nll.view(S, -1).mean(-1)
        else:
            error = mixture_output(x_SBD, maps_SNDO, routing) - task.targets(x_SBD, label_SB)
            loss_S = error.square().mean((-2, -1))
        total = loss_S + routing.aux_loss
        for opt in optimizers:
            opt.zero_grad(set_to_none=True)
        total.sum().backward()  # seeds share nothing: the sum gives each its own gradient
        for opt, schedule in zip(optimizers, schedules, strict=True):
            opt.step()
            schedule.step()
        if routers.template.balance:
            routers.update_prior(config.prior_rate * decay(step))
        on_step()
    return Trained(routers, maps_SNDO.detach())


def _cosine(step: int, steps: int) -> float:
    """Cosine from one to a tenth."""
    return 0.1 + 0.45 * (1 + float(torch.cos(torch.tensor(torch.pi * step / max(1, steps)))))


def _optimizers(routers: StackedRouters, maps: nn.Parameter, config: Training) -> list[torch.optim.Optimizer]:
    frames = [p for name, p in routers.params.items() if name == "frames"]
    rest = [p for name, p in routers.params.items() if name != "frames"]
    adam = torch.optim.Adam([maps, *rest], lr=config.lr)
    return [adam, GrassmannAdam(frames, lr=config.frame_lr)] if frames else [adam]
