"""The Grassmann gate against the paper's equations, Bayes' rule, and the geometry it claims to respect."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grmoe import geometry
from grmoe.bingham import log_kummer, log_kummer_reference, log_normalizer
from grmoe.certificates import entropy_bounds_from_range
from grmoe.optim import GrassmannAdam
from grmoe.optim.projected import ProjectedAdam
from grmoe.routing import GrassmannRouter, grassmann_logits_reference, update_priors
from grmoe.routing.amortizer import amortize

F64 = torch.float64
D, N, K = 10, 4, 3
CONCENTRATIONS = ("scalar", "diagonal")
SCALINGS = ("rank", "unit", "rms")
PRIORS = ("balanced", "uniform", "paper")
SCALE = {"rank": D / K, "unit": 1.0, "rms": float(D)}
NORM = {"rank": math.sqrt(D), "unit": 1.0, "rms": math.sqrt(D)}
AMORTIZERS = (None, "affinity", "input", "matrix")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(seed: int = 0, *, dtype: torch.dtype = F64, **options: Any) -> GrassmannRouter:
    """A router whose every parameter is random: concentrations, prior, linear term, amortiser."""
    g = rng(seed)
    router = GrassmannRouter(D, N, K, generator=g, **options).to(dtype)
    with torch.no_grad():
        router.log_kappa.copy_(torch.randn(router.log_kappa.shape, generator=g))
        if router.mu is not None:
            router.mu.copy_(0.5 * torch.randn(N, D, generator=g))
        if router.amortizer is not None:
            for parameter in router.amortizer_net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=g) / parameter.shape[-1] ** 0.5)
        if router.prior == "balanced":
            router.log_prior.copy_(torch.randn(N, generator=g))
    return router


def tokens(count: int = 20, seed: int = 1, dtype: torch.dtype = F64) -> Tensor:
    return (torch.randn(count, D, generator=rng(seed), dtype=F64) * 3).to(dtype)


def unit(x: Tensor) -> Tensor:
    return x.double() / x.double().norm(dim=-1, keepdim=True)


def seen(router: GrassmannRouter, x: Tensor) -> Tensor:
    """The token as the gate sees it: of length one, or as it is."""
    return x.double() if router.scaling == "raw" else unit(x)


def network(router: GrassmannRouter, x_D: Tensor) -> Tensor:
    """W₂ GELU(W₁ f + b₁) + b₂ of one token, in fp64. f: the token, or its energies."""
    first, second = router.amortizer_net[0], router.amortizer_net[2]
    W1, b1, W2, b2 = (p.detach().double() for p in (first.weight, first.bias, second.weight, second.bias))
    features = x_D.double()
    if router.amortizer == "affinity":
        y = seen(router, x_D)
        features = torch.stack(
            [router.energy_scale * (U.double().T @ y).square().sum() for U in router.frames]
        )
    hidden = W1 @ features + b1
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    return (W2 @ hidden + b2).detach()


def multipliers(router: GrassmannRouter, x: Tensor) -> Tensor | None:
    """h = N·softmax(MLP) of eq:amortized, one token at a time, in fp64."""
    if router.amortizer is None:
        return None
    return torch.stack([N * torch.softmax(network(router, row), -1) for row in x])


def expected(router: GrassmannRouter, x: Tensor, scaling: str, alpha: float) -> Tensor:
    """The gate by loops over tokens and experts, in fp64; the matrix amortiser by a loop over pairs too."""
    options = {"alpha": alpha, "scale": SCALE.get(scaling, 1.0)}
    plain = grassmann_logits_reference(seen(router, x), router.frames, router.kappa, **options).detach()
    if router.amortizer != "matrix":
        h_TN = multipliers(router, x)
        return plain if h_TN is None else h_TN * plain
    out = torch.zeros_like(plain)
    for t, row in enumerate(x):
        share = torch.softmax(network(router, row), -1)
        for e, j in itertools.product(range(N), range(N)):
            out[t, e] += (2 * N * share[e * N + j] - 1 / N) * plain[t, j]
    return out


def entropy(logits: Tensor) -> Tensor:
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


# ------------------------------------------------------------------------------------- the paper's equations


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("scaling", [*SCALINGS, "raw"])
@pytest.mark.parametrize("amortizer", AMORTIZERS)
@pytest.mark.parametrize("concentration", CONCENTRATIONS)
def test_gate_is_the_papers(
    concentration: str, amortizer: str | None, scaling: str, dtype: torch.dtype
) -> None:
    options = {"concentration": concentration, "amortizer": amortizer, "scaling": scaling}
    router = make(dtype=dtype, prior="paper", alpha=2.5, **options)
    x = tokens(dtype=dtype)
    reference = expected(router, x, scaling, 2.5)
    routing = router(x)
    # Some twenty roundings a logit, relative to the largest of them: the sum of squares does not cancel.
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    error = (routing.logits.double() - reference).abs().max() / reference.abs().max().clamp(min=1.0)
    assert float(error.detach()) <= tolerance
    # Probabilities feel the absolute error of the logits.
    bound = tolerance * max(1.0, float(reference.abs().max()))
    torch.testing.assert_close(routing.probs.double(), reference.softmax(-1), rtol=0, atol=bound)
    assert float(reference.std(-1).min()) > 1e-3  # and there is something to get wrong


def test_trace_with_explicit_matrices() -> None:
    """tr(Λ_e P_e xxᵀ) with d×d matrices, Λ_e = κ_e I (eq:grmoe_gating, eq:grmoe_scalar)."""
    router = make(prior="paper", scaling="unit")
    x = tokens()
    want = torch.empty(len(x), N, dtype=F64)
    for t, e in itertools.product(range(len(x)), range(N)):
        U, y = router.frames[e].detach(), unit(x[t])
        want[t, e] = torch.trace(
            router.kappa[e].detach() * torch.eye(D, dtype=F64) @ U @ U.T @ torch.outer(y, y)
        )
    torch.testing.assert_close(router(x).logits.detach(), want, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        grassmann_logits_reference(unit(x), router.frames, router.kappa).detach(), want, rtol=0, atol=1e-12
    )


def test_fp64_tokens_in_an_fp32_router() -> None:
    router = make(dtype=torch.float32, prior="paper", alpha=0.5)
    x = tokens()
    reference = grassmann_logits_reference(unit(x), router.frames, router.kappa, alpha=0.5, scale=D / K)
    torch.testing.assert_close(router(x).logits, reference, rtol=0, atol=1e-12)


def test_energies() -> None:
    router = make()
    x = tokens()
    a = router.energies(x)
    want = torch.stack([D / K * (unit(x) @ U).square().sum(-1) for U in router.frames], -1)
    torch.testing.assert_close(a, want, rtol=0, atol=1e-12)
    weight = torch.rand(N, K, generator=rng(3), dtype=F64)
    want = torch.stack([D / K * ((unit(x) @ router.frames[e]).square() @ weight[e]) for e in range(N)], -1)
    torch.testing.assert_close(router.energies(x, weight), want, rtol=0, atol=1e-12)
    # Mean one under random frames, which is what makes κ comparable across ranks: 4 standard errors.
    many = (
        GrassmannRouter(64, 512, 8, generator=rng(4)).energies(torch.randn(8, 64, generator=rng(5))).detach()
    )
    assert float(many.mean()) == pytest.approx(1.0, abs=4 * float(many.std()) / math.sqrt(many.numel()))


def test_amortizer_starts_at_one() -> None:
    x = tokens(dtype=torch.float32)
    for amortizer in ("affinity", "input", "matrix"):
        plain = GrassmannRouter(D, N, K, generator=rng(), init="identity")
        amortized = GrassmannRouter(D, N, K, generator=rng(), init="identity", amortizer=amortizer)  # type: ignore[arg-type]
        torch.testing.assert_close(amortized(x).logits, plain(x).logits, rtol=1e-6, atol=1e-6)
    small = GrassmannRouter(D, N, K, amortizer="input", amortizer_hidden=7)
    assert small.amortizer_net[0].weight.shape == (7, D)
    assert GrassmannRouter(D, N, K, amortizer="affinity").amortizer_net[0].weight.shape == (64, N)


def test_the_matrix_amortiser_can_do_what_h_does() -> None:
    """softmax(MLP) = diag(h)/2N + 11ᵀ/2N² gives H = diag(h); and all entries of H sum to N, whatever the network."""
    x = tokens(1)
    h_router, router = make(amortizer="input", prior="paper"), make(amortizer="matrix", prior="paper")
    h = multipliers(h_router, x)
    assert h is not None
    with torch.no_grad():
        router.log_kappa.copy_(h_router.log_kappa)
        router.frames.copy_(h_router.frames)
        ones = torch.ones(N, N, dtype=F64)
        energies = router.energies(x)[0].detach()
        unit_NN = torch.stack(
            [amortize("matrix", network(router, x[0]), row) for row in torch.eye(N).double()]
        )
        assert float(unit_NN.sum()) == pytest.approx(N, abs=1e-12)
        assert float(unit_NN.min()) >= -1 / N
        router.amortizer_net[2].weight.zero_()
        share = torch.diag(h[0]) / (2 * N) + ones / (2 * N**2)
        router.amortizer_net[2].bias.copy_(share.log().flatten())
    torch.testing.assert_close(router(x).logits, h_router(x).logits, rtol=0, atol=1e-11)
    assert float(energies.std()) > 0.1


def test_kappa_and_initial_frames() -> None:
    router = GrassmannRouter(D, N, K, kappa=2.5)
    torch.testing.assert_close(router.kappa, torch.full((N,), 2.5))
    assert GrassmannRouter(D, N, K, concentration="diagonal").kappa.shape == (N, K)
    haar = GrassmannRouter(D, N, K, generator=rng(3))
    assert torch.equal(haar.frames, geometry.haar_frames(D, K, N, generator=rng(3)))
    assert torch.equal(GrassmannRouter(D, N, K, init="identity").frames, geometry.identity_frames(D, K, N))
    own = geometry.pca_frames(torch.randn(50, D, generator=rng(4)), K, N, generator=rng(5))
    router = GrassmannRouter(D, N, K, init=own)
    assert torch.equal(router.frames, own)
    assert router.frames.data_ptr() != own.data_ptr()
    assert router.frames.is_contiguous()


@pytest.mark.parametrize("scaling", ["rank", "raw"])
def test_frames_from_tokens(scaling: str) -> None:
    """Each expert takes the best subspace of its half of the tokens. Lengths count under "raw" alone."""
    g = rng(3)
    spread = torch.tensor([5.0, 4.0, 3.0] + [0.1] * (D - 3), dtype=F64)
    x = torch.randn(2, 200, D, generator=g, dtype=F64) * spread
    x[0, 0] = 1e4 * torch.eye(D)[-1]  # one token of great length in the last direction
    router = make(scaling=scaling, prior="paper", init="pca")
    assert torch.equal(
        router.frames, GrassmannRouter(D, N, K, generator=rng()).frames.double()
    )  # Haar until then
    assert router.awaits_tokens
    router.initialize_from(x, rng(4))
    assert not router.awaits_tokens
    rows = x.flatten(0, 1) if scaling == "raw" else unit(x.flatten(0, 1))
    want = geometry.pca_frames(rows, K, N, generator=rng(4))
    torch.testing.assert_close(router.frames.detach(), want, rtol=0, atol=1e-12)
    has_long = (want[:, -1].abs().amax(-1) > 0.99).sum()
    assert has_long >= 1 if scaling == "raw" else has_long == 0
    assert float(geometry.chordal_distance(want[0], want[1])) > 1e-6  # different halves
    with pytest.raises(ValueError, match=r"x must have shape \(..., 10\)"):
        router.initialize_from(torch.zeros(4, 3))
    with pytest.raises(
        ValueError, match=r"at least rank = \d rows, got 1"
    ):  # one token alone has no other axis
        router.initialize_from(torch.zeros(D))


# ----------------------------------------------------------------------------------------- prior and Bayes


@pytest.mark.parametrize("scaling", SCALINGS)
def test_uniform_prior_subtracts_kummer(scaling: str) -> None:
    router, bare = make(prior="uniform", scaling=scaling), make(prior="paper", scaling=scaling)
    for e in range(N):
        kappa = mpmath.mpf(float(router.kappa[e].detach())) * SCALE[scaling]
        want = float(mpmath.log(mpmath.hyp1f1(mpmath.mpf(K) / 2, mpmath.mpf(D) / 2, kappa)))
        assert -float(router.log_prior_correction()[e].detach()) == pytest.approx(want, abs=1e-12)
        assert float(log_kummer(K, D, float(kappa))) == pytest.approx(want, abs=1e-12)
    x = tokens()
    torch.testing.assert_close(
        router(x).logits, bare(x).logits + router.log_prior_correction(), rtol=0, atol=1e-12
    )
    assert torch.equal(bare.log_prior_correction(), torch.zeros(N, dtype=F64))


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_uniform_prior_of_small_subspaces_in_a_wide_model(rank: int) -> None:
    """With few directions of 768 the normaliser takes off near κ·d/k = d/2, where rank one starts."""
    router = GrassmannRouter(768, 8, rank, prior="uniform", generator=rng()).double()
    with torch.no_grad():
        router.log_kappa.copy_(torch.linspace(0.4, 2.0, 8).mul(rank / 2).log())
    found = -router.log_prior_correction().detach()
    want = [log_kummer_reference(rank, 768, 768 / rank * kappa) for kappa in router.kappa.tolist()]
    torch.testing.assert_close(found, torch.tensor(want, dtype=F64), rtol=1e-11, atol=1e-11)


def test_uniform_prior_of_a_diagonal_concentration() -> None:
    router = make(prior="uniform", concentration="diagonal")
    for e in range(N):
        spectrum = torch.cat([D / K * router.kappa[e].detach(), torch.zeros(D - K, dtype=F64)])
        want = log_normalizer(spectrum, [1] * D)
        torch.testing.assert_close(-router.log_prior_correction()[e].detach(), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("concentration", CONCENTRATIONS)
@pytest.mark.parametrize("rank", [2, 5])
def test_each_expert_states_a_density(concentration: str, linear: bool, scaling: str, rank: int) -> None:
    """exp(score − log Z) averages to one over the sphere: the gate is Bayes' rule for real likelihoods."""
    d = 5
    router = GrassmannRouter(
        d,
        3,
        rank,
        concentration=concentration,
        linear=linear,
        scaling=scaling,
        prior="uniform",
        generator=rng(),
    ).double()  # type: ignore[arg-type]
    with torch.no_grad():
        shape = router.log_kappa.shape
        router.log_kappa.copy_(torch.randn(shape, generator=rng(1)) * 0.3 - math.log(router.energy_scale))
        if router.mu is not None:
            router.mu.copy_(torch.randn(3, d, generator=rng(2)) / router.token_norm)
        x = torch.randn(100_000, d, generator=rng(3), dtype=F64)
        density = torch.exp(router.scores(x) + router.log_prior_correction())
    error = density.std(0) / math.sqrt(len(x))
    # At k = d the scalar energy is constant and what is left is the fp32 rounding of the frames.
    assert bool(((density.mean(0) - 1).abs() < 4 * error + 1e-6).all())
    assert float(error.max()) < 0.02


def test_fisher_bingham_normaliser_against_an_explicit_split() -> None:
    router = make(prior="uniform", linear=True, concentration="diagonal")
    assert router.mu is not None
    for e in range(N):
        U, mu = router.frames[e].detach().double(), math.sqrt(D) * router.mu[e].detach()
        inside = mu @ U
        outside = (mu - U @ inside).norm()
        spectrum = torch.cat([D / K * router.kappa[e].detach(), torch.zeros(1, dtype=F64)])
        want = log_normalizer(spectrum, [1] * K + [D - K], torch.cat([inside.abs(), outside.view(1)]))
        # The frames are orthonormal to fp32 only, and the two splits spend that error differently.
        torch.testing.assert_close(-router.log_prior_correction()[e].detach(), want, rtol=0, atol=1e-5)


def test_balanced_prior_and_both_dials() -> None:
    x = tokens()
    b = torch.tensor([1.0, -0.5, 0.0, -0.5], dtype=F64)
    for dial in ("posterior", "likelihood"):
        router = make(dial=dial)
        router.log_prior.copy_(b)
        for alpha in (0.0, 0.5, 2.0):
            router.alpha = alpha
            scores = router.scores(x)
            want = alpha * (scores + b) if dial == "posterior" else alpha * scores + b
            torch.testing.assert_close(router(x).logits, want, rtol=0, atol=1e-12)
    router.alpha = 0.0  # the likelihood is switched off, the prior is left
    torch.testing.assert_close(router(x).probs, b.softmax(-1).expand(len(x), N), rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------ geometry


def test_scalar_gate_sees_subspaces_only() -> None:
    O = geometry.haar_frames(K, K, N, generator=rng(7), dtype=F64)
    x = tokens()
    for concentration, options in itertools.product(
        CONCENTRATIONS,
        ({}, {"prior": "uniform"}, {"linear": True, "prior": "uniform"}, {"amortizer": "affinity"}),
    ):
        router = make(concentration=concentration, **options)
        before = router(x).probs.detach()
        with torch.no_grad():
            router.frames.copy_(router.frames @ O)
        change = float((router(x).probs.detach() - before).abs().max())
        assert change <= 1e-12 if concentration == "scalar" else change > 1e-2


def test_equal_diagonal_is_scalar() -> None:
    scalar, diagonal = make(prior="uniform"), make(prior="uniform", concentration="diagonal")
    with torch.no_grad():
        diagonal.log_kappa.copy_(scalar.log_kappa.unsqueeze(-1).expand(N, K))
    torch.testing.assert_close(diagonal(tokens()).logits, scalar(tokens()).logits, rtol=0, atol=1e-11)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scale_invariance(scaling: str, linear: bool) -> None:
    for dtype, tolerance in ((F64, 1e-11), (torch.float32, 1e-5)):
        router = make(dtype=dtype, scaling=scaling, linear=linear)
        x = tokens(dtype=dtype)
        logits = router(x).logits
        size = float(logits.detach().abs().max())
        for factor in (1e-3, 7.0, 1e6):
            torch.testing.assert_close(router(factor * x).logits, logits, rtol=0, atol=tolerance * size)
    signed = (router(-x).logits - logits).abs().max()
    assert (float(signed.detach()) > 0.1) == linear  # energies are even in x, the linear term is not


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("amortizer", AMORTIZERS)
def test_zero_token_routes_by_the_prior(prior: str, linear: bool, amortizer: str | None) -> None:
    router = make(prior=prior, linear=linear, amortizer=amortizer, alpha=1.5)
    x = tokens(6)
    x[2] = 0.0
    x.requires_grad_()
    routing = router(x)
    assert torch.equal(routing.logits[2], 1.5 * router.log_prior_correction())
    likelihood = router.scores(x)[2]
    assert torch.equal(likelihood, torch.zeros(N, dtype=F64))
    (gradient,) = torch.autograd.grad(routing.logits.square().sum(), x, retain_graph=True)
    assert torch.equal(gradient[2], torch.zeros(D, dtype=F64))
    assert bool(torch.isfinite(gradient).all())
    assert float(gradient[3].abs().max()) > 0
    parameters = list(router.parameters())
    for value in torch.autograd.grad(likelihood.sum(), parameters, allow_unused=True):
        assert value is None or torch.equal(value, torch.zeros_like(value))


@pytest.mark.parametrize("linear", [False, True])
def test_raw_tokens_keep_their_length(linear: bool) -> None:
    """ℓ(sx) = s²κa + s·μᵀx: longer tokens get sharper gates. At length √d raw is "rms", at length one "unit"."""
    router = make(scaling="raw", prior="paper", linear=linear)
    x = tokens()
    energy = router.kappa * router.energies(x)
    term = 0.0 if router.mu is None else x @ router.mu.T
    for s in (0.0, 0.5, 3.0):
        torch.testing.assert_close(router(s * x).logits, s**2 * energy + s * term, rtol=0, atol=1e-11)
    for scaling, length in (("unit", 1.0), ("rms", math.sqrt(D))):
        other = make(scaling=scaling, prior="paper", linear=linear)
        torch.testing.assert_close(
            router(length * unit(x)).logits, other(x).logits, rtol=0, atol=1e-11, msg=scaling
        )


# ------------------------------------------------------------------------------------------ Fisher–Bingham


def test_no_energy_is_the_linear_gate() -> None:
    router = make(linear=True, prior="paper")
    assert router.mu is not None
    with torch.no_grad():
        router.log_kappa.fill_(-math.inf)
    x = tokens()
    want = (math.sqrt(D) * unit(x)) @ router.mu.T
    torch.testing.assert_close(router(x).logits, want, rtol=0, atol=1e-13)
    # Not merely close: the energies contribute exact zeros.
    norm = x.square().sum(-1, keepdim=True).sqrt()
    assert torch.equal(router.scores(x), math.sqrt(D) * (x @ router.mu.T) / norm)


def test_no_linear_term_is_the_papers_gate() -> None:
    for prior in PRIORS:
        bare, with_mu = make(prior=prior), make(prior=prior, linear=True)
        with torch.no_grad():
            with_mu.mu.zero_()  # type: ignore[union-attr]
            with_mu.log_prior.copy_(bare.log_prior)
        torch.testing.assert_close(with_mu(tokens()).logits, bare(tokens()).logits, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------- the dial


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    prior=st.sampled_from(PRIORS),
    concentration=st.sampled_from(CONCENTRATIONS),
    low=st.floats(0, 20),
    step=st.floats(0, 20),
)
def test_entropy_falls_with_alpha(seed: int, prior: str, concentration: str, low: float, step: float) -> None:
    router = make(seed, prior=prior, concentration=concentration, linear=seed % 2 == 0)
    x = tokens(8, seed=seed + 1)
    router.alpha = low
    before = entropy(router(x).logits)
    router.alpha = low + step
    after = entropy(router(x).logits)
    assert bool((after <= before + 1e-12).all())
    if low == 0:
        torch.testing.assert_close(before, torch.full_like(before, math.log(N)))


@pytest.mark.parametrize("alpha", [0.0, 0.7, 2.5])
def test_entropy_falls_at_the_rate_of_the_variance(alpha: float) -> None:
    """dH/dα = −α·Var(s), the variance of the scores under the gate: the step of the proof of Theorem 1."""
    scores = make()(tokens(64)).logits.detach()
    dial = torch.tensor(alpha, dtype=scores.dtype, requires_grad=True)
    gates = torch.softmax(dial * scores, -1)
    entropy(dial * scores).sum().backward()
    mean = (gates * scores).sum(-1, keepdim=True)
    variance = (gates * (scores - mean).square()).sum(-1)
    assert dial.grad is not None
    torch.testing.assert_close(dial.grad, -alpha * variance.sum().detach())


@pytest.mark.parametrize("prior", PRIORS)
def test_limits_of_the_dial(prior: str) -> None:
    router = make(prior=prior)
    x = tokens()
    best = router(x).logits.argmax(-1)
    router.alpha = 0.0
    assert torch.equal(router(x).probs, torch.full((len(x), N), 1 / N, dtype=F64))
    router.alpha = 1e4
    torch.testing.assert_close(router(x).probs, torch.eye(N, dtype=F64)[best], rtol=0, atol=1e-9)


# -------------------------------------------------------------------------------------------- certificates


def worst_range(router: GrassmannRouter, steps: int = 150) -> tuple[float, float]:
    """The largest logit range found by ascent from random and from extreme tokens; and the least entropy met."""
    A = torch.einsum(
        "ndk,nk,nek->nde", router.frames, router.kappa.view(N, -1).expand(N, K), router.frames
    ).detach()
    starts = [torch.linalg.eigh(A[i] - A[j]).eigenvectors.T for i in range(N) for j in range(i)]
    x = torch.cat([*starts, tokens(200), *([router.mu.detach()] if router.mu is not None else [])])
    x = unit(x).requires_grad_()
    widest, lowest = 0.0, math.inf
    for _ in range(steps):
        logits = router(x).logits
        ranges = logits.amax(-1) - logits.amin(-1)
        widest = max(widest, float(ranges.detach().max()))
        lowest = min(lowest, float(entropy(logits.detach()).min()))
        (gradient,) = torch.autograd.grad(ranges.sum(), x)
        step = gradient / gradient.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        x = unit(x.detach() + 0.05 * step).requires_grad_()
    return widest, lowest


@pytest.mark.parametrize("concentration", CONCENTRATIONS)
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize(
    ("prior", "dial", "alpha"),
    [
        ("paper", "posterior", 1.0),
        ("uniform", "posterior", 0.6),
        ("balanced", "likelihood", 0.4),
        ("balanced", "likelihood", 0.0),
    ],
)
def test_logit_range_holds_for_every_token(
    concentration: str, linear: bool, prior: str, dial: str, alpha: float
) -> None:
    router = make(2, concentration=concentration, linear=linear, prior=prior, dial=dial, alpha=alpha)
    with torch.no_grad():  # orthonormal to fp64, so that nothing but the bound is tested
        router.frames.copy_(geometry.orthonormalize(router.frames))
    certificate = router.logit_range()
    assert bool(certificate.holds)
    bound = float(certificate.bound)
    widest, lowest = worst_range(router)
    assert widest <= bound * (1 + 1e-9)
    # Every logit is bounded, so no token is more decided than the range allows.
    floor = float(entropy_bounds_from_range(bound, N).lower.bound)
    assert floor > 0
    assert lowest >= floor - 1e-9
    if not linear:  # without a linear term, and for every dial, some token attains it
        assert widest >= bound * (1 - 1e-6)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_logit_range_of_the_linear_term(scaling: str) -> None:
    """Without energies the range is √d·max‖μ_i − μ_j‖ (no √d under "unit"), and the difference attains it."""
    router = make(linear=True, prior="paper", scaling=scaling, alpha=0.5)
    assert router.mu is not None
    with torch.no_grad():
        router.log_kappa.fill_(-math.inf)
        apart = torch.stack([router.mu[i] - router.mu[j] for i in range(N) for j in range(i)])
        logits = router(apart).logits
    bound = router.logit_range().bound
    torch.testing.assert_close(bound, 0.5 * NORM[scaling] * apart.norm(dim=-1).max(), rtol=1e-12, atol=0)
    torch.testing.assert_close(bound, (logits.amax(-1) - logits.amin(-1)).max(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize(("concentration", "rank"), [("scalar", K), ("diagonal", K), ("diagonal", D)])
def test_logit_range_of_raw_tokens_needs_their_length(concentration: str, rank: int, linear: bool) -> None:
    g = rng(5)
    router = GrassmannRouter(
        D, N, rank, generator=g, concentration=concentration, scaling="raw", linear=linear, alpha=0.75
    ).double()  # type: ignore[arg-type]
    with torch.no_grad():
        router.frames.copy_(geometry.orthonormalize(router.frames))
        router.log_kappa.copy_(torch.randn(router.log_kappa.shape, generator=g))
        router.log_prior.copy_(torch.randn(N, generator=g) * 3)
        if router.mu is not None:
            router.mu.copy_(torch.randn(N, D, generator=g))
    silent = router.logit_range()
    assert not bool(silent.holds)
    assert float(silent.bound) == math.inf
    assert silent.hypothesis.endswith("a known norm of x")
    x = unit(torch.randn(3000, D, generator=g, dtype=F64))
    for norm in (0.0, 0.5, 4.0):
        certificate = router.logit_range(norm=norm)
        assert bool(certificate.holds)
        logits = router(norm * torch.rand(3000, 1, generator=g, dtype=F64) * x).logits.detach()
        assert float((logits.amax(-1) - logits.amin(-1)).max()) <= float(certificate.bound) * (1 + 1e-9)
    assert float(router.logit_range(norm=4.0).bound) > float(router.logit_range(norm=0.5).bound)
    assert float(router.logit_range(norm=0.0).bound) == pytest.approx(
        0.75 * float(router.log_prior.max() - router.log_prior.min()), rel=1e-9
    )


def test_logit_range_is_silent_about_amortisers() -> None:
    certificate = make(amortizer="affinity").logit_range()
    assert not bool(certificate.holds)
    assert float(certificate.bound) == math.inf


# ----------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize(("scaling", "prior"), [("rank", "uniform"), ("raw", "paper")])
@pytest.mark.parametrize("amortizer", AMORTIZERS)
@pytest.mark.parametrize("concentration", CONCENTRATIONS)
def test_every_parameter_learns(concentration: str, amortizer: str | None, scaling: str, prior: str) -> None:
    router = make(concentration=concentration, amortizer=amortizer, linear=True, scaling=scaling, prior=prior)
    if scaling == "raw":  # a one-hot gate teaches nobody
        with torch.no_grad():
            router.log_kappa.clamp_(max=-1.0)
    weights = torch.randn(20, N, generator=rng(8), dtype=F64)
    (router(tokens()).weights * weights).sum().backward()
    for name, parameter in router.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
        experts = (
            parameter.grad.abs().flatten(1).amax(-1)
            if name in ("frames", "mu")
            else parameter.grad.abs().amax()
        )
        assert bool((experts > 0).all()), name


@pytest.mark.parametrize(
    "options",
    [
        {"prior": "paper"},
        {"prior": "uniform"},
        {"prior": "uniform", "concentration": "diagonal", "linear": True},
        {"amortizer": "affinity", "amortizer_hidden": 4},
        {"amortizer": "matrix", "amortizer_hidden": 4},
        {"scaling": "raw", "prior": "paper"},
        {
            "scaling": "raw",
            "concentration": "diagonal",
            "linear": True,
            "amortizer": "input",
            "amortizer_hidden": 3,
        },
    ],
    ids=str,
)
def test_gradients_are_right(options: dict[str, Any]) -> None:
    router = make(**options).eval()
    names = [name for name, _ in router.named_parameters()]
    values = tuple(p.detach().clone().requires_grad_() for p in router.parameters())
    x = tokens(3).requires_grad_()

    def logits(x: Tensor, *parameters: Tensor) -> Tensor:
        state = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(router, state, (x,)).logits

    assert torch.autograd.gradcheck(logits, (x, *values))


def test_uniform_prior_is_differentiable_at_mu_zero() -> None:
    router = GrassmannRouter(D, N, K, linear=True, prior="uniform", generator=rng())
    router(tokens(dtype=torch.float32)).logits[:, 0].sum().backward()
    assert router.mu is not None
    assert router.mu.grad is not None
    assert bool(torch.isfinite(router.mu.grad).all())
    assert float(router.mu.grad[0].abs().max()) > 0


def test_frames_that_a_foreign_optimiser_moved_are_retracted() -> None:
    """transformers' Trainer calls `train()` before each step. Its AdamW would leave the manifold step by step."""
    router = GrassmannRouter(16, 4, 3)
    optimizer = torch.optim.AdamW(router.parameters(), lr=1e-2)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        router.train().train()  # as it was made
    for _ in range(2):
        router(x).probs[:, 0].sum().backward()
        optimizer.step()
        moved = router.frames.detach().clone()
        assert geometry.orthonormality_error(moved) > 1e-3
        with pytest.warns(UserWarning, match=r"optimizers=\(grmoe\.ModelOptimizer\(model, lr=3e-4\), None\)"):
            router.train()
        assert geometry.orthonormality_error(router.frames.detach()) < 1e-6
        # Nearest: the same subspaces as where the optimiser went.
        assert geometry.principal_angles(geometry.orthonormalize(moved), router.frames.detach()).max() < 1e-3
    # Switching modes changes nothing: what was loaded stays as it is.
    with torch.no_grad():
        router.frames.mul_(1.1)
    loaded = router.frames.detach().clone()
    router.eval().train()
    assert torch.equal(router.frames, loaded)


@pytest.mark.parametrize("fused", [False, True])
def test_in_a_loop_of_ones_own_updating_the_prior_retracts(fused: bool) -> None:
    """Such a loop calls `train()` once at most. PyTorch's fused optimisers leave no trace on what they write."""
    router = GrassmannRouter(16, 4, 3).train()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    foreign = torch.optim.AdamW(router.parameters(), lr=1e-2, fused=fused)
    for _ in range(3):
        router(x).probs[:, 0].sum().backward()
        foreign.step()
        assert geometry.orthonormality_error(router.frames.detach()) > 1e-3
        with pytest.warns(UserWarning, match="off their manifold"):
            update_priors([router], 0.01)
        assert geometry.orthonormality_error(router.frames.detach()) < 1e-6


@pytest.mark.parametrize("kind", [GrassmannAdam, ProjectedAdam])
def test_frames_of_grmoes_own_optimisers_are_not_looked_at(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking waits for the device."""
    router = GrassmannRouter(16, 4, 3).train()
    optimizer = kind([router.frames])
    monkeypatch.setattr(GrassmannRouter, "retract", lambda _: pytest.fail("looked at the frames"))
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        router(x).probs[:, 0].sum().backward()
        optimizer.step()
        update_priors([router], 0.01)


def test_the_first_concentration_follows_the_rank() -> None:
    """Energies of random subspaces differ by about √(2/k): with κ = √k/2, logits differ by 1/√2 at every rank."""
    torch.manual_seed(0)
    x = torch.randn(4000, 256)
    for rank in (4, 16, 64):
        router = GrassmannRouter(256, 8, rank)
        assert float(router.kappa[0]) == pytest.approx(rank**0.5 / 2)
        spread = float(router(x).logits.std())
        assert 0.55 < spread < 0.75
    assert float(GrassmannRouter(32, 4, 16, scaling="unit").kappa[0]) == pytest.approx(1.5)


def test_logit_range_holds_for_a_token_of_zeros() -> None:
    """With frames of full rank every unit token has all its energy in each of them, and a token of zeros has none."""
    router = GrassmannRouter(4, 2, 4)
    with torch.no_grad():
        router.log_kappa.copy_(torch.tensor([1.0, 2.0]).log())
        router.log_prior.copy_(torch.tensor([0.5, -0.5]))
    logits = router(torch.zeros(1, 4)).logits
    assert float(router.logit_range().bound) >= float(logits.max() - logits.min()) - 1e-6


def test_logit_range_is_at_the_alpha_of_the_weights() -> None:
    router = GrassmannRouter(16, 4, 4)
    router.budget.set_weight_alpha(50.0)
    logits = router(torch.randn(30, 16)).logits
    assert float(router.logit_range().bound) >= float((logits.amax(-1) - logits.amin(-1)).max())
