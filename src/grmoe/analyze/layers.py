"""From sums to the description of one layer.

Legend: N experts, D model width, K token types (k the rank of a frame), T tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from grmoe import geometry
from grmoe.analyze.record import NONE, LayerTally
from grmoe.analyze.results import Geometry, Layer, plain
from grmoe.analyze.statistics import Array, Information, entropy, information, pearson, shares
from grmoe.routing import Router

LEAST_TOKENS = 50  # the entropy of fewer tokens' types is low by chance


def concentrations(router: Router) -> Array | None:
    """κ_e of a router that has them (N,); of a diagonal one the mean over the frame's columns."""
    log_kappa = getattr(router, "log_kappa", None)
    if log_kappa is None:
        return None
    kappa = log_kappa.detach().double().exp().cpu()
    out: Array = (kappa if kappa.ndim == 1 else kappa.mean(-1)).numpy()
    return out


@torch.no_grad()
def layout(router: Router) -> Geometry | None:
    """Overlap and principal angles of frames, cosines of directions; None for a router with neither."""
    frames = getattr(router, "frames", None)
    if isinstance(frames, torch.Tensor):
        U_NDK = frames.double().cpu()
        D, k = U_NDK.shape[1:]
        angles_NNK = geometry.pairwise_angles(U_NDK)
        gram = angles_NNK.cos().square().mean(-1)  # ‖UᵢᵀUⱼ‖²/k is the mean cos²
        views = (angles_NNK.amin(-1), angles_NNK.mean(-1), angles_NNK.amax(-1))
        return Geometry("overlap", gram.tolist(), k / D, *(view.tolist() for view in views))
    rows = getattr(router, "weight", None)
    phi = getattr(router, "phi", None)
    if rows is None and phi is not None and phi.shape[-1] == router.num_experts:  # Soft MoE, a slot an expert
        rows = phi.T
    if rows is None:
        return None
    unit_ND = torch.nn.functional.normalize(rows.double().cpu(), dim=-1)
    return Geometry("cosine", (unit_ND @ unit_ND.T).tolist(), 0.0, None, None, None)


def describe(
    place: int,
    router: Router,
    tally: LayerTally,
    top1_T: NDArray[np.int64],
    types_T: NDArray[np.int64],
    domains_T: NDArray[np.int64],
    ids_T: NDArray[np.int64],
    generator: np.random.Generator,
) -> Layer:
    """One layer of `Analysis`. ids_T: token ids, numbered from 0 without gaps."""
    table_NK = tally.top1_KN.T
    kappa, types_entropy = concentrations(router), entropy(table_NK)
    enough = table_NK.sum(1) >= LEAST_TOKENS
    mean_K = _over(tally.entropy_K2[:, 0], tally.tokens_K)
    variance_K = _over(tally.entropy_K2[:, 1], tally.tokens_K) - mean_K**2
    tokens = tally.tokens_K.sum()
    served = top1_T != NONE
    led = float(served.sum())

    def expert_and(group_T: NDArray[np.int64], counts_KN: Array) -> Information | None:
        K = len(counts_KN)
        pairs = np.bincount(ids_T[served] * K + group_T[served], minlength=(ids_T.max() + 1) * K)
        return information(counts_KN.T, pairs.reshape(-1, K).astype(float), generator)

    fields: dict[str, Any] = {
        "of_expert": shares(table_NK),
        "of_type": shares(tally.top1_KN).T,
        "gate_of_type": shares(tally.mass_KN).T,
        "work_of_type": shares(tally.computed_KN).T,
        "experts_per_token": _over(tally.computed_KN.sum(1), tally.tokens_K),
        "load": tally.computed_KN.sum(0) / max(1.0, tokens),
        "leading_load": table_NK.sum(1) / max(1.0, led),
        "gate_load": tally.mass_KN.sum(0) / max(1.0, tokens),
        "entropy": tally.entropy_K2[:, 0].sum() / max(1.0, tokens),
        "type_entropy": mean_K,
        "type_entropy_std": np.sqrt(np.maximum(variance_K, 0.0)),
        "domain_of_expert": shares(tally.top1_DN),
        "domain_gate": shares(tally.mass_DN),
        "domain_entropy": _over(tally.entropy_D, tally.tokens_D),
        "kappa": kappa,
        "expert_type_entropy": types_entropy,
    }
    return Layer(
        layer=place,
        alpha=router.alpha,
        tokens=int(tokens),
        dropped=len(top1_T) - int(led),
        counts=table_NK.astype(int).tolist(),
        expert_tokens=table_NK.sum(1).astype(int).tolist(),
        kappa_correlation=None if kappa is None else pearson(kappa[enough], types_entropy[enough]),
        information=expert_and(types_T, tally.top1_KN),
        domain_information=expert_and(domains_T, tally.top1_DN),
        geometry=layout(router),
        **plain(fields),
    )


def _over(sums: Array, counts: Array) -> Array:
    return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
