"""Every certificate against the truth: random search for violations, and the cases that attain it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grmoe import certificates as C
from grmoe.geometry import haar_frames

F64 = torch.float64
TOL = 1e-9
BATCH = 1000
EXAMPLES = 120
KINDS = ("gaussian", "heavy", "two-valued", "ties", "one-each", "constant")


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rand(*shape: int, g: torch.Generator) -> Tensor:
    return torch.rand(*shape, generator=g, dtype=F64)


def randn(*shape: int, g: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=F64)


def entropy(logits: Tensor) -> Tensor:
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def draw_logits(kind: str, N: int, scale: float, g: torch.Generator) -> Tensor:
    """BATCH logit sets of one shape, typical size `scale`, at a random offset."""
    normal = randn(BATCH, N, g=g)
    if kind == "heavy":  # Student t, 1 degree of freedom
        normal = (normal / randn(BATCH, N, g=g)).clamp(-1e3, 1e3)
    elif kind == "two-valued":
        normal = (rand(BATCH, N, g=g) < rand(BATCH, 1, g=g)).to(F64)
    elif kind == "ties":
        normal = normal.round()
    elif kind == "one-each":  # one at the top, one at the bottom, the rest at one level in between
        normal = rand(BATCH, 1, g=g).repeat(1, N)
        normal[:, 0], normal[:, -1] = 1.0, 0.0
    elif kind == "constant":
        normal = torch.zeros(BATCH, N, dtype=F64)
    return scale * normal + 10 * randn(BATCH, 1, g=g)


def over_logits(check: Callable[[Tensor, torch.Generator], None]) -> None:
    """Run `check` on EXAMPLES batches; at least 1e5 logit sets in all."""
    seen = 0

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
    @given(
        seed=st.integers(0, 2**31 - 1),
        N=st.integers(2, 48),
        log10_scale=st.floats(-4, 4),
        kind=st.sampled_from(KINDS),
    )
    def run(seed: int, N: int, log10_scale: float, kind: str) -> None:
        nonlocal seen
        g = rng(seed)
        logits = draw_logits(kind, N, 10**log10_scale, g)
        check(logits, g)
        seen += logits.shape[0]

    run()
    assert seen >= 100_000


def no_violation(slack: Tensor) -> None:
    """`slack` is truth minus lower bound, or upper bound minus truth. A NaN fails too."""
    assert bool((slack >= -TOL).all()), f"violated by {float(-slack.min())}"


# Entropy


@pytest.mark.parametrize("method", ["sharp", "paper"])
def test_entropy_is_never_outside_its_bounds(method: str) -> None:
    def check(logits: Tensor, g: torch.Generator) -> None:
        H, bounds = entropy(logits), C.entropy_bounds(logits, method)
        no_violation(H - bounds.lower.bound)
        no_violation(bounds.upper.bound - H)
        assert bounds.lower.holds.all()
        assert bounds.upper.holds.all()

    over_logits(check)


def test_sharp_entropy_bounds_are_inside_the_papers() -> None:
    def check(logits: Tensor, g: torch.Generator) -> None:
        sharp, paper = C.entropy_bounds(logits), C.entropy_bounds(logits, "paper")
        no_violation(sharp.lower.bound - paper.lower.bound)
        no_violation(paper.upper.bound - sharp.upper.bound)

    over_logits(check)


def test_entropy_from_range_holds_for_every_smaller_range() -> None:
    def check(logits: Tensor, g: torch.Generator) -> None:
        N = logits.shape[-1]
        r = logits.amax(-1) - logits.amin(-1)
        bounds = C.entropy_bounds_from_range(r * (1 + rand(BATCH, g=g)), N)
        no_violation(entropy(logits) - bounds.lower.bound)
        assert bounds.upper.bound.eq(math.log(N)).all()

    over_logits(check)


@pytest.mark.parametrize("N", [2, 3, 8, 33])
def test_sharp_entropy_bounds_are_attained(N: int) -> None:
    r = torch.logspace(-3, 3, 200, dtype=F64)
    corners = torch.tril(torch.ones(N - 1, N, dtype=F64))  # m experts at the top, m = 1 … N−1
    lowest = entropy(r[:, None, None] * corners).amin(-1)
    torch.testing.assert_close(C.entropy_bounds_from_range(r, N).lower.bound, lowest, rtol=0, atol=TOL)
    # The bounds of a logit set are attained by the extremal set itself.
    best_m = entropy(r[:, None, None] * corners).argmin(-1)
    low_logits = r[:, None] * corners[best_m]
    slack = entropy(low_logits) - C.entropy_bounds(low_logits).lower.bound
    assert slack.abs().max() < TOL
    v = r / (1 + torch.exp(-r))
    high_logits = v[:, None].repeat(1, N)
    high_logits[:, 0], high_logits[:, -1] = r, 0.0
    slack = C.entropy_bounds(high_logits).upper.bound - entropy(high_logits)
    assert slack.abs().max() < TOL


def test_lowest_entropy_is_at_the_closed_form_count() -> None:
    N = 24
    r = torch.logspace(-1, 1.3, 100, dtype=F64)
    theta = (r / -torch.expm1(-r) - 1) / torch.expm1(r)
    m = torch.stack([(theta * N).floor(), (theta * N).ceil()], -1).clamp(1, N - 1)
    p = torch.exp(-r)[:, None]
    Z = m + (N - m) * p
    expected = (Z.log() + (N - m) * p * r[:, None] / Z).amin(-1)
    torch.testing.assert_close(C.entropy_bounds_from_range(r, N).lower.bound, expected, rtol=0, atol=TOL)


def test_variance_bound_improves_on_the_range_bound_somewhere() -> None:
    """Half the experts at the top: the variance knows it, (N, r) do not."""
    logits = torch.tensor([1.0] * 8 + [0.0] * 8, dtype=F64)
    range_only = math.log(14 + math.exp(-(v := 1 / (1 + math.exp(-1)))) + math.exp(1 - v))
    expected = math.log(16) - 0.25 * (1 - 2 / math.e)
    bound = C.entropy_bounds(logits).upper.bound.item()
    assert bound == pytest.approx(expected, abs=TOL)
    assert bound < range_only - 0.01


def test_entropy_paper_formulas() -> None:
    logits = torch.tensor([2.0, 0.5, -1.0, 0.0], dtype=F64)
    bounds = C.entropy_bounds(logits, "paper")
    assert bounds.lower.bound.item() == pytest.approx(math.log(4) - (2 - 0.375))
    assert bounds.upper.bound.item() == pytest.approx(
        math.log(4) - 0.5 * logits.var(correction=0).item() * math.exp(-3)
    )


def slacks(logits: Tensor) -> tuple[float, float, float]:
    """Mean slack of the lower bound: the paper's, the paper's with the trivial max(·, 0), the sharp one."""
    H, paper = entropy(logits), C.entropy_bounds(logits, "paper").lower.bound
    sharp = C.entropy_bounds(logits).lower.bound
    return tuple(float((H - b).mean()) for b in (paper, paper.clamp(min=0), sharp))  # type: ignore[return-value]


def test_sharp_lower_bound_has_a_fifth_of_the_papers_slack_over_the_dial() -> None:
    """Router logits α κ_e a_e: N = 8 Haar frames, k = 48, d = 768, isotropic tokens with energy scaling,
    κ uniform in .4–4.2, α log-uniform in ¼–16. Most of the paper's slack is its bound being negative."""
    N, d, k, tokens = 8, 768, 48, 5000
    g = rng(0)
    frames = haar_frames(d, k, N, generator=g, dtype=F64)
    x = torch.nn.functional.normalize(randn(tokens, d, g=g), dim=-1)
    affinity = d / k * (x @ frames).square().sum(-1).mT
    kappa = 0.4 + 3.8 * rand(tokens, N, g=g)
    alpha = 2 ** (-2 + 6 * rand(tokens, 1, g=g))
    paper, clipped, sharp = slacks(alpha * kappa * affinity)
    print(f"dial: paper {paper:.3f}, paper at least 0 {clipped:.3f}, sharp {sharp:.3f}")
    assert paper >= 5 * sharp
    assert clipped >= 1.4 * sharp


def test_sharp_lower_bound_has_a_fifth_of_the_papers_slack_near_uniform() -> None:
    """Gaussian logits of scale 0.3, N = 8: here the paper's bound is positive, but first order in r."""
    paper, clipped, sharp = slacks(0.3 * randn(20_000, 8, g=rng(1)))
    print(f"near uniform: paper {paper:.3f}, paper at least 0 {clipped:.3f}, sharp {sharp:.3f}")
    assert clipped == pytest.approx(paper)
    assert paper >= 5 * sharp


# Top-k mass


@pytest.mark.parametrize("method", ["sharp", "paper"])
def test_topk_mass_is_never_below_its_bound(method: str) -> None:
    def check(logits: Tensor, g: torch.Generator) -> None:
        N = logits.shape[-1]
        k = int(torch.randint(1, N + 1, (), generator=g))
        mass = logits.softmax(-1).topk(k, dim=-1).values.sum(-1)
        certificate = C.topk_mass_bound(logits, k, method)
        no_violation(mass - certificate.bound)
        assert certificate.holds.all()
        if k == N:
            assert certificate.bound.eq(1).all()
        no_violation(C.topk_mass_bound(logits, k).bound - certificate.bound)

    over_logits(check)


def test_sharp_topk_mass_is_attained_by_two_levels() -> None:
    gap = torch.logspace(-3, 2, 50, dtype=F64)
    for N, k in [(2, 1), (8, 3), (32, 31)]:
        logits = gap[:, None] * (torch.arange(N) < k).to(F64)
        mass = logits.softmax(-1)[:, :k].sum(-1)
        assert (mass - C.topk_mass_bound(logits, k).bound).abs().max() < TOL


def test_topk_paper_formula_and_masked_experts() -> None:
    logits = torch.tensor([3.0, 1.0, 0.0, 0.0], dtype=F64)
    assert C.topk_mass_bound(logits, 1, "paper").bound.item() == pytest.approx(1 - 3 * math.exp(-2))
    masked = torch.tensor([3.0, 1.0, -math.inf, -math.inf], dtype=F64)
    assert C.topk_mass_bound(masked, 2).bound.item() == 1.0
    assert bool(C.topk_mass_bound(masked, 2).holds)
    assert not bool(C.topk_mass_bound(masked, 3).holds)
    assert C.topk_mass_bound(masked, 3).bound.item() == 0.75


# Load balance


def cv(load: Tensor) -> Tensor:
    return load.std(-1, correction=0) / load.mean(-1)


def separated_loads(N: int, alpha: float, gap: float, weights: Tensor, g: torch.Generator) -> Tensor:
    """Expected loads of 500 random mixtures: 5 tokens per D_i, each leading its rivals by at least `gap`."""
    lead = gap + torch.where(rand(500, N, 5, N, g=g) < 0.5, 0.0, 3 * randn(500, N, 5, N, g=g).exp())
    logits = torch.where(torch.eye(N, dtype=torch.bool)[:, None], 0.0, -lead)
    per_source = (alpha * logits).softmax(-1).mean(-2)
    return (weights.unsqueeze(-1) * per_source).sum(-2)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**31 - 1), N=st.integers(2, 12), alpha=st.floats(0, 8), gap=st.floats(1e-3, 3))
def test_loads_of_separated_mixtures_obey_their_bounds(seed: int, N: int, alpha: float, gap: float) -> None:
    g = rng(seed)
    balanced = separated_loads(N, alpha, gap, torch.full((N,), 1 / N, dtype=F64), g)
    sharp, closed, paper = (C.load_cv_bound(alpha, gap, N, method) for method in ("sharp", "closed", "paper"))
    no_violation(sharp.bound - cv(balanced))
    no_violation(closed.bound - sharp.bound)
    no_violation(paper.bound - closed.bound)
    weights = randn(500, N, g=g).mul(2).softmax(-1)
    load = separated_loads(N, alpha, gap, weights, g)
    lower, upper = C.min_load_bounds(alpha, gap, weights)
    no_violation(load - lower.bound)
    no_violation(upper.bound - load)
    assert lower.holds.all()


def vertices(N: int, t: float) -> Tensor:
    """All extreme gates of each source D_i: any rivals at weight t against the target, the rest 0."""
    sets = torch.tensor(list(itertools.product([0.0, t], repeat=N - 1)), dtype=F64)
    gates = [torch.cat([sets[:, :i], torch.ones(len(sets), 1, dtype=F64), sets[:, i:]], -1) for i in range(N)]
    return torch.stack([gate / gate.sum(-1, keepdim=True) for gate in gates])


def worst_cv(N: int, t: float) -> float:
    """The largest CV any balanced mixture can have: a convex function, so a vertex for each source."""
    gates = vertices(N, t)
    load = gates[0] / N
    for i in range(1, N):
        load = (load.unsqueeze(-2) + gates[i] / N).flatten(0, -2)
    return float(cv(load).max())


@pytest.mark.parametrize("t", [1e-6, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("N", [2, 3, 4])
def test_sharp_load_cv_against_the_exact_worst_case(N: int, t: float) -> None:
    worst, bound = worst_cv(N, t), C.load_cv_bound(1.0, -math.log(t), N).bound.item()
    assert worst <= bound + TOL
    assert worst >= bound * (1 - N * t)  # attained to first order in t …
    assert worst >= 0.8 * bound
    if N == 2:
        assert worst == pytest.approx(bound, rel=1e-12)  # … and exactly for two experts


def test_load_cv_formulas() -> None:
    t, N = 0.25, 3
    c = [0.0, 2 * t / (1 + t), 2 * t / (1 + 2 * t), 0.0]
    sharp = math.sqrt(sum((b - a) ** 2 for a, b in itertools.pairwise(c)) / N)
    expected = {"sharp": sharp, "paper": 2 * t, "closed": t / (1 + t) * math.sqrt(8 / 3)}
    for method, value in expected.items():
        assert C.load_cv_bound(2.0, math.log(2), N, method).bound.item() == pytest.approx(value)


def test_min_load_bounds_are_attained() -> None:
    N, alpha, gap = 6, 2.0, 0.7
    weights = torch.tensor([0.3, 0.1, 0.2, 0.05, 0.15, 0.2], dtype=F64)
    lower, upper = C.min_load_bounds(alpha, gap, weights)
    off = torch.eye(N, dtype=torch.bool)
    for i in range(N):
        # Least: expert i's own tokens are shared by all, nobody else's come. Most: the other way round.
        least, most = torch.full((N, N), -1e4, dtype=F64), torch.full((N, N), -1e4, dtype=F64)
        least[i], most[:, i] = -gap, -gap
        for logits, bound in ((least, lower.bound), (most, upper.bound)):
            load = weights @ (alpha * torch.where(off, 0.0, logits)).softmax(-1)
            assert abs(float(load[i] - bound[i])) < TOL


def test_separation_gap() -> None:
    kappa = torch.tensor([[1.0, 2.0], [0.4, 4.2]], dtype=F64)
    certificate = C.separation_gap(0.9, 0.28, kappa)
    torch.testing.assert_close(
        certificate.bound, torch.tensor([0.9 * 0.44, 0.9 * (0.4 - 0.28 * 4.2)], dtype=F64)
    )
    assert certificate.holds.tolist() == [True, False]
    negative = C.separation_gap(1.0, 2.0, torch.tensor([-1.0, -1.0]))
    assert negative.bound.item() == -math.inf
    assert not bool(negative.holds)
    # A gap that does not hold gives the trivial load bounds.
    cv_bound = C.load_cv_bound(1.0, certificate.bound, 5)
    assert cv_bound.holds.tolist() == [True, False]
    assert cv_bound.bound[1].item() == 2.0


# Amortised posterior


def test_tv_is_never_above_its_bound() -> None:
    def check(logits: Tensor, g: torch.Generator) -> None:
        change = torch.exp(2 * randn(BATCH, 1, g=g)) * randn(*logits.shape, g=g)
        other = logits + change
        tv = (other.softmax(-1) - logits.softmax(-1)).abs().sum(-1) / 2
        no_violation(C.amortized_tv_bound(logits, other).bound - tv)

    over_logits(check)


def test_tv_bound_is_attained_by_a_two_valued_change() -> None:
    r = torch.linspace(0, 30, 40, dtype=F64)
    base = torch.stack([-r / 4, r / 4], -1)  # the smaller side gains r
    tv = (base.softmax(-1) - base.flip(-1).softmax(-1)).abs().sum(-1) / 2
    assert (C.amortized_tv_bound(base, base.flip(-1)).bound - tv).abs().max() < TOL


# Truncation


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**31 - 1), N=st.integers(2, 16), D=st.integers(1, 8), sharpness=st.floats(0, 8))
def test_truncation_error_is_never_above_its_bound(seed: int, N: int, D: int, sharpness: float) -> None:
    g = rng(seed)
    probs = (sharpness * randn(500, N, g=g)).softmax(-1)
    kept = rand(500, N, g=g) < rand(500, 1, g=g)
    kept[:, 0] = True
    outputs = torch.exp(randn(500, N, 1, g=g)) * randn(500, N, D, g=g) + 5 * randn(500, 1, D, g=g)
    y = (probs.unsqueeze(-1) * outputs).sum(-2)
    weights = probs * kept
    y_hat = (weights.unsqueeze(-1) * outputs).sum(-2) / weights.sum(-1, keepdim=True)
    error = (y - y_hat).norm(dim=-1)
    diameter = (outputs.unsqueeze(-2) - outputs.unsqueeze(-3)).norm(dim=-1).amax((-2, -1))
    full = C.truncation_error_bound(probs, kept, outputs=outputs)
    simple = C.truncation_error_bound(probs, kept, diameter=diameter)
    assert full.holds.all()
    no_violation((full.bound - error) / diameter.clamp(min=1))
    no_violation((simple.bound - full.bound) / diameter.clamp(min=1))


def test_truncation_bound_is_attained_and_uses_both_terms() -> None:
    probs = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=F64)
    kept = torch.tensor([True, True, False, False])
    outputs = torch.tensor([[0.0], [0.0], [2.0], [2.0]], dtype=F64)  # y − ŷ = 0.6
    for arguments in ({"outputs": outputs}, {"diameter": 2.0}):
        assert C.truncation_error_bound(probs, kept, **arguments).bound.item() == pytest.approx(0.6, abs=TOL)
    # One far expert of tiny mass, itself kept: the spread beats the diameter.
    probs = torch.tensor([0.599, 0.001, 0.2, 0.2], dtype=F64)
    outputs = torch.tensor([[0.0], [100.0], [1.0], [1.0]], dtype=F64)
    y = 0.5
    spread = 0.599 * y**2 + 0.001 * (100 - y) ** 2 + 0.4 * (1 - y) ** 2
    bound = C.truncation_error_bound(probs, kept, outputs=outputs).bound.item()
    assert bound == pytest.approx(math.sqrt(0.4 / 0.6 * spread))
    assert bound < 0.4 * 100


# Range of the logits


def operators(frames: Tensor, kappa: Tensor) -> Tensor:
    """U diag(κ) Uᵀ as plain d×d matrices."""
    kappa = kappa.unsqueeze(-1).expand(*frames.shape[:-2], frames.shape[-1]) if kappa.ndim == 1 else kappa
    return (frames * kappa.unsqueeze(-2)) @ frames.mT


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize(("N", "d", "k"), [(2, 6, 1), (5, 12, 3), (4, 6, 3), (4, 7, 5), (3, 4, 4)])
def test_logit_range_agrees_with_plain_eigenvalues_and_is_attained(
    N: int, d: int, k: int, diagonal: bool
) -> None:
    g = rng(100 * d + k)
    for trial in range(20):
        frames = haar_frames(d, k, N, generator=g, dtype=F64)
        if trial % 4 == 1:
            frames = torch.cat([frames[:1], frames[:1], frames[2:]])  # two experts share a subspace
        kappa = 4 * rand(*((N, k) if diagonal else (N,)), g=g)
        if diagonal and trial % 4 == 2:
            kappa = kappa - 2
        prior = 3 * randn(N, g=g) * (trial % 3)
        A, scale, alpha = operators(frames, kappa), d / k, 1.7
        best, x_best = 0.0, torch.ones(d, dtype=F64) / math.sqrt(d)
        for i, j in itertools.permutations(range(N), 2):
            values, vectors = torch.linalg.eigh(A[i] - A[j])
            value = alpha * (scale * float(values[-1]) + float(prior[i] - prior[j]))
            if value > best:
                best, x_best = value, vectors[:, -1]
        certificate = C.logit_range_bound(frames, kappa, alpha=alpha, scale=scale, log_prior=prior)
        assert bool(certificate.holds)
        assert certificate.bound.item() == pytest.approx(best, abs=1e-7)

        def logit_range(x: Tensor, A: Tensor = A, prior: Tensor = prior) -> Tensor:
            logits = 1.7 * (d / k * torch.einsum("pd,nde,pe->pn", x, A, x) + prior)
            return logits.amax(-1) - logits.amin(-1)

        x = torch.nn.functional.normalize(randn(500, d, g=g), dim=-1)
        no_violation(certificate.bound - logit_range(x))
        assert logit_range(x_best[None]).item() == pytest.approx(certificate.bound.item(), abs=1e-7)


def test_logit_range_of_coinciding_fp32_frames_is_zero() -> None:
    frames = haar_frames(32, 4, generator=rng(3)).expand(3, -1, -1)
    certificate = C.logit_range_bound(frames, torch.full((3,), 4.0))
    assert certificate.bound.dtype == torch.float32
    assert certificate.bound.item() < 1e-5


@pytest.mark.parametrize("diagonal", [False, True])
def test_logit_range_with_linear_term_and_prior_in_batches(diagonal: bool) -> None:
    g = rng(5)
    B, N, d, k = 6, 4, 8, 2
    frames = haar_frames(d, k, (B, N), generator=g, dtype=F64)
    kappa = 3 * rand(*((B, N, k) if diagonal else (B, N)), g=g)
    linear, prior = randn(B, N, d, g=g), randn(B, N, g=g)
    options = {"alpha": 2.0, "scale": 4.0, "linear_scale": 1.5}
    certificate = C.logit_range_bound(frames, kappa, linear=linear, log_prior=prior, **options)
    assert certificate.bound.shape == (B,)
    for b in range(B):
        A = operators(frames[b], kappa[b])
        pairs = [
            4 * float(torch.linalg.eigvalsh(A[i] - A[j])[-1])
            + 1.5 * float((linear[b, i] - linear[b, j]).norm())
            + float(prior[b, i] - prior[b, j])
            for i, j in itertools.permutations(range(N), 2)
        ]
        assert certificate.bound[b].item() == pytest.approx(2 * max(pairs), abs=1e-8)
        x = torch.nn.functional.normalize(randn(4000, d, g=g), dim=-1)
        quadratic = torch.einsum("pd,nde,pe->pn", x, A, x)
        logits = 2 * (4 * quadratic + 1.5 * x @ linear[b].mT + prior[b])
        no_violation(certificate.bound[b] - (logits.amax(-1) - logits.amin(-1)))
    # A purely linear router attains its bound along the difference of the two farthest experts.
    zero = torch.zeros(N, dtype=F64)
    bound = C.logit_range_bound(frames[0], zero, linear=linear[0]).bound.item()
    assert bound == pytest.approx(torch.cdist(linear[0], linear[0]).max().item(), abs=1e-8)


def test_logit_range_certifies_entropy_without_tokens() -> None:
    g = rng(9)
    N, d, k = 8, 32, 4
    frames, kappa = haar_frames(d, k, N, generator=g, dtype=F64), 0.4 + rand(N, g=g)
    alphas = torch.tensor([0.0, 0.1, 0.5, 1.0], dtype=F64)
    certificate = C.logit_range_bound(frames, kappa, alpha=alphas, scale=d / k)
    assert certificate.bound[0].item() == 0.0
    lower = C.entropy_bounds_from_range(certificate.bound, N).lower
    assert lower.bound[0].item() == pytest.approx(math.log(N))
    x = torch.nn.functional.normalize(randn(2000, d, g=g), dim=-1)
    affinity = torch.einsum("pd,nde,pe->pn", x, operators(frames, kappa), x) * d / k
    for alpha, bound in zip(alphas, lower.bound, strict=True):
        no_violation(entropy(alpha * affinity) - bound)


# Robustness, hypotheses, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-6, 1.0, 1e2, 1e4, 1e30])
def test_no_nan_at_any_scale(dtype: torch.dtype, scale: float) -> None:
    logits = (scale * torch.rand(64, 16, generator=rng(2), dtype=F64)).to(dtype)
    H = entropy(logits.to(F64))
    tolerance = TOL if dtype == F64 else 1e-5
    for method in ("sharp", "paper"):
        bounds, mass = C.entropy_bounds(logits, method), C.topk_mass_bound(logits, 3, method)
        for certificate in (bounds.lower, bounds.upper, mass):
            assert torch.isfinite(certificate.bound).all()
            assert certificate.holds.all()
            assert certificate.bound.dtype == torch.promote_types(dtype, torch.float32)
        assert (H - bounds.lower.bound).min() >= -tolerance
        assert (bounds.upper.bound - H).min() >= -tolerance
    bounds = C.entropy_bounds_from_range(torch.tensor([0.0, scale], dtype=dtype), 16)
    assert torch.isfinite(bounds.lower.bound).all()
    assert torch.isfinite(C.amortized_tv_bound(logits, -logits).bound).all()
    for method in ("sharp", "paper", "closed"):
        assert torch.isfinite(
            C.load_cv_bound(1e4, torch.tensor([scale], dtype=dtype), 16, method).bound
        ).all()


def test_tensors_are_never_read_and_stay_on_their_device() -> None:
    """A tensor without data: reading a value or mixing devices raises."""

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    frames, kept = meta(4, 8, 2), meta(3, 4, dtype=torch.bool)
    bounds = [C.entropy_bounds(meta(3, 4), method) for method in ("sharp", "paper")]
    bounds.append(C.entropy_bounds_from_range(meta(3), 4))
    certificates = [c for pair in bounds for c in (pair.lower, pair.upper)]
    certificates += [C.topk_mass_bound(meta(3, 4), 2), C.separation_gap(0.5, 0.1, meta(3, 4))]
    certificates += [C.load_cv_bound(1.0, meta(3), 4), C.load_cv_bound(meta(3), 1.0, 4)]
    certificates += [C.load_cv_bound(1.0, meta(), 4), C.separation_gap(0.5, 0.1, meta(4))]
    certificates += C.min_load_bounds(1.0, 0.5, meta(4))
    certificates += [C.amortized_tv_bound(meta(3, 4), meta(3, 4))]
    certificates += [C.truncation_error_bound(meta(3, 4), kept, diameter=1.0)]
    certificates += [C.truncation_error_bound(meta(3, 4), kept, outputs=meta(3, 4, 5))]
    certificates += [
        C.logit_range_bound(frames, meta(4)),
        C.logit_range_bound(frames, meta(4, 2), linear=meta(4, 8)),
    ]
    for certificate in certificates:
        assert certificate.bound.device.type == "meta"
        assert certificate.holds.device.type == "meta"
        assert certificate.bound.dtype == torch.float32


def test_batches_agree_with_single_calls() -> None:
    logits = 3 * randn(2, 5, 7, g=rng(4))
    bounds = C.entropy_bounds(logits)
    assert bounds.lower.bound.shape == (2, 5)
    one = C.entropy_bounds(logits[1, 2])
    torch.testing.assert_close(bounds.lower.bound[1, 2], one.lower.bound)
    torch.testing.assert_close(bounds.upper.bound[1, 2], one.upper.bound)
    torch.testing.assert_close(
        C.topk_mass_bound(logits, 2).bound[1, 2], C.topk_mass_bound(logits[1, 2], 2).bound
    )
    cvs = C.load_cv_bound(torch.tensor([1.0, 2.0], dtype=F64), 0.5, 4)
    assert cvs.bound[1].item() == pytest.approx(C.load_cv_bound(2.0, 0.5, 4).bound.item())


def test_failed_hypotheses_give_the_trivial_value() -> None:
    bad = torch.tensor([[0.0, math.nan, 1.0, 2.0], [0.0, math.inf, 1.0, 2.0], [1.0, -math.inf, 0.0, 0.0]])
    for method in ("sharp", "paper"):
        bounds = C.entropy_bounds(bad, method)
        assert not bounds.lower.holds.any()
        assert not bounds.upper.holds.any()
        assert bounds.lower.bound.eq(0).all()
        assert bounds.upper.bound.eq(math.log(4)).all()
        mass = C.topk_mass_bound(bad[:2], 2, method)
        assert not mass.holds.any()
        assert mass.bound.eq(0.5).all()
    from_range = C.entropy_bounds_from_range(torch.tensor([math.inf, math.nan, -1.0]), 4)
    assert not from_range.lower.holds.any()
    assert from_range.lower.bound.eq(0).all()
    assert from_range.upper.holds.all()
    tv = C.amortized_tv_bound(bad, torch.zeros(3, 4))
    assert not tv.holds.any()
    assert tv.bound.eq(1).all()

    gaps = torch.tensor([0.0, -1.0, math.nan, math.inf])
    for method in ("sharp", "paper", "closed"):
        certificate = C.load_cv_bound(1.0, gaps, 10, method)
        assert not certificate.holds.any()
        assert certificate.bound.eq(3).all()
    assert not bool(C.load_cv_bound(torch.tensor(-1.0), 1.0, 10).holds)
    weights = torch.tensor([0.5, 0.5])
    for alpha, gap, pi in (
        (1.0, -1.0, weights),
        (1.0, 1.0, 2 * weights),
        (1.0, 1.0, torch.tensor([1.5, -0.5])),
    ):
        lower, upper = C.min_load_bounds(alpha, gap, pi)
        assert not lower.holds.any()
        assert lower.bound.eq(0).all()
        assert upper.bound.eq(1).all()

    nothing = torch.zeros(4, dtype=torch.bool)
    probs = torch.full((4,), 0.25)
    for arguments in ({"diameter": 1.0}, {"outputs": torch.ones(4, 2)}):
        certificate = C.truncation_error_bound(probs, nothing, **arguments)
        assert not bool(certificate.holds)
        assert certificate.bound.item() == math.inf
    assert not bool(C.truncation_error_bound(2 * probs, ~nothing, diameter=1.0).holds)
    spoilt = torch.ones(3, 4, 2)
    spoilt[0, 1, 0], spoilt[1, 3] = math.inf, math.nan
    certificate = C.truncation_error_bound(probs.expand(3, 4), ~nothing.expand(3, 4), outputs=spoilt)
    assert certificate.holds.tolist() == [False, False, True]
    assert certificate.bound.tolist() == [math.inf, math.inf, 0]
    diameters = torch.tensor([math.nan, math.inf, -1.0, 1.0])
    certificate = C.truncation_error_bound(probs.expand(4, 4), ~nothing.expand(4, 4), diameter=diameters)
    assert certificate.holds.tolist() == [False, False, False, True]
    assert certificate.bound.tolist() == [math.inf, math.inf, math.inf, 0]

    frames = haar_frames(8, 2, (3, 4), generator=rng(6))
    frames[1] = 1.01 * frames[1]
    frames[2, 0, 0, 0] = math.nan
    for kappa in (torch.ones(3, 4), torch.ones(3, 4, 2)):
        certificate = C.logit_range_bound(frames, kappa)
        assert certificate.holds.tolist() == [True, False, False]
        assert certificate.bound.isinf().tolist() == [False, True, True]
    assert not bool(C.logit_range_bound(frames[0], -torch.ones(4)).holds)
    assert bool(C.logit_range_bound(frames[0], -torch.ones(4, 2)).holds)
    assert not bool(C.logit_range_bound(frames[0], torch.ones(4), log_prior=torch.full((4,), math.nan)).holds)


X, P, KEEP = torch.zeros(3, 4), torch.full((3, 4), 0.25), torch.ones(3, 4, dtype=torch.bool)
U = haar_frames(8, 2, 4, generator=rng(7))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: C.entropy_bounds(X, "best"), "method must be one of 'sharp', 'paper', got 'best'"),
        (
            lambda: C.entropy_bounds(torch.zeros(3, 1)),
            r"logits must have shape \(\.\.\., N\) .* got \(3, 1\)",
        ),
        (lambda: C.entropy_bounds(torch.zeros(3, 4, dtype=torch.int64)), "logits must be a floating-point"),
        (lambda: C.entropy_bounds_from_range(1.0, 1), "num_experts must be an integer >= 2, got 1"),
        (lambda: C.entropy_bounds_from_range(-0.5, 4), "range_ must be a finite number >= 0, got -0.5"),
        (lambda: C.topk_mass_bound(X, 0), "k must be an integer >= 1, got 0"),
        (lambda: C.topk_mass_bound(X, 5), "k must be at most N = 4, got 5"),
        (lambda: C.topk_mass_bound(X, 1, "closed"), "method must be one of .* got 'closed'"),
        (lambda: C.separation_gap(-1.0, 0.5, X), "gamma must be a finite number >= 0, got -1.0"),
        (lambda: C.load_cv_bound(-1.0, 1.0, 4), "alpha must be a finite number >= 0, got -1.0"),
        (lambda: C.load_cv_bound(math.inf, 1.0, 4), "alpha must be a finite number >= 0, got inf"),
        (lambda: C.load_cv_bound(1.0, math.nan, 4), "gap must be a finite number, got nan"),
        (lambda: C.load_cv_bound(1.0, 1.0, 1), "num_experts must be an integer >= 2, got 1"),
        (lambda: C.load_cv_bound(1.0, 1.0, 4, "tight"), "method must be one of .* got 'tight'"),
        (lambda: C.min_load_bounds(1.0, 1.0, torch.ones(1)), "weights must have shape"),
        (lambda: C.amortized_tv_bound(X, torch.zeros(3, 5)), r"share N, got \(3, 4\) and \(3, 5\)"),
        (lambda: C.truncation_error_bound(P, KEEP), "exactly one of diameter and outputs, got neither"),
        (
            lambda: C.truncation_error_bound(P, KEEP, diameter=1.0, outputs=torch.zeros(3, 4, 2)),
            "exactly one of diameter and outputs, got both",
        ),
        (lambda: C.truncation_error_bound(P, P, diameter=1.0), "kept must be a boolean tensor"),
        (
            lambda: C.truncation_error_bound(P, KEEP[0], diameter=1.0),
            r"kept must have shape \(3, 4\), got \(4,\)",
        ),
        (lambda: C.truncation_error_bound(P, KEEP, diameter=-1.0), "diameter must be a finite number >= 0"),
        (lambda: C.truncation_error_bound(P, KEEP, outputs=torch.zeros(4, 2)), "outputs must have shape"),
        (lambda: C.logit_range_bound(U[:1], torch.ones(1)), r"frames must have shape .* got \(1, 8, 2\)"),
        (
            lambda: C.logit_range_bound(U, torch.ones(3)),
            r"kappa must have shape \(4,\) or \(4, 2\), got \(3,\)",
        ),
        (lambda: C.logit_range_bound(U, torch.ones(4), alpha=-2.0), "alpha must be a finite number >= 0"),
        (lambda: C.logit_range_bound(U, torch.ones(4), scale=math.nan), "scale must be a finite number >= 0"),
        (lambda: C.logit_range_bound(U, torch.ones(4), linear=X), r"linear must have shape \(4, 8\)"),
        (lambda: C.logit_range_bound(U, torch.ones(4), log_prior=X), r"log_prior must have shape \(4,\)"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
