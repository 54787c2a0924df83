"""Riemannian Adam for frames: the expert subspaces stay orthonormal while they are trained.

The paper trains U_e "on the Stiefel manifold using Riemannian Adam" (section "Training Objective"). With a scalar κ_e
the gate depends on the subspace alone (U→UO changes nothing), so its frames live on the Grassmann manifold. A diagonal
Λ_e tells the columns apart and needs the Stiefel manifold. `GrassmannAdam` does both.

All frames of one size, of all experts and all layers, are stacked and updated together. The number of kernels depends
neither on the number of experts nor, on a GPU, on the number of layers.

Legend: N frames of a stack (experts × layers), D model width d, K subspace rank k. `_N11` is one number per frame,
kept broadcastable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from grmoe import checks
from grmoe.optim.polar import gram_error, inverse_sqrt_minus_one, note_orthonormal, repair
from grmoe.optim.stacks import chunks, existing_stack, slices, stack

Manifold = Literal["grassmann", "stiefel"]

# Rounding errors may add this much to the spectrum of YᵀY − I, beyond the [0, max_step²] of exact arithmetic.
_ROUNDING_ROOM = 0.01

# A group's options. Parameters share a stack if these, the frame's shape, dtype, device and step count agree.
_OPTIONS = ("lr", "betas", "eps", "manifold", "max_step", "maximize")


class GrassmannAdam(Optimizer):
    """Riemannian Adam (Bécigneul & Ganea, 2019) on batches of frames of shape (..., d, k), fp32 or fp64.

    One step, for each frame U with Euclidean gradient G, momentum m and scalar second moment v:

        H = Π_U(G) = G − U(UᵀG)              "grassmann"; for "stiefel" G − U sym(UᵀG)
        m ← Π_U(β₁ m + (1−β₁) G)             = β₁ Π_U(m) + (1−β₁) H
        v ← β₂ v + (1−β₂) ‖H‖²_F
        ξ = −lr · m̂ / (√v̂ + eps)             bias-corrected, ‖ξ‖_F at most `max_step`
        U ← Y (YᵀY)^{-1/2},  Y = U + ξ       the polar retraction

    `grmoe.optim.reference.reference_step` is this step in plain formulas.

    The old m is tangent at the previous point. Π_U carries it to the current one: it *is* the vector transport, and is
    done together with the projection of the new gradient.

    **Orthonormality.** max|UᵀU − I| ≤ 1e-6 (fp32) after every step. In exact arithmetic YᵀY = I + ξᵀξ, because ξ is
    tangent. In floating point it is not quite tangent: where the gradient is almost vertical (of the form U·S, always
    if k = d), the projection leaves rounding errors, and Adam's normalisation magnifies them. So the step measures
    YᵀY, and each step removes the rounding errors of all steps before it.

    **lr.** v is one number per frame, because an elementwise v would not be invariant under rotations of the frame. So
    lr is the Frobenius length of a step of a whole frame: √(dk) times shorter than a step of elementwise Adam with the
    same lr. Give frames their own lr, √(dk) times that of the weights: 0.058 for 3e-4, d = 768 and k = 48. The default
    0.02 is on the careful side.

    **Huge gradients.** Entries of G beyond L = √max/(2√(dk)), max the dtype's largest number, count as ±L, infinite
    ones too. L is 5e16 for a 768×48 frame in fp32. Then no square overflows, and frames stay orthonormal. NaN reaches
    the frames, as it reaches the weights in torch's Adam, unless `found_inf` says to skip the step.

    **Damaged frames.** Frames far from orthonormal (‖UᵀU − I‖_F > 0.01) are re-orthonormalised by QR. The optimiser
    checks this when it first sees a parameter, after `load_state_dict`, and whenever other code has written to the
    parameter or replaced its memory since the last step. Its version counter and address tell this without touching
    the device, so all other steps never wait for the device. Writes through `.data` bypass the version counter: use
    `with torch.no_grad(): p.copy_(...)`.

    Args:
        params: parameters or groups of them. Each group may set any of the options below.
        lr: Frobenius length of a step (see above).
        betas: decay of the two moments.
        eps: added to √v̂.
        manifold: "grassmann" if the loss depends on the subspace alone, "stiefel" if it depends on the columns too.
        max_step: largest Frobenius norm of ξ, in (0, 1]. It guarantees that Newton–Schulz converges.
        maximize: maximise the objective instead of minimising it.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float = 0.02,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        manifold: Manifold = "grassmann",
        max_step: float = 0.5,
        maximize: bool = False,
    ) -> None:
        # (version, address) of each parameter after our last step. Not part of the state: after a copy, a pickle or a
        # loaded state every frame is checked once.
        self._last_seen: dict[Tensor, tuple[int, int]] = {}
        self._workspaces: dict[Any, Tensor] = {}
        # The convention of torch's fused optimisers: a 0-d tensor on the parameters' device. If it is one when the
        # device reaches a step, the step changes nothing. The host has counted that step: call `uncount_steps`.
        self.found_inf: Tensor | None = None
        values = (lr, betas, eps, manifold, max_step, maximize)
        super().__init__(params, dict(zip(_OPTIONS, values, strict=True)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._last_seen, self._workspaces, self.found_inf = {}, {}, None
        for entry in self.state.values():
            # Copies, because moments are updated in place and the loaded state may be in use elsewhere.
            entry.update(
                {
                    key: value.clone(memory_format=torch.contiguous_format)
                    for key, value in entry.items()
                    if isinstance(value, Tensor)
                }
            )
            # torch.load(map_location="cuda") moves the counters too; reading them there stalls the device.
            if "step" in entry:
                entry["step"] = torch.as_tensor(entry["step"], dtype=torch.float32, device="cpu")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, _ in active:
            grad = p.grad
            ok = not (grad.is_sparse or grad.is_complex())
            checks.require(ok, f"gradients must be dense and real, got {grad.layout} {grad.dtype}")
        if not active:
            return loss
        for p, _ in active:
            if not self.state[p]:
                self.state[p].update(self.initial_state(p))
        torch._foreach_add_([self.state[p]["step"] for p, _ in active], 1.0)
        buckets: dict[Any, list[Tensor]] = {}
        for p, group in active:
            options = tuple(tuple(group[o]) if o == "betas" else group[o] for o in _OPTIONS)
            key = (p.shape[-2:], p.dtype, p.device, int(self.state[p]["step"]), options)
            buckets.setdefault(key, []).append(p)
        for (_, _, _, count, options), params in buckets.items():
            for chunk in chunks(params):
                self._update(chunk, count, *options)
        return loss

    @staticmethod
    def initial_state(p: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step. `inner` is Uᵀm."""
        return {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(p, memory_format=torch.contiguous_format, requires_grad=False),
            "exp_avg_sq": p.new_zeros((*p.shape[:-2], 1, 1)),
            "inner": p.new_zeros((*p.shape[:-2], p.shape[-1], p.shape[-1])),
        }

    def uncount_steps(self, steps: int) -> None:
        """Subtract from the step counters the last steps that `found_inf` skipped on the device."""
        for entry in self.state.values():
            entry["step"] -= steps

    def _workspace(self, like_NDK: Tensor) -> Tensor:
        """A scratch tensor of the size of a stack, kept between steps.

        The system gives out fresh memory of this size page by page. On the CPU that costs as much as half of the
        arithmetic.
        """
        key = (like_NDK.shape, like_NDK.dtype, like_NDK.device)
        if key not in self._workspaces:
            self._workspaces[key] = torch.empty_like(like_NDK)
        return self._workspaces[key]

    def _moments(self, params: list[Tensor], name: str) -> Tensor:
        """The stacked moments of a bucket. The state holds slices of this stack, so writing to it is enough.

        The stack is built on the first step of a bucket and after its state was replaced.
        """
        parts = [self.state[p][name] for p in params]
        if len(parts) == 1:
            return stack(parts)
        if (stacked := existing_stack(parts)) is None:
            stacked = stack(parts)
            for p, part in zip(params, slices(stacked, params), strict=True):
                self.state[p][name] = part
        return stacked

    def _update(
        self,
        params: list[Tensor],
        count: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        manifold: Manifold,
        max_step: float,
        maximize: bool,
    ) -> None:
        """One step of all frames of a stack. Its cost is four products of frames."""
        U_NDK = stack(params)
        Y_NDK = self._workspace(U_NDK)
        # Nothing needs the gradient any more when Y is written.
        bound = _largest_entry(U_NDK)
        G_NDK = torch.clamp(stack([p.grad for p in params if p.grad is not None]), -bound, bound, out=Y_NDK)
        m_NDK, v_N11 = self._moments(params, "exp_avg"), self._moments(params, "exp_avg_sq")
        UtM_NKK = self._moments(params, "inner")
        changed = (U_NDK, m_NDK, v_N11, UtM_NKK)
        touched = any(self._last_seen.get(p) != (p._version, p.data_ptr()) for p in params)
        # A state that was just loaded usually belongs to its frames. Then both stay as they are.
        if touched and _needs_repair(U_NDK, m_NDK, UtM_NKK):
            repair(U_NDK)
            torch.bmm(U_NDK.mT, m_NDK, out=UtM_NKK)
        # After the repair: a step that is skipped must not undo it.
        before = [t.clone() for t in changed] if self.found_inf is not None else []

        # Moments: v from ‖H‖², m projected at the current point by means of the stored Uᵀm.
        UtG_NKK = torch.bmm(U_NDK.mT, G_NDK)
        v_N11.lerp_(_tangent_square(G_NDK, _vertical(UtG_NKK, manifold)), 1 - betas[1])
        if maximize:
            G_NDK, UtG_NKK = G_NDK.neg(), UtG_NKK.neg()
        m_NDK.lerp_(G_NDK, 1 - betas[0])
        UtM_NKK.lerp_(UtG_NKK, 1 - betas[0])
        S_NKK = _vertical(UtM_NKK, manifold)
        m_NDK.baddbmm_(U_NDK, S_NKK, alpha=-1)

        # The step ξ = −scale·m and the point Y = U + ξ.
        denom_N11 = (v_N11 / (1 - betas[1] ** count)).sqrt_().add_(eps)
        scale_N11 = lr / (1 - betas[0] ** count) / denom_N11
        norm_N11 = _norm(m_NDK)
        scale_N11 = torch.minimum(scale_N11, _largest_scale(norm_N11, S_NKK, max_step))
        torch.addcmul(U_NDK, m_NDK, scale_N11, value=-1, out=Y_NDK)

        # The polar retraction, with the measured Gram matrix of Y.
        E_NKK = gram_error(Y_NDK)
        Z_NKK = inverse_sqrt_minus_one(E_NKK, -_ROUNDING_ROOM, max_step**2 + _ROUNDING_ROOM)
        torch.baddbmm(Y_NDK, Y_NDK, Z_NKK, out=U_NDK)

        # Uᵀm at the new point U ← Y(I+Z) is (I+Z)(Uᵀm − scale·mᵀm). The projection left Uᵀm = UtM − S at the old one.
        UtM_NKK.sub_(S_NKK).addcmul_(E_NKK, _gram_weight(norm_N11, scale_N11, U_NDK), value=-1)
        UtM_NKK.add_(torch.bmm(Z_NKK, UtM_NKK))

        for new, old in zip(changed, before, strict=False):
            assert self.found_inf is not None
            torch.where(self.found_inf.bool(), old, new, out=new)
        if U_NDK.data_ptr() != params[0].data_ptr():  # a stack of several; a single one was updated in place
            torch._foreach_copy_(params, slices(U_NDK, params))
        self._last_seen.update((p, (p._version, p.data_ptr())) for p in params)
        note_orthonormal(params)


def _largest_entry(like_DK: Tensor) -> float:
    """L: the squared norm of a d×k matrix with entries up to ±L is at most a quarter of the dtype's largest number."""
    D, K = like_DK.shape[-2:]
    return math.sqrt(torch.finfo(like_DK.dtype).max / (4 * D * K))


def _norm(X_N: Tensor) -> Tensor:
    """Frobenius norm of each matrix."""
    return torch.linalg.vector_norm(X_N, dim=(1, 2), keepdim=True)


def _vertical(UtX_NKK: Tensor, manifold: Manifold) -> Tensor:
    """S such that X − U·S is tangent at U, from UᵀX.

    Grassmann: UᵀX itself, which leaves the horizontal part (I − UUᵀ)X. Stiefel: its symmetric half.
    """
    return UtX_NKK if manifold == "grassmann" else (UtX_NKK + UtX_NKK.mT) / 2


def _tangent_square(G_NDK: Tensor, S_NKK: Tensor) -> Tensor:
    """‖G − US‖²_F = ‖G‖² − ‖S‖² per frame, without forming G − US.

    The difference is accurate to a few rounding errors of ‖G‖², so it is kept above that. A frame with a tangent
    gradient below a thousandth of the whole (fp32) has found its subspace. There the bound turns Adam's normalised
    step into a plain gradient step, which converges.
    """
    whole_N11, part_N11 = _norm(G_NDK).square_(), _norm(S_NKK).square_()
    return torch.maximum(whole_N11 - part_N11, whole_N11 * (8 * torch.finfo(G_NDK.dtype).eps))


def _largest_scale(norm_N11: Tensor, S_NKK: Tensor, max_step: float) -> Tensor:
    """The largest factor of m in a step: ‖ξ‖ ≤ max_step, and rounding errors stay within `_ROUNDING_ROOM`.

    The projection of W = m + US onto m leaves rounding errors of about √k·eps·‖W‖, ‖W‖² = ‖m‖² + ‖S‖². They count
    twice in YᵀY. A frame that does not move (m = 0) needs no bound: the quotients are then infinite.
    """
    rounding = 8 * S_NKK.shape[-1] ** 0.5 * torch.finfo(S_NKK.dtype).eps
    whole_N11 = torch.hypot(norm_N11, _norm(S_NKK))
    return torch.minimum(max_step / norm_N11, _ROUNDING_ROOM / rounding / whole_N11)


def _gram_weight(norm_N11: Tensor, scale_N11: Tensor, U_NDK: Tensor) -> Tensor:
    """w such that w·(YᵀY − I) estimates scale·mᵀm, because YᵀY − I = scale²·mᵀm + rounding errors.

    w = 1/scale if ‖ξ‖² is far above the rounding errors k·eps of YᵀY, and falls to 0 below them (Wiener's filter).
    What is lost there is less than √eps of ‖m‖, symmetric, and so removed by the polar factor.
    """
    noise = U_NDK.shape[-1] * torch.finfo(U_NDK.dtype).eps
    length_N11 = scale_N11 * norm_N11
    return norm_N11 * length_N11**3 / (length_N11**4 + noise**2)


def _needs_repair(U_NDK: Tensor, m_NDK: Tensor, UtM_NKK: Tensor) -> bool:
    """Whether frames are not orthonormal, or the stored Uᵀm belongs to other frames. Waits for the device."""
    healthy = gram_error(U_NDK).abs().amax() <= 100 * torch.finfo(U_NDK.dtype).eps
    stale = _norm(torch.bmm(U_NDK.mT, m_NDK) - UtM_NKK) > _ROUNDING_ROOM * _norm(m_NDK)
    return not bool(healthy & ~stale.any())


def _check_group(group: dict[str, Any]) -> None:
    checks.finite("lr", group["lr"], at_least=0.0)
    checks.finite("eps", group["eps"], at_least=0.0)
    betas = group["betas"]
    two = isinstance(betas, tuple | list) and len(betas) == 2
    checks.require(two, f"betas must be two numbers in [0, 1), got {betas!r}")
    for beta in betas:
        checks.require(
            checks.finite("betas", beta, at_least=0.0) < 1, f"betas must be in [0, 1), got {betas!r}"
        )
    checks.one_of("manifold", group["manifold"], ("grassmann", "stiefel"))
    checks.fraction("max_step", group["max_step"])
    for p in group["params"]:
        checks.frames("params", p)
        checks.require(p.numel() > 0, f"params must hold at least one frame, got shape {tuple(p.shape)}")
        checks.require(
            p.dtype in (torch.float32, torch.float64),
            f"frames must be float32 or float64, got {p.dtype}: 16-bit frames stall, because a step is smaller "
            "than their rounding error; keep the frames in float32 and cast them where they are used",
        )
