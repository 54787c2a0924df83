"""What a whole model's routers do together: find them, set α and budgets, update priors, pause counting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from grmoe import checks
from grmoe.routing.base import Router
from grmoe.routing.budget import Balances
from grmoe.routing.curve import LayerNumbers
from grmoe.routing.elastic import Elastic
from grmoe.routing.entropy import EntropyTerm
from grmoe.routing.frames import FrameRouter
from grmoe.routing.hash import HashRouter
from grmoe.routing.leading import next_leading_share
from grmoe.routing.prior import next_log_prior
from grmoe.routing.selection import Mass, Selection, TopK


def routers(module: nn.Module) -> list[Router]:
    """All routers of experts inside a model, in layer order."""
    return [router for router in all_routers(module) if router.of_experts]


def all_routers(module: nn.Module) -> list[Router]:
    """`routers`, and those of attention heads. Copies that PEFT keeps beside those in use are left out."""
    found: list[Router] = []
    idle: set[nn.Module] = set()
    for part in module.modules():  # a wrapper comes before what it wraps
        idle.update(inner for copy in _idle_copies(part) for inner in copy.modules())
        if isinstance(part, Router) and part not in idle:
            found.append(part)
    return found


def _idle_copies(module: nn.Module) -> list[nn.Module]:
    """What a wrapper of PEFT's `modules_to_save` holds but does not call. Known by its name: PEFT may be missing."""
    if type(module).__name__ != "ModulesToSaveWrapper":
        return []
    wrapper: Any = module
    active = wrapper.active_adapter  # a name, or in later versions a list of at most one
    name = active if isinstance(active, str) else next(iter(active), None)
    trained, original = dict(wrapper.modules_to_save.items()), wrapper.original_module
    used = original if wrapper.disable_adapters else trained.get(name, original)
    return [copy for copy in (original, *trained.values()) if copy is not used]


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


def set_elastic(module: nn.Module, elastic: Elastic | None) -> None:
    """Draw random budgets while a model trains (`grmoe.routing.elastic`); None: no longer.

    `set_draw` must follow before each forward pass. Until then budgets are full.
    A least weight, as a calibrated curve sets it, has no mass to draw: "mass" is refused there.
    """
    found = routers(module)
    for router in found if elastic is not None else ():
        draws = isinstance(router.selection, TopK | Mass) and router.budget.room > 1
        checks.require(
            draws,
            f"elastic needs a selection TopK or Mass with more than one expert, got {router.selection} "
            f"in a {type(router).__name__}",
        )
        assert elastic is not None
        checks.require(
            elastic.rule != "mass" or not _by_weight(router),
            "elastic would draw nothing, because the budget in use is a least weight: first call "
            f"model.set_budget(None), or give the rule 'count'; got {elastic}",
        )
    for number, router in enumerate(found):
        router.budget.elastic = elastic
        if len(found) > 1:  # each layer draws its own; one router alone keeps the number it has
            router.budget.layer = number


def _by_weight(router: Router) -> bool:
    """Whether experts are chosen by a least weight, a negative τ. Waits for the device."""
    tau = router.budget.tau
    return not tau.is_meta and bool((tau < 0).any())


def set_entropy(module: nn.Module, term: EntropyTerm | None) -> None:
    """Add the entropy term to the losses of a model's routers while they train; None: no longer."""
    for router in routers(module):
        learns = term is None or not isinstance(router, HashRouter)
        checks.require(learns, "an entropy term needs a gate that learns, got a HashRouter")
        router.entropy = term


def set_leading(module: nn.Module, weight: float) -> None:
    """Add the leading term (`grmoe.routing.leading`) to the losses of a model's routers while they train; 0: no longer.

    `update_priors` must follow after each step: it also turns the leads of the step into shares. Several processes
    first add up their `counter.leading_sums`, as they do with `prior_sums`.
    """
    for router in routers(module):
        learns = not weight or not isinstance(router, HashRouter)
        checks.require(learns, "a leading term needs a gate that learns, got a HashRouter")
        router.use_leading(weight)


@torch.no_grad()
def set_draw(module: nn.Module, key: int, first_row: int = 0) -> None:
    """What the next forward pass draws its budgets from. The host does not wait for the device.

    key: of the training step (`step_key`). `FULL` asks for the full budget.
    first_row: index of the batch's first sequence within the step, over all processes and micro-batches.
    """
    budgets = [router.budget for router in routers(module)]
    for numbers, value in (([b.key for b in budgets], key), ([b.first_row for b in budgets], first_row)):
        if numbers:
            # Two launches for all layers, in place of one for each.
            torch._foreach_zero_(numbers)
            torch._foreach_add_(numbers, value)


def set_balances(module: nn.Module, kind: Balances) -> None:
    """Which experts' load the balanced priors of a model even out (`Budget.balances`).

    Routers with `weight_alpha` or a bias go on counting what is computed.
    """
    for router in routers(module):
        router.budget.balances = kind


def set_layer_numbers(
    found: Iterable[Router], policy: Selection | None, numbers: Iterable[LayerNumbers]
) -> None:
    """Give each router its τ, α, cap and bias, in place: nothing is compiled again unless the policy is another one.

    policy: None leaves a router that chooses by itself its own rule; only α is set.
    """
    for router, (tau, alpha, cap, bias) in zip(found, numbers, strict=True):
        if policy is not None:
            if router.selection != policy:
                router.selection = policy
            router.budget.set_numbers(tau, cap, bias)
        router.alpha = alpha


@contextmanager
def uncounted(found: nn.Module | Iterable[Router]) -> Iterator[None]:
    """Inside, forward passes leave the metrics and prior sums of a model, or of these routers, unchanged."""
    with ExitStack() as stack:
        for router in all_routers(found) if isinstance(found, nn.Module) else found:
            stack.enter_context(router.uncounted())
        yield


@torch.no_grad()
def update_priors(found: nn.Module | Iterable[Router], rate: float, skip: Tensor | None = None) -> None:
    """`Router.update_prior` of a model's routers, or of these; those of one size and device are updated together.
    Frames that an optimiser moved off their manifold are made orthonormal again. Frozen routers stay as they are.

    skip: a 0-d tensor. Where it is nonzero, priors and leading shares stay as they are.
    """
    checks.finite("rate", rate, at_least=0)
    found = all_routers(found) if isinstance(found, nn.Module) else list(found)
    balanced = []
    for router in found:
        if router.balance and router.frozen:
            router.prior_sums.zero_()
        elif router.balance:
            balanced.append((router.log_prior, router.prior_sums))
    _update(balanced, lambda prior, sums: next_log_prior(prior, sums, rate), skip)
    counted = [(r.leading_share, r.counter.leading_sums) for r in found]
    leading = [(share, sums) for share, sums in counted if share is not None and sums is not None]
    _update(leading, next_leading_share, skip)
    for router in found:
        if isinstance(router, FrameRouter):
            router.retract_if_moved()


def _update(
    pairs: Iterable[tuple[Tensor, Tensor]], rule: Callable[[Tensor, Tensor], Tensor], skip: Tensor | None
) -> None:
    """(numbers, sums) ← (rule(numbers, sums), 0), all of one size and device together."""
    groups: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for numbers, sums in pairs:
        groups.setdefault((numbers.shape, numbers.device), []).append((numbers, sums))
    for group in groups.values():
        old, sums_of = [numbers for numbers, _ in group], [sums for _, sums in group]
        stacked = torch.stack(old)
        updated = rule(stacked, torch.stack(sums_of))
        if skip is not None:
            updated = torch.where(skip.bool(), stacked, updated)
        torch._foreach_copy_(old, updated.unbind())
        torch._foreach_zero_(sums_of)
