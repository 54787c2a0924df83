"""The Grassmann gate: each expert owns a subspace, and a token is routed by the share of its energy inside.

    score_e(x) = h_e · Σ_j λ_ej (u_ejᵀx̂)² [+ μ_eᵀx̂] + log prior_e,      ℓ = α · score,      g = softmax(ℓ)

x̂ is the token at a fixed length. With scaling "raw" it is the token as it is.

Legend: N experts, D model width d, K subspace rank k; `...` leading dimensions of the tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grmoe import checks, geometry
from grmoe.bingham import log_kummer, log_normalizer
from grmoe.certificates import Certificate, logit_range_bound
from grmoe.routing.amortizer import AMORTIZERS, AmortizerKind, amortize, build_amortizer
from grmoe.routing.buffers import for_backward
from grmoe.routing.frames import FrameRouter
from grmoe.routing.fused import MAX_EXPERTS, GateOperands, GateParts

# Floor of ‖x‖²: energies of shorter tokens fade to zero. A zero token (padding) routes by the prior alone.
ZERO_TOKEN = 1e-12


class GrassmannRouter(FrameRouter):
    """Routes by subspace energy (eq:grmoe_gating, eq:grmoe_scalar, eq:alpha_sparsity, eq:amortized).

    dim, num_experts, rank: d, N and k. The paper suggests k near d/N.
    concentration: "scalar" learns one κ_e per expert and depends only on the subspaces (Grassmann geometry).
        "diagonal" learns λ_e1…λ_ek along the frame's columns (Stiefel geometry).
    kappa: initial concentration, κ > 0. The default is √k/2 under "rank" scaling. There energies of random subspaces
        differ by about √(2/k), so logits differ equally at every rank. It is 1.5 under the other scalings.
    scaling: the constant c of the energy c·‖Uᵀx‖²/‖x‖². "rank": c = d/k, so that random frames have mean energy one.
        "unit": c = 1; the gate is then nearly uniform. "rms": c = d; the gate is then nearly one-hot.
        "raw": the paper's own ‖Uᵀx‖², not divided by ‖x‖²; longer tokens get sharper gates.
    prior: "balanced" learns log p(z=e) from the load. "uniform" is p(z=e) = 1/N and subtracts each expert's log
        normaliser. "paper" is p(z=e) ∝ Z(κ_e), which cancels the normaliser and favours high κ. "raw" scaling excludes
        "uniform": there the normaliser Z(κ_e‖x‖²) depends on the token.
    amortizer: None, "affinity" (MLP on the N energies) or "input" (MLP on the token): h = softmax(MLP)·N. "matrix"
        (MLP on the token) mixes the experts' energies by an N × N matrix. See `grmoe.routing.amortizer`.
    linear: add μ_eᵀx̂ to the energy (Fisher–Bingham gate). κ → 0 gives the linear softmax gate on normalised tokens,
        μ = 0 the paper's gate. x̂ = √d·x/‖x‖, x/‖x‖ under "unit", or x under "raw".
    dial: "posterior": α multiplies likelihood and prior; α → 0 is uniform, and entropy is monotone in α.
        "likelihood": α multiplies the likelihood alone, and the prior keeps its strength.
    init: "haar", "identity", or a frame tensor (N, d, k), for instance `geometry.pca_frames(...)`. "pca" takes
        principal directions of the layer's inputs: frames are "haar" until `initialize_from` gets tokens.
        `grmoe train` calls it with the first batch.
    Other arguments: see `Router`.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        rank: int,
        *,
        concentration: Literal["scalar", "diagonal"] = "scalar",
        kappa: float | None = None,
        scaling: Literal["rank", "unit", "rms", "raw"] = "rank",
        prior: Literal["balanced", "uniform", "paper"] = "balanced",
        amortizer: Literal["affinity", "input", "matrix"] | None = None,
        amortizer_hidden: int = 64,
        linear: bool = False,
        dial: Literal["posterior", "likelihood"] = "posterior",
        init: Literal["haar", "identity", "pca"] | Tensor = "haar",
        generator: torch.Generator | None = None,
        **router: Any,
    ) -> None:
        checks.require(
            "balance" not in router,
            f"balance must not be given to a GrassmannRouter: prior='balanced' turns it on, got prior={prior!r}",
        )
        super().__init__(dim, num_experts, balance=prior == "balanced", **router)
        checks.subspace(dim, rank)
        checks.one_of("concentration", concentration, ("scalar", "diagonal"))
        checks.one_of("prior", prior, ("balanced", "uniform", "paper"))
        checks.one_of("amortizer", amortizer, (None, *AMORTIZERS))
        self.rank = rank
        self.prior = prior
        self.dial = checks.one_of("dial", dial, ("posterior", "likelihood"))
        self.scaling = checks.one_of("scaling", scaling, ("rank", "unit", "rms", "raw"))
        checks.require(
            scaling != "raw" or prior != "uniform",
            "prior must be 'paper' or 'balanced' with scaling='raw', got 'uniform': "
            "the normaliser of an expert's likelihood then depends on the token's length",
        )
        self.energy_scale = {"rank": dim / rank, "unit": 1.0, "rms": float(dim), "raw": 1.0}[scaling]
        self.token_norm = math.sqrt(dim) if scaling in ("rank", "rms") else 1.0
        self.awaits_tokens = isinstance(init, str) and init == "pca"  # until `initialize_from`
        self.frames = nn.Parameter(_initial_frames(init, dim, num_experts, rank, generator))
        shape = (num_experts,) if concentration == "scalar" else (num_experts, rank)
        if kappa is None:
            kappa = math.sqrt(rank) / 2 if scaling == "rank" else 1.5
        self.log_kappa = nn.Parameter(torch.full(shape, math.log(checks.finite("kappa", kappa, above=0))))
        self.amortizer: AmortizerKind | None = amortizer
        if amortizer is not None:
            self.amortizer_net = build_amortizer(amortizer, dim, num_experts, amortizer_hidden)
        self.mu = nn.Parameter(torch.zeros(num_experts, dim)) if linear else None

    def energies(self, x: Tensor, weight_NK: Tensor | None = None) -> Tensor:
        """c·‖U_eᵀx‖²/‖x‖² for every expert, (..., N); ‖U_eᵀx‖² under "raw". Columns weighted by `weight_NK` when given.

        Computed as one GEMM x·[U₁…U_N], squares, and sums per expert.
        """
        N, D, K = self.frames.shape
        flat_D_NK = self.frames.permute(1, 0, 2).reshape(D, N * K).to(x.dtype)
        squares_NK = (x @ flat_D_NK).square().unflatten(-1, (N, K))
        if weight_NK is not None:
            squares_NK = squares_NK * weight_NK.to(x.dtype)
        energies = squares_NK.sum(-1)
        return energies if self.scaling == "raw" else self.energy_scale * energies / _squared_norm(x)

    def amortized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(κ_e a_e, h_e κ_e a_e) of eq:amortized, (..., N) each; the same twice without an amortiser."""
        kappa = self.kappa.to(x.dtype)
        if kappa.ndim == 2:
            plain = self.energies(x, kappa)
        else:
            energies = self.energies(x)
            plain = kappa * energies
        if self.amortizer is None:
            return plain, plain
        features = x
        if self.amortizer == "affinity":
            features = energies if kappa.ndim == 1 else self.energies(x)
        return plain, amortize(self.amortizer, self.amortizer_net(features.to(self.frames.dtype)), plain)

    def scores(self, x: Tensor) -> Tensor:
        """The log-likelihood of each expert without its normaliser: h κ a [+ μᵀx̂], (..., N)."""
        _, scores = self.amortized(x)
        if self.mu is None:
            return scores
        linear = x @ self.mu.to(x.dtype).T
        if self.scaling == "raw":
            return scores + linear
        norm2 = _squared_norm(x)
        # At x = 0 the direction is undefined and the gradient of x/‖x‖ unbounded: padding gets no linear term.
        return scores + torch.where(norm2 > ZERO_TOKEN, self.token_norm * linear / norm2.sqrt(), 0.0)

    def kernel_scores(self, x: Tensor) -> Tensor:
        """`scores` by kernels (`grmoe.kernels.scores`), which read tokens of 16 bits as they are; then fp32."""
        from grmoe.kernels.scores import Parts, blend, project

        multiply = partial(project, x.reshape(-1, x.shape[-1]), thin=not self.training)
        kind, ones = self.amortizer, self.frames.new_zeros  # λ = exp 0
        # The network "affinity" reads the energies without κ.
        kappa_N = self.log_kappa if kind == "affinity" and self.log_kappa.ndim == 1 else None
        N = len(self.frames)
        inside = self.log_kappa if kappa_N is None else ones(N)
        energy_TN, norm_T = multiply(self.frames, inside, self.energy_scale)
        raw = self.scaling == "raw"
        if raw:
            energy_TN = energy_TN * norm_T.unsqueeze(-1)
        network_TN = None
        if kind is not None:
            first, *rest = self.amortizer_net
            assert isinstance(first, nn.Linear)
            if kind == "affinity":
                features_TN = energy_TN
                if kappa_N is None:
                    features_TN, _ = multiply(self.frames, ones(N), self.energy_scale)
                    features_TN = features_TN * norm_T.unsqueeze(-1) if raw else features_TN
                network_TN = first(features_TN)
            elif len(first.weight) <= MAX_EXPERTS:
                network_TN = multiply(first.weight)[0] + first.bias
            else:
                network_TN = first(x.reshape(-1, x.shape[-1]).to(self.frames.dtype))
            for layer in rest:
                network_TN = layer(network_TN)
        if kind == "matrix":
            assert network_TN is not None
            energy_TN, network_TN = amortize(kind, network_TN, energy_TN), None
        linear_TN = None if self.mu is None else multiply(self.mu)[0]
        parts = Parts(energy_TN, kappa_N, network_TN, linear_TN, None if raw or self.mu is None else norm_T)
        return blend(parts, self.token_norm).view(*x.shape[:-1], N)

    def log_prior_correction(self) -> Tensor:
        """log p(z=e) − log Z_e up to a constant, (N,): zero for "paper", where the two cancel.

        Only "balanced" reads `log_prior`: a balanced checkpoint may be loaded into the other two.
        """
        if self.prior == "uniform":
            return -self._log_normalizers().to(self.log_prior.dtype)
        return self.log_prior if self.prior == "balanced" else torch.zeros_like(self.log_prior)

    def gate_operands(self) -> GateOperands | None:
        # One kernel divides by ‖x‖², and knows neither amortiser nor linear term: see `gate_parts`.
        if self.amortizer is not None or self.mu is not None or self.scaling == "raw":
            return None
        prior_N = self.log_prior_correction()
        posterior = self.dial == "posterior"
        return GateOperands(self.frames, prior_N, self.log_kappa, self.energy_scale, posterior)

    def gate_parts(self) -> GateParts | None:
        return GateParts(self.kernel_scores, self.log_prior_correction(), self.dial == "posterior")

    def gate(self, x: Tensor, token_ids: Tensor | None) -> Tensor:
        scores, prior = self.scores(x), self.log_prior_correction().to(x.dtype)
        alpha = for_backward(self.alpha_value).to(x.dtype)
        return alpha * (scores + prior) if self.dial == "posterior" else alpha * scores + prior

    def _log_normalizers(self) -> Tensor:
        """log Z_e, the normaliser of each expert's likelihood of a unit token, (N,)."""
        N, D, K = self.frames.shape
        kappa, c = self.kappa.double(), self.energy_scale
        if kappa.ndim == 1 and self.mu is None:
            return log_kummer(K, D, c * kappa)
        spectrum = c * kappa if kappa.ndim == 2 else (c * kappa).unsqueeze(-1)
        spectrum = torch.cat([spectrum, spectrum.new_zeros(N, 1)], dim=-1)
        counts = [1] * K + [D - K] if kappa.ndim == 2 else [K, D - K]
        if self.mu is None:
            return log_normalizer(spectrum, counts)
        mu_ND = self.token_norm * self.mu.double()
        inside_NK = torch.einsum("nd,ndk->nk", mu_ND, self.frames.double())
        squares = inside_NK.square() if kappa.ndim == 2 else inside_NK.square().sum(-1, keepdim=True)
        outside = (mu_ND.square().sum(-1, keepdim=True) - inside_NK.square().sum(-1, keepdim=True)).clamp(
            min=0
        )
        # log Z depends on γ² alone. The tiny floor keeps the gradient of the root finite at μ = 0.
        gamma = torch.cat([squares, outside if D > K else 0 * outside], dim=-1).clamp(min=1e-30).sqrt()
        return log_normalizer(spectrum, counts, gamma)

    @torch.no_grad()
    def initialize_from(self, x: Tensor, generator: torch.Generator | None = None) -> None:
        """Set the frames from tokens (..., d): for each expert the top k principal directions of another random half
        (paper, appendix "Sensitivity to Initialization").

        Lengths count only under "raw", because the other gates ignore them.
        """
        checks.last_dim("x", x, self.dim)
        x_TD = x.detach().reshape(-1, self.dim).double()
        if self.scaling != "raw":
            x_TD = x_TD / _squared_norm(x_TD).sqrt()
        frames = geometry.pca_frames(x_TD, self.rank, self.num_experts, generator=generator)
        self.frames.copy_(frames)
        self.awaits_tokens = False

    @torch.no_grad()
    def logit_range(self, norm: float | None = None) -> Certificate:
        """Bound on max ℓ − min ℓ over all possible tokens, from the parameters alone.

        norm: under "raw" the largest ‖x‖ of a token. Without it nothing is known, and `holds` is False. After an RMS
            norm with weight w it is at most √d·max|w|. The other scalings do not need it.
        With an amortiser only h ≤ N is known in advance, which gives no useful bound: `holds` is False.
        """
        raw = self.scaling == "raw"
        length = checks.finite("norm", norm, at_least=0) if raw and norm is not None else 1.0
        bound = self._logit_range(self.energy_scale * length**2, self.token_norm * length)
        if not raw or norm is not None:
            # A shorter token ("raw"), or one of zeros, may differ more where all of an energy difference is negative.
            other = self._logit_range(0.0, self.token_norm * length)
            bound = replace(bound, bound=torch.maximum(bound.bound, other.bound))
        if self.amortizer is None and (norm is not None or not raw):
            return bound
        hypothesis = f"{bound.hypothesis}, a known norm of x" if raw else bound.hypothesis
        return Certificate(torch.full_like(bound.bound, math.inf), torch.zeros_like(bound.holds), hypothesis)

    def _logit_range(self, energy_scale: float, linear_scale: float) -> Certificate:
        # ℓ is what the router returns: at the α of the weights, where they have their own.
        alpha = float(self.budget.weight_alpha) if self.budget.weighs_apart else self.alpha
        whole, likelihood = (alpha, 1.0) if self.dial == "posterior" else (1.0, alpha)
        return logit_range_bound(
            self.frames,
            self.kappa,
            alpha=whole,
            scale=likelihood * energy_scale,
            linear=self.mu,
            linear_scale=likelihood * linear_scale,
            log_prior=self.log_prior_correction(),
        )

    def geometry_figures(self) -> dict[str, Tensor]:
        if self.frames.is_meta:  # offloaded by accelerate
            return {}
        frames = self.frames.float()
        overlap_NN = geometry.overlap(frames)
        return {
            "max_overlap": (overlap_NN - overlap_NN.diagonal().diag()).max() / self.rank,
            "orthonormality_error": geometry.orthonormality_error(frames),
            "kappa_min": self.kappa.min(),
            "kappa_max": self.kappa.max(),
        }

    def extra_repr(self) -> str:
        kind = "scalar" if self.log_kappa.ndim == 1 else "diagonal"
        options = f"rank={self.rank}, concentration={kind}, scaling={self.scaling}, prior={self.prior}"
        return f"{super().extra_repr()}, {options}"


def _squared_norm(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True).clamp(min=ZERO_TOKEN)


def _initial_frames(
    init: str | Tensor, dim: int, num_experts: int, rank: int, generator: torch.Generator | None
) -> Tensor:
    if isinstance(init, Tensor):
        want = (num_experts, dim, rank)
        checks.floating("init", init)
        checks.require(init.shape == want, f"init must have shape {want}, got {tuple(init.shape)}")
        checks.all_finite("init", init)
        error = float(geometry.orthonormality_error(init))
        checks.require(error < 1e-3, f"init must hold orthonormal frames, got max|UᵀU−I| = {error:.2g}")
        frames = init.detach().float()
        # Frames in 16 bits are off by more than rounding, and would look as if an optimiser had moved them.
        return geometry.orthonormalize(frames) if error > 1e-6 else frames.clone().contiguous()
    checks.one_of("init", init, ("haar", "identity", "pca"))
    if init == "identity":
        return geometry.identity_frames(dim, rank, num_experts)
    return geometry.haar_frames(dim, rank, num_experts, generator=generator)


def grassmann_logits_reference(
    x_TD: Tensor,
    frames_NDK: Tensor,
    kappa: Tensor,
    *,
    alpha: float = 1.0,
    scale: float = 1.0,
    h_TN: Tensor | None = None,
) -> Tensor:
    """The specification: α h_e tr(Λ_e U_eᵀ x xᵀ U_e) by loops over tokens and experts, in fp64.

    eq:grmoe_gating with Λ_e in frame coordinates (a d×d diagonal times P would be indefinite), eq:grmoe_scalar
    for kappa (N,), eq:alpha_sparsity for α ≠ 1 and eq:amortized for h. x is taken as it is; `scale` is c.
    """
    x, U, kappa = x_TD.double(), frames_NDK.double(), kappa.double()
    logits = torch.empty(len(x), len(U), dtype=torch.float64)
    for t in range(len(x)):
        for e in range(len(U)):
            Lambda = torch.diag(kappa[e].expand(U.shape[-1]))
            trace = torch.trace(Lambda @ U[e].T @ torch.outer(x[t], x[t]) @ U[e])
            logits[t, e] = alpha * scale * trace * (1.0 if h_TN is None else h_TN[t, e].double())
    return logits
