"""The paper's synthetic routing task, for many seeds at once.

A token of class e is drawn from N(0, P_e + σ²(I − P_e)), P_e the projector on a ground-truth subspace, and its
target is A_e x, A_e the class's own linear map. A router that sends tokens to experts by class can fit the targets
exactly.

Legend: S seeds, N experts (classes), D width d, K rank k, O target width, B tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grmoe import checks, geometry


@dataclass(frozen=True)
class Setting:
    """A difficulty: wanted overlap ρ* = ‖UᵢᵀUⱼ‖²_F / k between classes, and noise σ² outside the subspace."""

    name: str
    rho: float
    sigma2: float


EASY = Setting("easy", rho=0.1, sigma2=0.1)
HARD = Setting("hard", rho=0.4, sigma2=0.5)


class Task:
    """`seeds` independent instances: frames (S, N, D, K) and expert maps (S, N, D, O), uniform mixture.

    Frames and maps are the same on every device. Tokens are drawn on `device`, so they differ between kinds of device.
    """

    def __init__(
        self,
        setting: Setting,
        seeds: int,
        *,
        num_experts: int = 8,
        dim: int = 128,
        rank: int = 16,
        out_dim: int = 16,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        checks.positive_int("seeds", seeds)
        checks.require(0 < setting.sigma2 < 1, f"sigma2 must be in (0, 1), got {setting.sigma2}")
        self.setting = setting
        self.device = torch.device(device)
        draw = torch.Generator().manual_seed(seed)
        frames = frames_with_overlap(setting.rho, dim, rank, num_experts, batch=seeds, generator=draw)
        maps = torch.randn(seeds, num_experts, dim, out_dim, generator=draw)
        self.frames_SNDK = frames.to(self.device)
        self.maps_SNDO = (maps / math.sqrt(dim)).to(self.device)
        self.generator = draw if self.device.type == "cpu" else self.token_generator(seed)
        # One constant brings tokens to mean square one, as a norm layer would, without touching geometry.
        variance = (rank + setting.sigma2 * (dim - rank)) / dim
        self.scale = 1 / math.sqrt(variance)

    @property
    def seeds(self) -> int:
        return len(self.frames_SNDK)

    def token_generator(self, seed: int) -> torch.Generator:
        """A generator for `tokens`, on the task's device."""
        return torch.Generator(self.device).manual_seed(seed)

    def achieved_overlap(self) -> Tensor:
        """‖UᵢᵀUⱼ‖²_F / k over all pairs i < j and seeds."""
        N, K = self.frames_SNDK.shape[1], self.frames_SNDK.shape[-1]
        i, j = torch.triu_indices(N, N, offset=1)
        return geometry.overlap(self.frames_SNDK)[:, i, j] / K

    def tokens(self, batch: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """(x (S, B, D), class (S, B)): x = σg + √(1−σ²) U_e c has covariance P_e + σ²(I − P_e)."""
        source: Any = {"generator": generator or self.generator, "device": self.device}
        S, N, D, K = self.frames_SNDK.shape
        sigma2 = self.setting.sigma2
        label_SB = torch.randint(N, (S, batch), **source)
        coordinates = torch.randn(S, batch, 1, K, **source)
        block_SBNK = coordinates * torch.nn.functional.one_hot(label_SB, N).unsqueeze(-1)
        U_SD_NK = self.frames_SNDK.transpose(1, 2).reshape(S, D, N * K)
        inside_SBD = block_SBNK.view(S, batch, N * K) @ U_SD_NK.mT
        x_SBD = math.sqrt(sigma2) * torch.randn(S, batch, D, **source)
        return self.scale * (x_SBD + math.sqrt(1 - sigma2) * inside_SBD), label_SB

    def targets(self, x_SBD: Tensor, label_SB: Tensor) -> Tensor:
        """A_e x of each token's own class, (S, B, O)."""
        y_SBNO = apply_experts(x_SBD, self.maps_SNDO)
        index = label_SB[..., None, None].expand(*label_SB.shape, 1, y_SBNO.shape[-1])
        return y_SBNO.gather(2, index).squeeze(2)

    def oracle(self, x_SBD: Tensor) -> Tensor:
        """The Bayes classifier with the true frames: argmax ‖P_e x‖² (equal weights, σ² < 1), (S, B)."""
        S, N, D, K = self.frames_SNDK.shape
        U_SD_NK = self.frames_SNDK.transpose(1, 2).reshape(S, D, N * K)
        return (x_SBD @ U_SD_NK).unflatten(-1, (N, K)).square().sum(-1).argmax(-1)


def apply_experts(x_SBD: Tensor, maps_SNDO: Tensor) -> Tensor:
    """Every expert on every token, (S, B, N, O), as one batched GEMM."""
    S, N, D, O = maps_SNDO.shape
    flat = maps_SNDO.transpose(1, 2).reshape(S, D, N * O)
    return (x_SBD @ flat).unflatten(-1, (N, O))


def frames_with_overlap(
    rho: float, dim: int, rank: int, num: int, *, batch: int, generator: torch.Generator | None = None
) -> Tensor:
    """Random frames (batch, num, dim, rank) with mean pairwise overlap ‖UᵢᵀUⱼ‖²_F / rank = `rho`.

    Random frames overlap by rank/dim. For more overlap each frame is tilted towards one shared frame. For less it is
    tilted towards a tight configuration (mutually orthogonal when num·rank <= dim), which has the least possible mean
    overlap. Bisection finds the tilt for each batch entry.
    """
    least = max(0.0, (num * rank / dim - 1) / (num - 1))
    ok = least <= rho < 1
    checks.require(
        ok, f"rho must be in [{least:.3g}, 1) for {num} rank-{rank} frames in {dim} dimensions, got {rho}"
    )
    random = geometry.haar_frames(dim, rank, (batch, num), generator=generator, dtype=torch.float64)
    if rho < rank / dim:
        start, end = _tight_frames(dim, rank, num, batch, generator), random
    else:
        shared = geometry.haar_frames(dim, rank, (batch, 1), generator=generator, dtype=torch.float64)
        start, end = random, shared.expand_as(random)
    i, j = torch.triu_indices(num, num, offset=1)
    low, high = torch.zeros(batch, dtype=torch.float64), torch.ones(batch, dtype=torch.float64)
    for _ in range(20):
        middle = (low + high) / 2
        t = middle[:, None, None, None]
        frames = geometry.orthonormalize((1 - t) * start + t * end)
        too_much = geometry.overlap(frames)[:, i, j].mean(-1) / rank > rho
        low, high = torch.where(too_much, low, middle), torch.where(too_much, middle, high)
    return frames.float()


def _tight_frames(dim: int, rank: int, num: int, batch: int, generator: torch.Generator | None) -> Tensor:
    """Frames with Σ U_eU_eᵀ ∝ I (num·rank >= dim) or mutually orthogonal, from alternating projections."""
    if num * rank <= dim:
        joint = geometry.haar_frames(dim, num * rank, batch, generator=generator, dtype=torch.float64)
        return joint.unflatten(-1, (num, rank)).transpose(1, 2)
    frames = geometry.haar_frames(dim, rank, (batch, num), generator=generator, dtype=torch.float64)
    for _ in range(100):
        flat = frames.transpose(1, 2).reshape(batch, dim, num * rank)
        values, vectors = torch.linalg.eigh(flat @ flat.mT)
        tight = (vectors * values.rsqrt().unsqueeze(-2)) @ (vectors.mT @ flat)
        frames = geometry.orthonormalize(tight.unflatten(-1, (num, rank)).transpose(1, 2))
    return frames
