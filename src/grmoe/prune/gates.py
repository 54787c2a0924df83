"""The router for fewer experts: the rows of experts that stay, and one row per merged group.

A merged expert gets the mean subspace (mean row) and mean κ of its group. Its log-prior is fitted:

1. The ideal logit is t(x) = log Σ_{e∈G} exp ℓ_e(x), which keeps the mass of the group G. One frame cannot follow t
   for every x. The log-prior makes the means agree over calibration tokens, weighted by the group's mass on each token.
   For equal members this is exact: their prior masses add, and no gate changes.
2. Top-k over-selects merged experts: two third-ranked experts become one second-ranked. So the log-prior moves on until
   the group has the share of the combine weights that its members had. Without selection, step 1 already does that.

Legend: T tokens, N experts, D model width, K subspace rank.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from grmoe import checks, geometry
from grmoe.model.choices_grmoe import OWN_CHOICE
from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.routing import GrassmannRouter, Router, SoftmaxRouter, VMFRouter
from grmoe.routing.counting import LoadCounter

ROUNDS = 4  # of step 2; the share is then right to about one percent


def check_router(config: GrmoeConfig) -> None:
    """Refuse routers that are not made of one row per expert."""
    checks.require(
        config.router not in OWN_CHOICE,
        f"router {config.router!r} cannot be pruned: it selects its experts by itself, not by a gate",
    )
    checks.require(
        not config.identity_experts,
        "a model with identity experts cannot be pruned: dropping an expert would change how often tokens skip",
    )
    options = config.router_options or {}
    checks.require(
        options.get("amortizer") is None,
        "a router with an amortizer cannot be pruned: its network mixes the energies of all experts",
    )
    checks.require(
        all(a > 0 for a in config.alphas),
        "alpha must be above 0 to prune: at 0 the gate is the same for all experts",
    )


def similarity(router: Router) -> Tensor:
    """Similarity of the experts' gates, (N, N): 1 for equal rows.

    Frames: ‖UᵢᵀUⱼ‖²_F / k. Rows of a linear gate: cosine after subtracting the mean row, because adding one vector to
    all rows changes no gate. Directions (vMF): cosine.
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
    """A new router with one expert per group of `layout`.

    load_N: weights of the experts in the mean of their group. x_TD: tokens to fit the log-priors on.
    """
    small = _sliced(router, [group[0] for group in layout])
    merged = {g: group for g, group in enumerate(layout) if len(group) > 1}
    if not merged:
        return small
    for g, group in merged.items():
        weight = load_N[list(group)].double()
        _mean_row(router, small, g, list(group), weight / weight.sum())
    _fit_priors(router, small, merged, x_TD)
    return small


def _fit_priors(router: Router, small: Router, merged: dict[int, Sequence[int]], x_TD: Tensor) -> None:
    """Fit the log-priors of merged experts, as the head of this file says."""
    small.log_prior[list(merged)] = 0.0
    logits_TN, z_TG = router.gate(x_TD.float(), None), small.gate(x_TD.float(), None)
    mass_TN = logits_TN.double().softmax(-1)
    # A unit of log-prior adds this much to the logits.
    unit = 1.0 if getattr(router, "dial", "posterior") == "likelihood" else router.alpha
    for g, group in merged.items():
        target_T = logits_TN[:, list(group)].double().logsumexp(-1)
        weight_T = mass_TN[:, list(group)].sum(-1)
        level = (weight_T * (target_T - z_TG[:, g].double())).sum() / weight_T.sum()
        small.log_prior[g] = float(level) / unit
    if router.selection.dense:
        return
    weights_TN = combine_weights(router, x_TD).double()
    wanted = torch.stack([weights_TN[:, list(group)].sum() for group in merged.values()])
    for _ in range(ROUNDS):
        now = combine_weights(small, x_TD).double().sum(0)[list(merged)]
        # The small constant keeps groups without any weight where they are.
        step = ((wanted + 1e-6 * len(x_TD)) / (now + 1e-6 * len(x_TD))).log()
        small.log_prior[list(merged)] += (step / unit).to(small.log_prior.dtype)


@torch.no_grad()
def combine_weights(router: Router, x_TD: Tensor) -> Tensor:
    """Combine weights, (T, N). The router's metrics do not count this pass."""
    with router.uncounted():
        weights: Tensor = router(x_TD).weights
    return weights


def _sliced(router: Router, keep: list[int]) -> Router:
    """A copy with the rows of these experts in every parameter and buffer. Metrics start at zero."""
    # The memo keeps deepcopy from copying parameters that are replaced below.
    small = copy.deepcopy(router, {id(p): p for p in router.parameters()})
    for name, value in list(small.named_parameters()):
        assert value.shape[0] == router.num_experts, name
        setattr(small, name, nn.Parameter(value.detach()[keep].clone(), requires_grad=False))
    small.num_experts = small.budget.num_experts = len(keep)
    small.log_prior = _log_prior(router)[keep].clone()
    small.counter = LoadCounter(len(keep)).to(router.log_prior.device)
    if isinstance(small, GrassmannRouter) and small.prior != "balanced":
        # A fixed prior cannot give a group the mass of two experts. The normalisers move into a learned prior.
        small.prior, small.balance = "balanced", True
    return small


def _log_prior(router: Router) -> Tensor:
    return router.log_prior_correction() if isinstance(router, GrassmannRouter) else router.log_prior


def _mean_row(router: Router, small: Router, g: int, group: list[int], weight_G: Tensor) -> None:
    """Set row g of the small router to the group's mean: chordal for subspaces, arithmetic for κ, rows and μ."""

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
        # κ per column: cut the mean form Σ w UΛUᵀ to rank k, the nearest form of that rank.
        scale_GK = (weight_G[:, None] * router.kappa[group].double()).sqrt()
        root = router.frames[group].double() * scale_GK[:, None]
        left, values, _ = torch.linalg.svd(root.transpose(0, 1).flatten(1), full_matrices=False)
        small.frames[g] = left[:, : router.rank]
        small.log_kappa[g] = values[: router.rank].square().clamp(min=1e-12).log()
    if router.mu is not None:
        assert small.mu is not None
        small.mu[g] = mean(router.mu)
