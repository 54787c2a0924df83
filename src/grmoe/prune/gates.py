"""The gate of fewer experts: rows of those that stay, one row for each group that becomes one.

A merged expert has its members' mean subspace (mean row), their mean κ, and a log-prior such that the group keeps its
place in the mixture. Its logit should be t(x) = log Σ_{e∈G} exp ℓ_e(x), which gives it the mass its members had; one
frame cannot follow t everywhere, so the level makes the means agree, over calibration tokens weighted by the mass
the group has of each. For equal members that is exact: the priors' masses add, and no gate changes.

A selection makes more of that: two experts that are each third become one that is second. The level is therefore moved
on until the group has the share of the combine weights its members had. Without selection the two are the same.

Legend: T tokens, N experts, D model width, K subspace rank.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from grmoe import checks, geometry
from grmoe.model.configuration_grmoe import OWN_CHOICE, GrmoeConfig
from grmoe.routing import GrassmannRouter, Router, SoftmaxRouter, VMFRouter
from grmoe.routing.counting import LoadCounter

ROUNDS = 4  # of the search for a level: the share is then right to about a percent


def check_router(config: GrmoeConfig) -> None:
    """Refuse what has no rows to take away."""
    checks.require(
        config.router not in OWN_CHOICE,
        f"router {config.router!r} cannot be pruned: it chooses its experts by itself, not by a gate's selection",
    )
    options = config.router_options or {}
    checks.require(
        options.get("amortizer") is None,
        "a router with an amortizer cannot be pruned: its network mixes the energies of all experts",
    )
    checks.require(
        all(a > 0 for a in config.alphas), "alpha must be above 0 to prune: at 0 the gate knows no expert"
    )


def similarity(router: Router) -> Tensor:
    """How much two experts ask for the same tokens, by their gate alone, (N, N): 1 where it is the same row.

    Frames: ‖UᵢᵀUⱼ‖²_F / k. Rows of a linear gate: their cosine, about their mean, because a vector added to all rows
    changes no gate. Directions (vMF): their cosine.
    """
    if isinstance(router, GrassmannRouter):
        return geometry.overlap(router.frames.detach()) / router.rank
    assert isinstance(router, SoftmaxRouter | VMFRouter)
    rows_ND = router.weight.detach()
    if isinstance(router, SoftmaxRouter):
        rows_ND = rows_ND - rows_ND.mean(0)
    unit_ND = rows_ND / rows_ND.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return unit_ND @ unit_ND.T


@torch.no_grad()
def reduce_router(router: Router, layout: Sequence[Sequence[int]], load_N: Tensor, x_TD: Tensor) -> Router:
    """A router with one expert for each group of `layout`; the original is not touched.

    load_N: weights of the members in their mean. x_TD: tokens to fit merged gates on.
    """
    small = _sliced(router, [group[0] for group in layout])
    merged = {g: group for g, group in enumerate(layout) if len(group) > 1}
    if not merged:
        return small
    for g, group in merged.items():
        weight = load_N[list(group)].double()
        _mean_row(router, small, g, list(group), weight / weight.sum())
    _set_levels(router, small, merged, x_TD)
    return small


def _set_levels(router: Router, small: Router, merged: dict[int, Sequence[int]], x_TD: Tensor) -> None:
    """Log-priors of the merged experts. x is read by both gates, so that nothing but them differs."""
    small.log_prior[list(merged)] = 0.0
    logits_TN, z_TG = router.gate(x_TD.float(), None), small.gate(x_TD.float(), None)
    mass_TN = logits_TN.double().softmax(-1)
    # What a unit of the prior is worth in the logits.
    unit = 1.0 if getattr(router, "dial", "posterior") == "likelihood" else router.alpha
    for g, group in merged.items():
        target_T = logits_TN[:, list(group)].double().logsumexp(-1)
        weight_T = mass_TN[:, list(group)].sum(-1)
        level = (weight_T * (target_T - z_TG[:, g].double())).sum() / weight_T.sum()
        small.log_prior[g] = float(level) / unit
    if router.selection.dense:
        return
    weights_TN = route(router, x_TD).double()
    wanted = torch.stack([weights_TN[:, list(group)].sum() for group in merged.values()])
    for _ in range(ROUNDS):
        now = route(small, x_TD).double().sum(0)[list(merged)]
        # A group without any weight has no level to find.
        step = ((wanted + 1e-6 * len(x_TD)) / (now + 1e-6 * len(x_TD))).log()
        small.log_prior[list(merged)] += (step / unit).to(small.log_prior.dtype)


@torch.no_grad()
def route(router: Router, x_TD: Tensor) -> Tensor:
    """Combine weights, (T, N); metrics do not count it."""
    with router.uncounted():
        weights: Tensor = router(x_TD).weights
    return weights


def _sliced(router: Router, keep: list[int]) -> Router:
    """Rows of the kept experts in every parameter and buffer; sums of metrics start anew."""
    # The memo shares the parameters that are about to be replaced, in place of copying them.
    small = copy.deepcopy(router, {id(p): p for p in router.parameters()})
    for name, value in list(small.named_parameters()):
        assert value.shape[0] == router.num_experts, name
        setattr(small, name, nn.Parameter(value.detach()[keep].clone(), requires_grad=False))
    small.num_experts = len(keep)
    small.log_prior = _log_prior(router)[keep].clone()
    small.counter = LoadCounter(len(keep)).to(router.log_prior.device)
    if isinstance(small, GrassmannRouter) and small.prior != "balanced":
        # Only a learned prior can say that a group has the mass of two; the normalisers move into it.
        small.prior, small.balance = "balanced", True
    return small


def _log_prior(router: Router) -> Tensor:
    return router.log_prior_correction() if isinstance(router, GrassmannRouter) else router.log_prior


def _mean_row(router: Router, small: Router, g: int, group: list[int], weight_G: Tensor) -> None:
    """The members' mean in row g of the smaller router: chordal for subspaces, plain for κ, rows and μ."""

    def mean(rows: Tensor) -> Tensor:
        return torch.einsum("g,g...->...", weight_G, rows[group].double())

    if isinstance(router, SoftmaxRouter):
        assert isinstance(small, SoftmaxRouter)
        small.weight[g] = mean(router.weight)
        return
    if isinstance(router, VMFRouter):
        assert isinstance(small, VMFRouter)
        small.weight[g] = mean(router.weight / router.weight.norm(dim=-1, keepdim=True))
        small.log_kappa[g] = mean(router.log_kappa.exp()).log()
        return
    assert isinstance(router, GrassmannRouter)
    assert isinstance(small, GrassmannRouter)
    if router.log_kappa.ndim == 1:
        small.frames[g] = geometry.chordal_mean(router.frames[group].double(), weight_G)
        small.log_kappa[g] = mean(router.kappa).log()
    else:
        # With λ along the columns the mean form Σ w UΛUᵀ itself is cut to rank k: the nearest of that rank.
        root = (
            router.frames[group].double() * (weight_G[:, None] * router.kappa[group].double()).sqrt()[:, None]
        )
        left, values, _ = torch.linalg.svd(root.transpose(0, 1).flatten(1), full_matrices=False)
        small.frames[g] = left[:, : router.rank]
        small.log_kappa[g] = values[: router.rank].square().clamp(min=1e-12).log()
    if router.mu is not None:
        assert small.mu is not None
        small.mu[g] = mean(router.mu)
