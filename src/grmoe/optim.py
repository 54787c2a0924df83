"""Riemannian Adam for frames: the expert subspaces stay orthonormal while they are trained.

The paper trains U_e "on the Stiefel manifold using Riemannian Adam" (section "Training Objective"). The gate
with a scalar κ_e sees the subspace alone (U→UO changes nothing), so its frames live on the Grassmann
manifold; a diagonal Λ_e tells the columns apart and needs the Stiefel manifold. `GrassmannAdam` does both.

All frames of one size, of all experts and of all layers, are stacked and updated together: the number of
kernels depends neither on the number of experts nor, on a GPU, on the number of layers. On the CPU a stack is
cut where it would outgrow the cache, and the frames of one layer alone are updated where they lie.

Legend: N frames of one bucket (experts × layers), D model width d, K subspace rank k; `_N11` is one number
per frame, kept broadcastable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grmoe import checks
from grmoe.geometry import orthonormalize

__all__ = ["GrassmannAdam", "Manifold", "ParameterSplit", "split_parameters"]

Manifold = Literal["grassmann", "stiefel"]

# Frames with ‖UᵀU − I‖_F above this are re-orthonormalised by QR. fp32 rounding leaves about 1e-6, and a trip
# through bf16 about 3e-3 in a 768×48 frame, which polishing removes by itself.
_DAMAGED = 1e-2

# Every so many steps the frames are measured in fp64 and polished. A step adds about 1e-8 to max|UᵀU − I|.
_POLISH_EVERY = 32

# On the CPU, frames are stacked up to this many elements (1 MiB of fp32). The update passes over them a dozen
# times: 48 frames of 768×48 in one stack take 16.5 ms, the same frames layer by layer 12.8 ms.
_CPU_STACK = 1 << 18

# A group's options; together with shape, dtype, device and step count they decide who shares a bucket.
_OPTIONS = ("lr", "betas", "eps", "manifold", "max_step", "maximize")


def _vertical(UtX_NKK: Tensor, manifold: Manifold) -> Tensor:
    """S such that X − U·S is tangent at U, from UᵀX.

    Grassmann: UᵀX itself, which leaves the horizontal part (I − UUᵀ)X. Stiefel: its symmetric half.
    """
    return UtX_NKK if manifold == "grassmann" else (UtX_NKK + UtX_NKK.mT) / 2


def _tangent_square(G_NDK: Tensor, S_NKK: Tensor) -> Tensor:
    """‖G − US‖²_F = ‖G‖² − ‖S‖² per frame, without forming G − US.

    The difference is good to a few rounding errors of ‖G‖², so it is not let below that: a frame whose
    tangent gradient is under a thousandth of the whole (fp32) has found its subspace, and there the floor
    turns Adam's normalised step into a plain gradient step, which settles.
    """
    whole_N11 = torch.linalg.vector_norm(G_NDK, dim=(1, 2), keepdim=True).square_()
    part_N11 = torch.linalg.vector_norm(S_NKK, dim=(1, 2), keepdim=True).square_()
    return torch.maximum(whole_N11 - part_N11, whole_N11 * (8 * torch.finfo(G_NDK.dtype).eps))


def _inverse_sqrt_minus_one(E_NKK: Tensor, low: float, high: float) -> Tensor:
    """Z = (I + E)^{-1/2} − I for symmetric E with spectrum in [low, high], by Newton–Schulz.

    The usual X ← X(I + R/2), R = I − (I+E)X², written for Z = X − I, so that nothing is ever rounded next to
    a one: T = X² − I = 2Z + Z², R = −(E + T + ET), Z ← Z + (R + ZR)/2. It starts at the multiple of I that
    centres the interval and takes the residual r to ¾r² + ¼r³, so the number of iterations that reaches
    the rounding error is known beforehand: 3 in fp32 and 4 in fp64 for [0, 0.25]. Nothing is read back from
    the device. An iteration on k×k matrices costs 3k³ instead of the 2dk² of the same iteration on a frame.
    """
    centre, residual = 1 + (low + high) / 2, (high - low) / (2 + high + low)
    start = centre**-0.5
    # The first iteration needs no product: X is a multiple of the identity.
    Z_NKK = E_NKK * (-0.5 * start**3)
    Z_NKK.diagonal(dim1=-2, dim2=-1).add_(1.5 * start - 0.5 * start**3 - 1)
    residual = (3 + residual) / 4 * residual**2
    while residual > torch.finfo(E_NKK.dtype).eps / 4:
        T_NKK = torch.baddbmm(Z_NKK, Z_NKK, Z_NKK, beta=2)
        R_NKK = torch.baddbmm(E_NKK + T_NKK, E_NKK, T_NKK)  # minus the residual
        Z_NKK = torch.baddbmm(Z_NKK.sub(R_NKK, alpha=0.5), Z_NKK, R_NKK, alpha=-0.5)
        residual = (3 + residual) / 4 * residual**2
    return Z_NKK


def _polish(U_NDK: Tensor) -> None:
    """Bring frames back to orthonormal in place: U (UᵀU)^{-1/2} in fp64, by QR where they are damaged.

    Waits for the device to see whether any is damaged.
    """
    wide_NDK = U_NDK.double()
    error_NKK = torch.bmm(wide_NDK.mT, wide_NDK)
    error_NKK.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    bad_N = ~(torch.linalg.vector_norm(error_NKK, dim=(-2, -1)) <= _DAMAGED)  # NaN counts as damaged
    if bad_N.any():
        wide_NDK[bad_N] = orthonormalize(wide_NDK[bad_N])
        error_NKK[bad_N] = 0.0
    U_NDK.copy_(torch.baddbmm(wide_NDK, wide_NDK, _inverse_sqrt_minus_one(error_NKK, -_DAMAGED, _DAMAGED)))


def _stack(tensors: list[Tensor]) -> Tensor:
    """All frames of all tensors as one (N, D, K) tensor: a copy, or a view of a single contiguous tensor."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1, *tensors[0].shape[-2:])
    return torch.cat([t.reshape(-1, *t.shape[-2:]) for t in tensors])


def _chunks(params: list[Tensor]) -> Iterable[list[Tensor]]:
    """A bucket as a whole, or on the CPU cut into stacks that stay in the cache."""
    limit = _CPU_STACK if params[0].device.type == "cpu" else float("inf")
    chunk: list[Tensor] = []
    for p in params:
        if chunk and sum(q.numel() for q in chunk) + p.numel() > limit:
            yield chunk
            chunk = []
        chunk.append(p)
    yield chunk


def _slices(stacked: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of the parts of a stack, shaped as the tensors it was made of."""
    parts = stacked.split([t.shape[:-2].numel() for t in like])
    return [part.view(t.shape[:-2] + part.shape[1:]) for part, t in zip(parts, like, strict=True)]


class GrassmannAdam(Optimizer):
    """Riemannian Adam (Bécigneul & Ganea, 2019) on batches of frames of shape (..., d, k), fp32 or fp64.

    One step, for each frame U with Euclidean gradient G, momentum m and scalar second moment v:

        H = Π_U(G) = G − U(UᵀG)              "grassmann"; for "stiefel" G − U sym(UᵀG)
        m ← Π_U(β₁ m + (1−β₁) G)             = β₁ Π_U(m) + (1−β₁) H
        v ← β₂ v + (1−β₂) ‖H‖²_F
        ξ = −lr · m̂ / (√v̂ + eps)             bias-corrected, ‖ξ‖_F capped at `max_step`
        U ← Y (YᵀY)^{-1/2},  Y = U + ξ       the polar retraction

    The m that comes in was tangent at the previous point. Π_U carries it to the current one: it *is* the
    vector transport, done together with the projection of the new gradient. Since ξ ∝ m is tangent,
    YᵀY = I + ξᵀξ, and mᵀm gives three things at once: this Gram matrix, ‖m‖, and Uᵀm at the next point (the
    state `inner`), so a step takes four products with frames. What rounding adds is small, because only ξᵀξ
    is rounded and not I, and is removed every 32 steps by polishing with an fp64 Gram matrix.

    **lr.** v is one number per frame (an elementwise v would not be invariant under rotations of the frame),
    so lr is the Frobenius length of a step of a whole frame: √(dk) times shorter than a step of elementwise
    Adam with the same lr. Give frames their own lr, proportional to √k: lr = 0.003·√k turns each of the k
    directions by about 3 mrad per step, and the default 0.02 is that for k = 48.

    **Damaged frames.** Frames far from orthonormal (‖UᵀU − I‖_F > 0.01) are re-orthonormalised by QR. This is
    looked at when a parameter is first seen, after `load_state_dict`, whenever it has been written to or
    re-pointed by someone else since our last step (its version counter and address tell without touching the
    device), and at every polishing. Between these, a step never waits for the device. Writes through `.data`
    go past the version counter: use `with torch.no_grad(): p.copy_(...)`.

    Args:
        params: parameters or groups of them; each group may set any of the options below.
        lr: Frobenius length of a step (see above).
        betas: decay of the two moments.
        eps: added to √v̂.
        manifold: "grassmann" if the loss depends on the subspace alone, "stiefel" if on the columns too.
        max_step: largest Frobenius norm of ξ, in (0, 1]; it guarantees that Newton–Schulz converges.
        maximize: ascend.
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
        # (version, address) of each parameter as our last step left it. Not part of the state: a copy, a
        # pickle or a loaded state starts without it and looks at every frame once.
        self._left: dict[Tensor, tuple[int, int]] = {}
        self._workspaces: dict[Any, Tensor] = {}
        # As torch's fused optimisers have it: a 0-d tensor on the parameters' device. Where it is one when the device
        # gets to a step, the step changes nothing; `take_back` then tells the host, which has counted it.
        self.found_inf: Tensor | None = None
        values = (lr, betas, eps, manifold, max_step, maximize)
        super().__init__(params, dict(zip(_OPTIONS, values, strict=True)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._left, self._workspaces, self.found_inf = {}, {}, None
        for entry in self.state.values():
            # Copies, because moments are updated in place and a loaded state may belong to someone else.
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
        """One update of every parameter that has a gradient; returns the closure's loss, if there is one."""
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
            for chunk in _chunks(params):
                self._update(chunk, count, *options)
        return loss

    @staticmethod
    def initial_state(p: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""
        return {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(p, memory_format=torch.contiguous_format, requires_grad=False),
            "exp_avg_sq": p.new_zeros((*p.shape[:-2], 1, 1)),
            "inner": p.new_zeros((*p.shape[:-2], p.shape[-1], p.shape[-1])),
        }

    def take_back(self, steps: int) -> None:
        """Forget the last steps, which `found_inf` turned into nothing."""
        for entry in self.state.values():
            entry["step"] -= steps

    def _workspace(self, like_NDK: Tensor) -> Tensor:
        """A scratch tensor of the size of a stack, kept from step to step.

        Fresh memory of this size comes from the system page by page, which on the CPU costs as much as half
        of the arithmetic.
        """
        key = (like_NDK.shape, like_NDK.dtype, like_NDK.device)
        if key not in self._workspaces:
            self._workspaces[key] = torch.empty_like(like_NDK)
        return self._workspaces[key]

    def _moments(self, params: list[Tensor], name: str) -> Tensor:
        """The stacked moments of a bucket. The state holds slices of this stack, so writing to it is enough.

        They are gathered into a stack when the bucket first meets or after its state was replaced.
        """
        parts = [self.state[p][name] for p in params]
        if len(parts) == 1:
            return _stack(parts)
        stacked, offset = parts[0]._base, 0
        for part in parts:
            if stacked is None or part._base is not stacked or part.storage_offset() != offset:
                break
            offset += part.numel()
        else:
            if stacked is not None and offset == stacked.numel():
                return stacked
        stacked = _stack(parts)
        for p, part in zip(params, _slices(stacked, params), strict=True):
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
        """One step of all frames of a stack: four products with frames, and little else that costs."""
        U_NDK = _stack(params)
        G_NDK = _stack([p.grad for p in params if p.grad is not None])
        Y_NDK = self._workspace(U_NDK)
        m_NDK, v_N11 = self._moments(params, "exp_avg"), self._moments(params, "exp_avg_sq")
        UtM_NKK = self._moments(params, "inner")
        changed = (U_NDK, m_NDK, v_N11, UtM_NKK)
        before = [t.clone() for t in changed] if self.found_inf is not None else []
        touched = any(self._left.get(p) != (p._version, p.data_ptr()) for p in params)
        # A state that was just loaded usually belongs to its frames: then both are left as they are.
        if (touched and _needs_repair(U_NDK, m_NDK, UtM_NKK)) or count % _POLISH_EVERY == 0:
            _polish(U_NDK)
            torch.bmm(U_NDK.mT, m_NDK, out=UtM_NKK)

        UtG_NKK = torch.bmm(U_NDK.mT, G_NDK)
        v_N11.lerp_(_tangent_square(G_NDK, _vertical(UtG_NKK, manifold)), 1 - betas[1])
        if maximize:
            G_NDK, UtG_NKK = G_NDK.neg(), UtG_NKK.neg()
        m_NDK.lerp_(G_NDK, 1 - betas[0])
        UtM_NKK.lerp_(UtG_NKK, 1 - betas[0])
        S_NKK = _vertical(UtM_NKK, manifold)
        m_NDK.baddbmm_(U_NDK, S_NKK, alpha=-1)
        MtM_NKK = torch.bmm(m_NDK.mT, m_NDK)

        denom_N11 = (v_N11 / (1 - betas[1] ** count)).sqrt_().add_(eps)
        scale_N11 = lr / (1 - betas[0] ** count) / denom_N11
        norm_N = MtM_NKK.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt_()
        # max_step / 0 = ∞ is clamped to 1: a frame that does not move needs no cap.
        scale_N11 *= (max_step / (scale_N11 * norm_N.view(-1, 1, 1))).clamp_(max=1.0)
        Z_NKK = _inverse_sqrt_minus_one(MtM_NKK * scale_N11.square(), 0.0, max_step**2)
        torch.addcmul(U_NDK, m_NDK, scale_N11, value=-1, out=Y_NDK)
        torch.baddbmm(Y_NDK, Y_NDK, Z_NKK, out=U_NDK)
        # Uᵀm at the new point U ← Y(I+Z) is (I+Z)(Uᵀm − s mᵀm); at the old one the projection left UᵀM − S.
        UtM_NKK.sub_(S_NKK).addcmul_(MtM_NKK, scale_N11, value=-1)
        UtM_NKK.add_(torch.bmm(Z_NKK, UtM_NKK))
        for new, old in zip(changed, before, strict=False):
            assert self.found_inf is not None
            torch.where(self.found_inf.bool(), old, new, out=new)
        if U_NDK.data_ptr() != params[0].data_ptr():  # a stack of several; a single one was updated in place
            torch._foreach_copy_(params, _slices(U_NDK, params))
        self._left.update((p, (p._version, p.data_ptr())) for p in params)


def _needs_repair(U_NDK: Tensor, m_NDK: Tensor, UtM_NKK: Tensor) -> bool:
    """Whether frames are not orthonormal or the stored Uᵀm is not theirs. Waits for the device."""
    gram_NKK = torch.bmm(U_NDK.mT, U_NDK)
    gram_NKK.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    slack = 100 * torch.finfo(U_NDK.dtype).eps
    stale = (torch.bmm(U_NDK.mT, m_NDK) - UtM_NKK).abs().amax() > slack * (1 + m_NDK.abs().amax())
    return not bool((gram_NKK.abs().amax() <= slack) & ~stale)


def _check_group(group: dict[str, Any]) -> None:
    checks.finite("lr", group["lr"], at_least=0.0)
    checks.finite("eps", group["eps"], at_least=0.0)
    checks.require(len(group["betas"]) == 2, f"betas must be two numbers, got {group['betas']!r}")
    for beta in group["betas"]:
        checks.finite("betas", beta, at_least=0.0)
        checks.require(beta < 1, f"betas must be in [0, 1), got {group['betas']!r}")
    checks.one_of("manifold", group["manifold"], ("grassmann", "stiefel"))
    checks.fraction("max_step", group["max_step"])
    for p in group["params"]:
        checks.frames("params", p)
        checks.require(
            p.dtype in (torch.float32, torch.float64),
            f"frames must be float32 or float64, got {p.dtype}: 16-bit frames stall, since a step is smaller "
            "than their rounding error; keep the frames in float32 and cast them where they are used",
        )


def _reference_step(
    U_DK: Tensor,
    G_DK: Tensor,
    m_DK: Tensor,
    v: Tensor,
    count: int,
    *,
    lr: float = 0.02,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    manifold: Manifold = "grassmann",
    max_step: float = 0.5,
) -> tuple[Tensor, Tensor, Tensor]:
    """`GrassmannAdam` for one frame in plain formulas, polar factor by SVD: (U, m, v) after step `count`."""

    def project(X_DK: Tensor) -> Tensor:
        A_KK = U_DK.mT @ X_DK
        return X_DK - U_DK @ (A_KK if manifold == "grassmann" else (A_KK + A_KK.mT) / 2)

    H_DK = project(G_DK)
    m_DK = project(betas[0] * m_DK) + (1 - betas[0]) * H_DK
    v = betas[1] * v + (1 - betas[1]) * H_DK.square().sum()
    xi_DK = -lr * m_DK / (1 - betas[0] ** count) / ((v / (1 - betas[1] ** count)).sqrt() + eps)
    xi_DK = xi_DK * min(1.0, max_step / max(float(xi_DK.norm()), 1e-300))
    left_DK, _, right_KK = torch.linalg.svd(U_DK + xi_DK, full_matrices=False)
    return left_DK @ right_KK, m_DK, v


class ParameterSplit(NamedTuple):
    """A model's trainable parameters by the optimiser they need; each appears once."""

    frame_groups: list[dict[str, Any]]
    kappa: list[nn.Parameter]
    rest: list[nn.Parameter]


def split_parameters(model: nn.Module) -> ParameterSplit:
    """Frames, concentrations and everything else, told apart by the last part of their names.

        split = split_parameters(model)
        frames = GrassmannAdam(split.frame_groups, lr=0.003 * rank**0.5)
        others = AdamW([{"params": split.rest}, {"params": split.kappa, "weight_decay": 0.0}], lr=3e-4)

    `frames` next to a `log_kappa` with one entry per direction (diagonal Λ_e, log_kappa.ndim == frames.ndim −
    1) go into a group with manifold="stiefel", other `frames` into one with manifold="grassmann". Parameters
    that do not require a gradient are left out. A tied parameter counts as frames if any of its names says
    so, and as "stiefel" if any of the modules that share it needs that.
    """
    kinds: dict[nn.Parameter, str] = {}
    rank = ("rest", "kappa", "grassmann", "stiefel")  # a tied parameter takes the last of its kinds
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            kind = {"frames": "grassmann", "log_kappa": "kappa"}.get(name, "rest")
            kappa = getattr(module, "log_kappa", None)
            if name == "frames" and isinstance(kappa, Tensor) and kappa.ndim == p.ndim - 1:
                kind = "stiefel"
            if p.requires_grad:
                kinds[p] = max(kinds.get(p, "rest"), kind, key=rank.index)
    of = {kind: [p for p in kinds if kinds[p] == kind] for kind in rank}
    groups = [{"params": of[m], "manifold": m} for m in ("grassmann", "stiefel") if of[m]]
    return ParameterSplit(groups, of["kappa"], of["rest"])
