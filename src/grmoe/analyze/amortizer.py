"""What an amortiser does to the concentrations of each token (paper, "Amortized Posterior with Learned Uncertainty").

Two claims of the paper can be read off here. "Σ_e h_e = N, so that average concentration is preserved": the ratio
Σ_e h_e κ_e / Σ_e κ_e of each token would then be 1. With equal κ it is. Σ_e h_e κ_e a_e / Σ_e κ_e a_e, the ratio of its
mean logits, is another. And "high confidence for tokens that clearly belong to one expert": h of the leading expert, by
token type. The matrix amortiser has no h; there h_e is its score over κ_e a_e.

Legend: T tokens, N experts, D model width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grmoe.analyze.results import Amortized
from grmoe.analyze.statistics import Array, divide
from grmoe.probe.routing import DROPPED
from grmoe.routing import GrassmannRouter, Router
from grmoe.runs.results import plain


class AmortizerTally:
    """Numbers of one layer, token by token."""

    def __init__(self, router: GrassmannRouter) -> None:
        self.router = router
        self.concentrations: list[Array] = []
        self.ratios: list[Array] = []
        self.leading_h: list[Array] = []

    @torch.no_grad()
    def add(self, x: Tensor, leading_T: Tensor) -> None:
        """Count tokens x (..., D). leading_T: the leading expert of each."""
        base_TN, scaled_TN = (t.double() for t in self.router.amortized(x.flatten(0, -2).float()))
        self.ratios.append((scaled_TN.sum(-1) / base_TN.sum(-1)).cpu().numpy())
        h_TN, kappa_N = scaled_TN / base_TN, self.kappa()
        self.concentrations.append(((h_TN * kappa_N).sum(-1) / kappa_N.sum()).cpu().numpy())
        h_T = h_TN.gather(-1, leading_T.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        self.leading_h.append(torch.where(leading_T == DROPPED, torch.nan, h_T).cpu().numpy())

    def kappa(self) -> Tensor:
        """(N,); of diagonal concentrations the mean over columns."""
        kappa = self.router.kappa.double()
        return kappa if kappa.ndim == 1 else kappa.mean(-1)

    def result(self, types_T: NDArray[np.int64], types: int) -> Amortized:
        """Means and quantiles, by token type too. A token of length zero has neither number."""
        ratio_T, h_T = np.concatenate(self.ratios), np.concatenate(self.leading_h)

        def by_type(values_T: Array) -> Array:
            known = np.isfinite(values_T)
            sums: Array = np.bincount(types_T[known], values_T[known], minlength=types).astype(float)
            return divide(sums, np.bincount(types_T[known], minlength=types))

        shown = {
            **_spread("concentration", np.concatenate(self.concentrations)),
            **_spread("ratio", ratio_T),
            "type_ratio": by_type(ratio_T),
            "type_h": by_type(h_T),
        }
        return Amortized(**plain(shown))  # NaN becomes None


def _spread(name: str, values_T: Array) -> dict[str, Any]:
    """The mean and the 5 % and 95 % quantiles over tokens that have the number."""
    known = values_T[np.isfinite(values_T)]
    low, high = np.quantile(known, [0.05, 0.95]) if len(known) else (np.nan, np.nan)
    return {name: divide(known.sum(), len(known)), f"{name}_low": low, f"{name}_high": high}


def amortizer_tally(router: Router) -> AmortizerTally | None:
    """None for a router without an amortiser."""
    if isinstance(router, GrassmannRouter) and router.amortizer is not None:
        return AmortizerTally(router)
    return None
