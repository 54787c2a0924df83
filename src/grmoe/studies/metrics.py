"""Are the metrics of the Grassmannian the same up to a monotone map? Computed from angles, without any model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from grmoe.geometry import chordal_distance, geodesic_distance
from grmoe.studies.page import Claim, Verdict

WHERE = "Section 2.2, The Grassmannian Manifold"
# Principal angles of two pairs of planes, in degrees. The first is farther apart by the projection distance.
EVEN, UNEVEN = (45.0, 45.0), (0.0, 80.0)


def planes(degrees: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Two frames (2k, k) with these principal angles."""
    angles, k = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64)), len(degrees)
    first = torch.eye(2 * k, k, dtype=torch.float64)
    return first, torch.cat([angles.cos().diag(), angles.sin().diag()])


def distances(degrees: Sequence[float]) -> tuple[float, float]:
    """(projection distance, geodesic distance)."""
    return float(chordal_distance(*planes(degrees))), float(geodesic_distance(*planes(degrees)))


def metric_claims() -> list[Claim]:
    """One sentence of the paper, of tokens and of subspaces."""
    said = "Other metrics are equivalent up to a monotone transformation of the affinities"
    return [
        _of_tokens(f"{said}: between a token and a subspace"),
        _of_subspaces(f"{said}: between two subspaces"),
    ]


def _of_tokens(text: str) -> Claim:
    # A line and a subspace have one angle that is not zero: its cosine is the square root of the affinity.
    angles = range(91)
    ordered = [(math.cos(math.radians(angle)) ** 2, *distances([float(angle)])) for angle in angles]
    falls = all(a > b and c < d and e < f for (a, c, e), (b, d, f) in pairwise(ordered))
    return Claim(
        WHERE,
        text,
        f"both distances grow while the affinity falls, at {len(ordered)} angles from 0° to 90°"
        if falls
        else "their order differs",
        Verdict.HOLDS if falls else Verdict.FAILS,
        "Arithmetic: there is one angle. The gate itself still changes, because κ multiplies the affinity.",
    )


def _of_subspaces(text: str) -> Claim:
    even, uneven = distances(EVEN), distances(UNEVEN)
    same = (even[0] > uneven[0]) == (even[1] > uneven[1])
    return Claim(
        WHERE,
        text,
        f"planes at angles of 45° and 45°, against 0° and 80°: projection distances {even[0]:.3f} and {uneven[0]:.3f}, "
        f"geodesic ones {even[1]:.3f} and {uneven[1]:.3f}",
        Verdict.HOLDS if same else Verdict.FAILS,
        "Arithmetic. The two distances order these pairs differently. Pairs of subspaces enter through the overlap "
        "term.",
    )
