"""What a whole model's routers do together: find them, set α or a budget, update priors, pause counting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from grmoe import checks
from grmoe.routing.base import Router
from grmoe.routing.curve import LayerNumbers
from grmoe.routing.prior import next_log_prior
from grmoe.routing.selection import Selection


def routers(module: nn.Module) -> list[Router]:
    """All routers inside a model, in layer order."""
    return [m for m in module.modules() if isinstance(m, Router)]


def set_alpha(module: nn.Module, alpha: Any) -> None:
    """Set the dial of a whole model: one α, or one per router in layer order.

    α may be a Python, NumPy or PyTorch number. Several may be a list, an array or a 1-d tensor of them.
    """
    found = routers(module)
    checks.require(bool(found), f"module must contain a router, got {type(module).__name__} without one")
    given = checks.alphas("alpha", alpha)  # every value is checked before any is set
    values = given if isinstance(given, list) else [given] * len(found)
    checks.require(len(values) == len(found), f"alpha must give {len(found)} values, got {len(values)}")
    for router, value in zip(found, values, strict=True):
        router.alpha = value


def set_layer_numbers(
    found: Iterable[Router], policy: Selection | None, numbers: Iterable[LayerNumbers]
) -> None:
    """Give each router its τ, α and cap, in place: nothing is compiled again unless the policy is another one.

    policy: None leaves a router that chooses by itself its own rule; only α is set.
    """
    for router, (tau, alpha, cap) in zip(found, numbers, strict=True):
        if policy is not None:
            if router.selection != policy:
                router.selection = policy
            router.budget.set_numbers(tau, cap)
        router.alpha = alpha


@contextmanager
def uncounted(found: nn.Module | Iterable[Router]) -> Iterator[None]:
    """Inside, forward passes leave the metrics and prior sums of a model, or of these routers, unchanged."""
    with ExitStack() as stack:
        for router in routers(found) if isinstance(found, nn.Module) else found:
            stack.enter_context(router.uncounted())
        yield


@torch.no_grad()
def update_priors(found: Iterable[Router], rate: float, skip: Tensor | None = None) -> None:
    """`Router.update_prior` of many routers; those of one size and device are updated together.

    skip: a 0-d tensor. Where it is nonzero, priors stay as they are.
    """
    checks.finite("rate", rate, at_least=0)
    groups: dict[Any, list[Router]] = {}
    for router in found:
        if router.balance:
            groups.setdefault((router.num_experts, router.log_prior.device), []).append(router)
    for group in groups.values():
        priors, sums = [r.log_prior for r in group], [r.prior_sums for r in group]
        stacked = torch.stack(priors)
        updated = next_log_prior(stacked, torch.stack(sums), rate)
        if skip is not None:
            updated = torch.where(skip.bool(), stacked, updated)
        torch._foreach_copy_(priors, updated.unbind())
        torch._foreach_zero_(sums)
