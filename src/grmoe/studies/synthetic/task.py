"""The paper's synthetic routing task, for many seeds at once.

A token of class e is drawn from N(0, P_e + σ²(I − P_e)), P_e the projector on a ground-truth subspace, and its
target is A_e x, A_e the class's own linear map. A router that sends tokens to experts by class can fit the targets
exactly. Classes are equally frequent unless a setting says otherwise.

Legend: S seeds, N experts (classes), D width d, K rank k, O target width, B tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
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
    ratio: float = 1.0
    """Mixture weights are π_e ∝ ratio^e. 1: every class is equally frequent."""

    def weights(self, num_experts: int) -> list[float]:
        """π_e of every class. They sum to one."""
        powers = [self.ratio**e for e in range(num_experts)]
        return [p / sum(powers) for p in powers]


EASY = Setting("easy", rho=0.1, sigma2=0.1)
HARD = Setting("hard", rho=0.4, sigma2=0.5)
# The rarest of eight classes has 2.6 % of the tokens, the most frequent one 32 %.
SKEWED = Setting("skewed", rho=0.1, sigma2=0.1, ratio=0.7)


@dataclass(frozen=True)
class _Source:
    """Random numbers for consecutive entries of a task."""

    entries: int
    generator: torch.Generator
    cumulative_N: Tensor | None
    """Sums of the mixture weights; None for equal ones."""


class Task:
    """`seeds` independent instances of a setting: frames (S, N, D, K) and expert maps (S, N, D, O).

    Frames and maps are the same on every device. Tokens are drawn on `device`, so they differ between kinds of device.
    `weights` are the mixture weights π_e; the default is that of the setting.

    `joined` and `repeated` put several tasks into one tensor program. An entry draws the same tokens there as alone.
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
        weights: Sequence[float] | None = None,
    ) -> None:
        self.seeds = checks.positive_int("seeds", seeds)
        checks.require(0 < setting.sigma2 < 1, f"sigma2 must be in (0, 1), got {setting.sigma2}")
        checks.finite("ratio", setting.ratio, above=0)
        weights = setting.weights(num_experts) if weights is None else list(weights)
        ok = len(weights) == num_experts and min(weights) > 0 and math.isclose(sum(weights), 1)
        checks.require(
            ok, f"weights must be {num_experts} positive numbers that sum to one, got {list(weights)}"
        )
        self.device = torch.device(device)
        draw = torch.Generator().manual_seed(seed)
        frames = frames_with_overlap(setting.rho, dim, rank, num_experts, batch=seeds, generator=draw)
        maps = torch.randn(seeds, num_experts, dim, out_dim, generator=draw)
        self.frames_SNDK = frames.to(self.device)
        self.maps_SNDO = (maps / math.sqrt(dim)).to(self.device)
        self.sigma2_S = torch.full((seeds,), setting.sigma2, device=self.device)
        self.weights_SN = torch.tensor(weights, device=self.device).expand(seeds, -1)
        # One constant brings tokens to mean square one, as a norm layer would, without touching geometry.
        variance = (rank + setting.sigma2 * (dim - rank)) / dim
        self.scale_S = torch.full((seeds,), 1 / math.sqrt(variance), device=self.device)
        generator = draw if self.device.type == "cpu" else self._generator(seed)
        cumulative_N = None if len(set(weights)) == 1 else self.weights_SN[0].cumsum(0)
        self.sources = [_Source(seeds, generator, cumulative_N)]
        self.copies = 1

    @classmethod
    def joined(cls, tasks: Sequence[Task]) -> Task:
        """All entries of all tasks, in order. Each task has the same number of seeds."""
        checks.require(len({task.seeds for task in tasks}) == 1, "joined tasks must have equally many seeds")
        whole = copy.copy(tasks[0])
        for name in ("frames_SNDK", "maps_SNDO", "sigma2_S", "weights_SN", "scale_S"):
            setattr(whole, name, torch.cat([getattr(task, name) for task in tasks]))
        whole.sources = [source for task in tasks for source in task.sources]
        return whole

    def repeated(self, copies: int) -> Task:
        """All entries `copies` times, one block after the other. Copies have the same tokens."""
        whole = copy.copy(self)
        for name in ("frames_SNDK", "maps_SNDO", "sigma2_S", "weights_SN", "scale_S"):
            setattr(whole, name, torch.cat([getattr(self, name)] * copies))
        whole.copies = copies * self.copies
        return whole

    @property
    def entries(self) -> int:
        """S, all instances: seeds × tasks × copies."""
        return len(self.frames_SNDK)

    def restart(self, seed: int) -> None:
        """Start the stream of tokens again."""
        for source in self.sources:
            source.generator.manual_seed(seed)

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def achieved_overlap(self) -> Tensor:
        """‖UᵢᵀUⱼ‖²_F / k over all pairs i < j and seeds."""
        N, K = self.frames_SNDK.shape[1], self.frames_SNDK.shape[-1]
        i, j = torch.triu_indices(N, N, offset=1)
        return geometry.overlap(self.frames_SNDK)[:, i, j] / K

    def tokens(self, batch: int, seed: int | None = None) -> tuple[Tensor, Tensor]:
        """(x (S, B, D), class (S, B)): x = σg + √(1−σ²) U_e c has covariance P_e + σ²(I − P_e).

        seed: draw apart from the task's own stream.
        """
        S, N, D, K = self.frames_SNDK.shape
        draws = [self._draw(source, batch, seed) for source in self.sources]
        label_SB, coordinates, noise = (torch.cat(parts) for parts in zip(*draws, strict=True))
        if self.copies > 1:
            label_SB = label_SB.repeat(self.copies, 1)
            coordinates, noise = (t.repeat(self.copies, 1, 1) for t in (coordinates, noise))
        block_SBNK = coordinates.unsqueeze(2) * torch.nn.functional.one_hot(label_SB, N).unsqueeze(-1)
        U_SD_NK = self.frames_SNDK.transpose(1, 2).reshape(S, D, N * K)
        inside_SBD = block_SBNK.view(S, batch, N * K) @ U_SD_NK.mT
        sigma2, scale = self.sigma2_S.view(S, 1, 1), self.scale_S.view(S, 1, 1)
        return scale * (sigma2.sqrt() * noise + (1 - sigma2).sqrt() * inside_SBD), label_SB

    def _draw(self, source: _Source, batch: int, seed: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Classes (S, B), coordinates inside the subspace (S, B, K) and noise (S, B, D)."""
        S, (_, N, D, K) = source.entries, self.frames_SNDK.shape
        generator = source.generator if seed is None else self._generator(seed)
        random: Any = {"generator": generator, "device": self.device}
        if source.cumulative_N is None:
            label_SB = torch.randint(N, (S, batch), **random)
        else:
            u_SB = torch.rand(S, batch, **random)
            label_SB = torch.searchsorted(source.cumulative_N, u_SB, right=True).clamp(max=N - 1)
        return label_SB, torch.randn(S, batch, K, **random), torch.randn(S, batch, D, **random)

    def targets(self, x_SBD: Tensor, label_SB: Tensor) -> Tensor:
        """A_e x of each token's own class, (S, B, O)."""
        y_SBNO = apply_experts(x_SBD, self.maps_SNDO)
        index = label_SB[..., None, None].expand(*label_SB.shape, 1, y_SBNO.shape[-1])
        return y_SBNO.gather(2, index).squeeze(2)

    def oracle(self, x_SBD: Tensor) -> Tensor:
        """The Bayes classifier, which knows frames, noise and weights: argmax log π_e + ½(1/σ² − 1)‖P_e x‖², (S, B).

        x in this formula is without the task's scale.
        """
        S, N, D, K = self.frames_SNDK.shape
        U_SD_NK = self.frames_SNDK.transpose(1, 2).reshape(S, D, N * K)
        energy_SBN = (x_SBD @ U_SD_NK).unflatten(-1, (N, K)).square().sum(-1)
        factor_S = (1 / self.sigma2_S - 1) / (2 * self.scale_S.square())
        return (factor_S.view(S, 1, 1) * energy_SBN + self.weights_SN.log().unsqueeze(1)).argmax(-1)


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
    least = least_overlap(dim, rank, num)
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


def least_overlap(dim: int, rank: int, num: int) -> float:
    """The least mean pairwise overlap ‖UᵢᵀUⱼ‖²_F / rank that `num` frames can have."""
    return max(0.0, (num * rank / dim - 1) / (num - 1))


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
