"""Each place where we depart from the paper, and the fact that made us (docs/explanation/mathematics.md)."""

from __future__ import annotations

import math

import pytest
import torch

from grmoe import GrassmannRouter, certificates, geometry
from grmoe.routing import RoutingMetrics


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reported_router(**options: object) -> GrassmannRouter:
    """The 350M router of the paper with its reported concentrations, 0.4 to 4.2."""
    router = GrassmannRouter(768, 8, 48, generator=rng(), **options)  # type: ignore[arg-type]
    with torch.no_grad():
        router.log_kappa.copy_(torch.linspace(0.4, 4.2, 8).log())
    return router.eval()


def measured(router: GrassmannRouter) -> RoutingMetrics:
    router(torch.randn(4000, 768, generator=rng(1)))
    return router.read_metrics()


def test_only_rank_scaling_gives_entropies_like_the_papers() -> None:
    entropy = {
        s: measured(reported_router(scaling=s, prior="uniform")).entropy for s in ("unit", "rms", "rank")
    }
    assert entropy["unit"] > 0.998 * math.log(8)  # uniform
    assert entropy["rms"] < 0.3  # one-hot
    assert 0.8 < entropy["rank"] < 2.0  # the paper reports 1.3


def test_the_papers_prior_favours_high_concentration() -> None:
    paper = measured(reported_router(prior="paper")).gate_load
    assert paper == sorted(paper)  # the higher κ, the more load, on tokens that prefer nobody
    assert paper[0] < 0.03
    assert paper[-1] > 0.3
    uniform = measured(reported_router(prior="uniform")).gate_load
    assert max(uniform) - min(uniform) < 0.2 * (max(paper) - min(paper))


def test_with_a_prior_outside_the_dial_entropy_can_rise() -> None:
    """One expert has the prior, another the energy: on the way from one to the other the gate is undecided."""
    energy, prior = torch.tensor([0.0, 4.0]), torch.tensor([4.0, 0.0])

    def entropy(logits: torch.Tensor) -> float:
        p = torch.softmax(logits, -1)
        return float(-torch.xlogy(p, p).sum())

    assert entropy(1.0 * energy + prior) > entropy(0.0 * energy + prior) + 0.5
    frames = torch.zeros(2, 4, 1)
    frames[0, 0], frames[1, 1] = 1.0, 1.0
    token = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    values = {}
    for dial in ("likelihood", "posterior"):
        router = GrassmannRouter(4, 2, 1, kappa=1.0, init=frames, dial=dial)  # type: ignore[arg-type]
        router.log_prior.copy_(torch.tensor([2.0, -2.0]))
        values[dial] = []
        for alpha in (0.0, 0.5, 1.0, 2.0):
            router.alpha = alpha
            values[dial].append(entropy(router(token).logits[0].detach()))
    assert values["likelihood"][2] > values["likelihood"][0] + 0.3
    assert values["posterior"] == sorted(values["posterior"], reverse=True)


def test_a_diagonal_matrix_in_the_models_coordinates_is_indefinite() -> None:
    """tr(ΛPxxᵀ) with Λ = diag ≥ 0 of size d×d, as printed, is negative for some tokens."""
    U = geometry.haar_frames(6, 2, generator=rng(), dtype=torch.float64)
    Lambda = torch.diag(torch.tensor([4.0, 1, 0, 0, 0, 0], dtype=torch.float64))
    printed = Lambda @ U @ U.T
    assert torch.linalg.eigvalsh((printed + printed.T) / 2)[0] < -0.1
    in_frame = U @ torch.diag(torch.tensor([4.0, 1], dtype=torch.float64)) @ U.T
    assert torch.linalg.eigvalsh(in_frame)[0] > -1e-12


def test_the_amortiser_that_costs_half_a_percent_reads_affinities() -> None:
    def share(**options: object) -> float:
        router = reported_router(**options)
        return sum(p.numel() for p in router.amortizer_net.parameters()) / router.frames.numel()

    assert share(amortizer="affinity") < 0.005
    assert share(amortizer="input", amortizer_hidden=1) < 0.005
    assert share(amortizer="input", amortizer_hidden=2) > 0.005


def test_the_amortiser_does_not_keep_the_mean_logit() -> None:
    """Σh = N, and yet the mean logit falls or rises with the expert h prefers."""
    router = reported_router(amortizer="affinity", prior="paper")
    x = torch.randn(500, 768, generator=rng(3))
    ratio = {}
    for expert in (0, 7):  # the least and the most concentrated
        with torch.no_grad():
            router.amortizer_net[2].bias.copy_(3.0 * (torch.arange(8) == expert))  # type: ignore[operator,union-attr]
            plain = (router.kappa * router.energies(x)).mean(-1)
            ratio[expert] = float((router(x).logits.mean(-1) / plain).mean())
    assert ratio[0] < 0.6
    assert ratio[7] > 1.4


def test_chordal_and_geodesic_distance_order_subspaces_differently() -> None:
    """So they are not monotone functions of each other, as the paper has it."""
    # Mixed in scale: frames near each other in some directions and far in others.
    base = geometry.haar_frames(8, 3, (600, 3), generator=rng(4), dtype=torch.float64)
    a, b, c = base.unbind(1)
    tilt = torch.rand(600, 1, 3, generator=rng(5), dtype=torch.float64) * 3
    b, c = geometry.orthonormalize(a + tilt * b), geometry.orthonormalize(a + tilt.flip(0) * c)
    chordal = geometry.chordal_distance(a, b) < geometry.chordal_distance(a, c)
    geodesic = geometry.geodesic_distance(a, b) < geometry.geodesic_distance(a, c)
    disagree = float((chordal != geodesic).double().mean())
    assert 0.005 < disagree < 0.3


def test_the_collapse_theorem_is_silent_at_the_reported_values() -> None:
    gap = certificates.separation_gap(1.0, 0.28, torch.tensor([0.4, 2.1, 4.2]))
    assert not bool(gap.holds)
    bound = certificates.load_cv_bound(1.0, gap.bound, 8)
    assert not bool(bound.holds)
    assert float(bound.bound) == pytest.approx(math.sqrt(7))  # the trivial one
