"""Scores of a gate that takes several kernels: products with the tokens, then amortiser and linear term.

    a_e = c·Σ_j λ_ej (u_ejᵀx)²/‖x‖²   or   w_eᵀx                            (`project`)
    score_e = κ_e a_e · N·softmax(z)_e + length·m_e/‖x‖                     (`blend`; every part but a_e may be missing)

`project` is the gate's own kernel without dial, prior and choice. Its ‖x‖² has a gradient, so that a linear term needs
no pass of its own over the tokens. The compiler makes one kernel of `blend_reference` by itself.

Legend: T tokens, D model width, N experts (padded to a power of two), K rank; B tokens of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from grmoe.kernels import gate
from grmoe.kernels.early import await_inputs
from grmoe.kernels.gate_kernels import ZERO_TOKEN
from grmoe.kernels.launch import ceil_div, launch, power_of_2
from grmoe.kernels.runtime import FIXED, PER_TOKEN, SCORES, attempt, missing
from grmoe.kernels.select import softmax_BN

# -- products with the tokens ----------------------------------------------------------------------------------


def project_reference(
    x_TD: Tensor, matrix: Tensor, log_weight: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The specification: (a_TN, ‖x‖²_T)."""
    x_TD = x_TD.to(matrix.dtype)
    norm_T = x_TD.square().sum(-1).clamp(min=ZERO_TOKEN.value)
    if log_weight is None:
        return x_TD @ matrix.T, norm_T
    weight = log_weight.exp()
    squares_TNK = torch.einsum("td,ndk->tnk", x_TD, matrix).square()
    sums_TN = (squares_TNK * (weight if weight.ndim == 2 else weight.unsqueeze(-1))).sum(-1)
    return sums_TN * scale / norm_T.unsqueeze(-1), norm_T


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: Tensor, log_weight: Tensor | None, scale: float, thin: bool, save: bool
    ) -> tuple[Tensor, Tensor]:
        run: Any = gate._forward_op if torch.compiler.is_compiling() else gate._forward
        # A dial, a prior and a budget that nobody reads.
        prior = torch.empty(len(matrix), dtype=torch.float32, device=x.device)
        unread, cap = prior.new_empty(()), prior.new_empty((), dtype=torch.int32)
        numbers = (unread, None, unread, cap, None, None, None, scale, True, SCORES)
        more = (1, False, 1, 0, FIXED, PER_TOKEN, thin, save)
        values, probs, _, selected, _, norm, *packed = run(x, matrix, log_weight, prior, *numbers, *more)
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)
        if log_weight is None:
            ctx.mark_non_differentiable(norm)
        ctx.save_for_backward(x, matrix, log_weight, unread, probs, None, selected, norm, *packed)
        ctx.scale = scale
        return values, norm

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any, grad_norm: Any) -> tuple[Any, ...]:
        if grad is None and grad_norm is None:
            return (None,) * 6
        run: Any = gate._backward_op if torch.compiler.is_compiling() else gate._backward
        # Read once: checkpointing recomputes at the first access and allows no second.
        saved = ctx.saved_tensors
        x, matrix, log_weight = saved[:3]
        if log_weight is None:
            grad_norm = None
        found = attempt(
            "gate backward",
            lambda: run(grad, None, None, grad_norm, *saved, ctx.scale, True, False, True)[:3],
            lambda: _project_backward_plain((grad, grad_norm), x, matrix, log_weight, ctx.scale),
        )
        return found[0], found[1], None if log_weight is None else found[2], None, None, None


def _project_backward_plain(
    grads: tuple[Tensor | None, Tensor | None],
    x: Tensor,
    matrix: Tensor,
    log_weight: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """By autograd through the specification, in case the kernel does not compile."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, matrix, log_weight) if t is not None]
        values = project_reference(leaves[0], leaves[1], None if log_weight is None else leaves[2], scale)
        given = [(value, g) for value, g in zip(values, grads, strict=True) if g is not None]
        return torch.autograd.grad(
            [v for v, _ in given], leaves, [g for _, g in given], allow_unused=True, materialize_grads=True
        )


def project(
    x_TD: Tensor, matrix: Tensor, log_weight: Tensor | None = None, scale: float = 1.0, thin: bool = False
) -> tuple[Tensor, Tensor]:
    """(a_TN, ‖x‖²_T) in fp32, products in x's precision: of frames (N, D, K) with λ = exp(log_weight), (N,) or (N, K);
    or x·Wᵀ for W (N, D), where the second result means nothing. thin: as in `grmoe.kernels.gate.gate`."""
    more = missing(x_TD.shape[1], x_TD)
    if more:  # rows of whole 16 bytes; zeros change neither products nor lengths
        x_TD = pad(x_TD, (0, more))
        matrix = pad(matrix, (0, 0, 0, more) if matrix.ndim == 3 else (0, more))
    learned = (x_TD, matrix, log_weight)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in learned)
    found: tuple[Tensor, Tensor] = _Project.apply(x_TD, matrix, log_weight, scale, thin, save)
    return found


# -- amortiser and linear term ---------------------------------------------------------------------------------


class Parts(NamedTuple):
    """What a score is made of, all fp32."""

    energy_TN: Tensor
    log_kappa_N: Tensor | None = None
    network_TN: Tensor | None = None
    """z, the amortiser's output."""
    linear_TN: Tensor | None = None
    norm_T: Tensor | None = None
    """‖x‖² of the linear term, floored; None: that term is not divided."""


def blend_reference(parts: Parts, length: float) -> Tensor:
    """The specification."""
    score_TN = parts.energy_TN
    if parts.log_kappa_N is not None:
        score_TN = parts.log_kappa_N.exp() * score_TN
    if parts.network_TN is not None:
        score_TN = torch.softmax(parts.network_TN, -1) * score_TN.shape[-1] * score_TN
    if parts.linear_TN is None:
        return score_TN
    if parts.norm_T is None:
        return score_TN + parts.linear_TN
    # At x = 0 the direction is undefined and the gradient of x/‖x‖ unbounded: padding gets no linear term.
    norm_T1 = parts.norm_T.unsqueeze(-1)
    linear_TN = torch.where(norm_T1 > ZERO_TOKEN.value, length * parts.linear_TN / norm_T1.sqrt(), 0.0)
    return score_TN + linear_TN


@triton.jit
def _factors(
    log_kappa_ptr, network_ptr, norm_ptr, token, expert, place, inside, num_tokens, length,
    num_experts: tl.constexpr, KAPPA: tl.constexpr, NETWORK: tl.constexpr, LINEAR: tl.constexpr, NORM: tl.constexpr,
    B: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """(κ·N·softmax(z), softmax(z), length/‖x‖, ‖x‖²) of a tile; ones where a part is missing."""
    factor_BN, share_BN = tl.zeros((B, NP), tl.float32) + 1.0, tl.zeros((B, NP), tl.float32) + 1.0
    scale_B, norm_B = tl.zeros((B,), tl.float32) + 1.0, tl.zeros((B,), tl.float32) + 1.0
    if KAPPA:
        kappa_N = tl.exp(tl.load(log_kappa_ptr + expert, mask=expert < num_experts, other=0.0))
        factor_BN = factor_BN * kappa_N[None, :]
    if NETWORK:
        z_BN = tl.load(network_ptr + place, mask=inside, other=0.0)
        share_BN = softmax_BN(tl.where((expert < num_experts)[None, :], z_BN, float("-inf")))
        factor_BN = factor_BN * (share_BN * num_experts)
    if LINEAR and NORM:
        norm_B = tl.load(norm_ptr + token, mask=token < num_tokens, other=1.0)
        scale_B = tl.where(norm_B > ZERO_TOKEN, length * tl.rsqrt(norm_B), 0.0)
    return factor_BN, share_BN, scale_B, norm_B


@triton.jit(do_not_specialize=["num_tokens"])
def blend_kernel(
    energy_ptr, log_kappa_ptr, network_ptr, linear_ptr, norm_ptr, out_ptr, num_tokens, length,
    num_experts: tl.constexpr, KAPPA: tl.constexpr, NETWORK: tl.constexpr, LINEAR: tl.constexpr, NORM: tl.constexpr,
    NP: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    await_inputs()
    token, expert = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, NP)
    inside = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    place = token[:, None].to(tl.int64) * num_experts + expert[None, :]
    factor_BN, _, scale_B, _ = _factors(
        log_kappa_ptr, network_ptr, norm_ptr, token, expert, place, inside, num_tokens, length,
        num_experts, KAPPA, NETWORK, LINEAR, NORM, B, NP,
    )  # fmt: skip
    score_BN = factor_BN * tl.load(energy_ptr + place, mask=inside, other=0.0)
    if LINEAR:
        score_BN += scale_B[:, None] * tl.load(linear_ptr + place, mask=inside, other=0.0)
    tl.store(out_ptr + place, score_BN, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def blend_backward_kernel(
    grad_ptr, energy_ptr, log_kappa_ptr, network_ptr, linear_ptr, norm_ptr,
    g_energy_ptr, g_kappa_ptr, g_network_ptr, g_linear_ptr, g_norm_ptr, num_tokens, length,
    num_experts: tl.constexpr, KAPPA: tl.constexpr, NETWORK: tl.constexpr, LINEAR: tl.constexpr, NORM: tl.constexpr,
    NP: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """With g = ∂loss/∂score, f the factors of a and m = f·a:

        ∂a = g f,   ∂log κ = Σ_t g m,   ∂z = g m − softmax(z)·Σ_e g m,   ∂linear = g·scale,
        ∂‖x‖² = −½ Σ_e g·linear·scale/‖x‖²

    g_kappa (programs, N) has the sums over a program's tokens.
    """
    await_inputs()
    token, expert = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, NP)
    inside = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    place = token[:, None].to(tl.int64) * num_experts + expert[None, :]
    factor_BN, share_BN, scale_B, norm_B = _factors(
        log_kappa_ptr, network_ptr, norm_ptr, token, expert, place, inside, num_tokens, length,
        num_experts, KAPPA, NETWORK, LINEAR, NORM, B, NP,
    )  # fmt: skip
    grad_BN = tl.load(grad_ptr + place, mask=inside, other=0.0)
    tl.store(g_energy_ptr + place, grad_BN * factor_BN, mask=inside)
    through_BN = grad_BN * factor_BN * tl.load(energy_ptr + place, mask=inside, other=0.0)
    if KAPPA:
        sum_N = tl.sum(through_BN, axis=0)
        tl.store(g_kappa_ptr + tl.program_id(0) * num_experts + expert, sum_N, mask=expert < num_experts)
    if NETWORK:
        z_BN = through_BN - share_BN * tl.sum(through_BN, axis=1)[:, None]
        tl.store(g_network_ptr + place, z_BN, mask=inside)
    if LINEAR:
        tl.store(g_linear_ptr + place, grad_BN * scale_B[:, None], mask=inside)
        if NORM:
            linear_BN = tl.load(linear_ptr + place, mask=inside, other=0.0)
            sum_B = tl.sum(grad_BN * linear_BN, axis=1) * scale_B
            tl.store(g_norm_ptr + token, -0.5 * sum_B / norm_B, mask=token < num_tokens)


def _constants(parts: Parts) -> tuple[int, tuple[Any, ...]]:
    """(programs, constants) of a launch."""
    T, N = parts.energy_TN.shape
    NP = power_of_2(N)
    B = max(2, 2048 // NP)
    return ceil_div(T, B), (N, *(part is not None for part in parts[1:]), NP, B)


def _blend_backward(grad: Tensor, parts: Parts, length: float) -> tuple[Tensor | None, ...]:
    programs, constants = _constants(parts)
    energy, log_kappa = parts.energy_TN, parts.log_kappa_N
    grads: list[Tensor | None] = [None if part is None else torch.empty_like(part) for part in parts]
    if log_kappa is not None:
        grads[1] = energy.new_empty(programs, energy.shape[1])
    pointers = (energy if t is None else t for t in (*parts, *grads))
    launch(blend_backward_kernel, (programs,), (grad, *pointers, len(energy), length), constants)
    if grads[1] is not None:
        grads[1] = grads[1].sum(0)
    return tuple(grads)


class _Blend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, length: float, *parts: Any) -> Tensor:
        given = Parts(*parts)
        programs, constants = _constants(given)
        out = torch.empty_like(given.energy_TN)
        pointers = (given.energy_TN if part is None else part for part in given)
        launch(blend_kernel, (programs,), (*pointers, out, len(out), length), constants)
        ctx.save_for_backward(*parts)
        ctx.length = length
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts = Parts(*ctx.saved_tensors)

        def plain() -> tuple[Tensor | None, ...]:
            with torch.enable_grad():
                leaves: list[Any] = [
                    None if part is None else part.detach().requires_grad_() for part in parts
                ]
                learned = [leaf for leaf in leaves if leaf is not None]
                found = iter(torch.autograd.grad(blend_reference(Parts(*leaves), ctx.length), learned, grad))
            return tuple(None if leaf is None else next(found) for leaf in leaves)

        grads = attempt(
            "scores backward", lambda: _blend_backward(grad.contiguous(), parts, ctx.length), plain
        )
        return None, *grads


def blend(parts: Parts, length: float) -> Tensor:
    """score_TN. `length` is that of a token in the linear term."""
    if all(part is None for part in parts[1:]):
        return parts.energy_TN
    if torch.compiler.is_compiling() or len(parts.energy_TN) == 0:
        return blend_reference(parts, length)
    dense = (None if part is None else part.contiguous() for part in parts)
    return attempt("scores", lambda: _Blend.apply(length, *dense), lambda: blend_reference(parts, length))
