"""The paper's bounds on one layer: Theorem "Collapse Resistance" and Corollary "Top-k Mass Control", measured.

The theorem sorts tokens by their own expert and asks how close they are to it, and to all others. Its hypothesis leaves
the sorting open. We give a token to the expert of its largest affinity: if the hypothesis holds for any sorting, it
holds for this one.

Legend: T tokens, N experts, D model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grmoe.analyze.results import Gap, Separation, TopMass
from grmoe.certificates import load_cv_bound, separation_gap, topk_mass_bound
from grmoe.routing import GrassmannRouter, Router, Routing

LEFT_OUT = (0.0, 0.05, 0.5)  # shares of the tokens that a gap may leave out
_ROUNDING = 1e-9  # of a mass in fp64


@dataclass
class _Mass:
    """Sums over tokens for one k, fp64."""

    tokens: float = 0.0
    mass: float = 0.0
    paper: float = 0.0
    sharp: float = 0.0
    useful: float = 0.0
    broken: int = 0


@dataclass
class BoundsTally:
    """What the bounds of one layer need of each token."""

    router: Router
    own_parts: list[Tensor] = field(default_factory=list)
    """Affinity to the own expert, (T,) per batch."""
    rival_parts: list[Tensor] = field(default_factory=list)
    """Largest affinity to another expert."""
    count_N: Tensor | None = None
    """Tokens by their own expert."""
    gate_N: Tensor | None = None
    kappa_min: float = math.inf
    kappa_max: float = -math.inf
    masses: dict[int, _Mass] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, x: Tensor, routing: Routing) -> None:
        """Count one forward pass: x (..., D) as the router saw it. A token with a non-finite gate is left out."""
        if routing.slots is not None:  # Soft MoE's gate is over slots
            return
        logits_TN = routing.logits.flatten(0, -2).double()
        finite_T = torch.isfinite(logits_TN).all(-1)
        logits_TN = logits_TN[finite_T]
        for k in self._counts():
            self._add_mass(k, logits_TN)
        router = self.router
        # A linear term or a matrix amortiser is no factor of an expert's affinity.
        if isinstance(router, GrassmannRouter) and router.mu is None and router.amortizer != "matrix":
            x_TD = x.flatten(0, -2)[finite_T].to(routing.logits.dtype)
            self._add_affinities(router, x_TD, torch.softmax(logits_TN, -1))

    def _counts(self) -> list[int]:
        """The k of the corollary: one, two, and the experts per token of the selection."""
        N = self.router.num_experts
        return sorted(k for k in {1, 2, self.router.max_experts()} if k < N)

    def _add_mass(self, k: int, logits_TN: Tensor) -> None:
        sums = self.masses.setdefault(k, _Mass())
        N = logits_TN.shape[-1]
        mass_T = torch.softmax(logits_TN, -1).topk(k).values.sum(-1)
        paper_T = topk_mass_bound(logits_TN, k, "paper").bound
        sums.tokens += len(logits_TN)
        sums.mass += float(mass_T.sum())
        sums.paper += float(paper_T.sum())
        sharp_T = topk_mass_bound(logits_TN, k).bound
        sums.sharp += float(sharp_T.sum())
        sums.broken += int((torch.maximum(paper_T, sharp_T) > mass_T + _ROUNDING).sum())
        sums.useful += float((paper_T > k / N).sum())

    def _add_affinities(self, router: GrassmannRouter, x_TD: Tensor, gate_TN: Tensor) -> None:
        a_TN = router.energies(x_TD).double()
        top = a_TN.topk(2)
        self.own_parts.append(top.values[:, 0].cpu())
        self.rival_parts.append(top.values[:, 1].cpu())
        count_N = torch.bincount(top.indices[:, 0], minlength=router.num_experts).double().cpu()
        gate_N = gate_TN.sum(0).cpu()
        self.count_N = count_N if self.count_N is None else self.count_N + count_N
        self.gate_N = gate_N if self.gate_N is None else self.gate_N + gate_N
        kappa = router.kappa.detach().double()
        if router.amortizer is not None or kappa.ndim == 2:
            # What multiplies the affinity of this token: h·κ, for diagonal κ a mean over columns.
            kappa = (router.scores(x_TD).double() / a_TN)[a_TN > 0]
        if kappa.numel():
            self.kappa_min = min(self.kappa_min, float(kappa.min()))
            self.kappa_max = max(self.kappa_max, float(kappa.max()))

    def top_mass(self) -> list[TopMass]:
        """The corollary at each k. Empty for a router whose gate is no softmax over experts."""
        return [
            TopMass(
                k=k,
                mass=sums.mass / sums.tokens,
                paper=sums.paper / sums.tokens,
                sharp=sums.sharp / sums.tokens,
                paper_useful=sums.useful / sums.tokens,
                broken=sums.broken,
            )
            for k, sums in self.masses.items()
            if sums.tokens
        ]

    def separation(self) -> Separation | None:
        """The theorem. None for a router without subspaces, with a linear term or a matrix amortiser."""
        if self.count_N is None or self.gate_N is None or not self.own_parts:
            return None
        router = self.router
        assert isinstance(router, GrassmannRouter)
        own_T, rival_T = torch.cat(self.own_parts), torch.cat(self.rival_parts)
        if not len(own_T):
            return None
        prior_N = router.log_prior_correction().detach().double()
        step = float(prior_N.max() - prior_N.min())
        # The gate is α(κa + b), or ακa + b where the dial leaves the prior alone.
        alpha = float(router.budget.weight_alpha) if router.budget.weighs_apart else router.alpha
        N = router.num_experts
        if router.dial == "likelihood":
            step = step / alpha if alpha > 0 else math.inf
        kappa = torch.tensor([self.kappa_min, self.kappa_max], dtype=torch.float64)
        lead_T = own_T * kappa[0] - rival_T * kappa[1]
        gaps = [_gap(own_T, rival_T, kappa, share) for share in LEFT_OUT]
        sure = gaps[0].gap - step
        bounds = [load_cv_bound(alpha, sure, N, method) for method in ("paper", "sharp")]
        load_cv = _cv(self.gate_N)
        return Separation(
            gaps=gaps,
            kappa_min=self.kappa_min,
            kappa_max=self.kappa_max,
            prior_range=step,
            holds=bool(bounds[0].holds),
            leading_tokens=float((lead_T > 0).double().mean()),
            mixture_cv=_cv(self.count_N),
            load_cv=load_cv,
            paper=float(bounds[0].bound) if bool(bounds[0].holds) else None,
            sharp=float(bounds[1].bound) if bool(bounds[1].holds) else None,
            gap_needed=math.log((N - 1) / load_cv) / alpha if load_cv > 0 and alpha > 0 else None,
        )


def _cv(sums_N: Tensor) -> float:
    return float(sums_N.std(correction=0) / sums_N.mean())


def _gap(own_T: Tensor, rival_T: Tensor, kappa: Tensor, left_out: float) -> Gap:
    """Δ when at most a share `left_out` of the tokens may break one of the two limits, half of it each."""
    T = len(own_T)
    spare = min(int(left_out * T / 2), T - 1)
    gamma = float(own_T.kthvalue(1 + spare).values)
    rival = float(rival_T.kthvalue(T - spare).values)
    rho = rival / gamma if gamma > 0 else math.inf
    found = separation_gap(gamma, rho, kappa) if math.isfinite(rho) else None
    return Gap(
        left_out=left_out,
        gamma=gamma,
        rho=rho,
        gap=-kappa[1].item() * rival if found is None else float(found.bound),
        holds=found is not None and bool(found.holds),
    )
