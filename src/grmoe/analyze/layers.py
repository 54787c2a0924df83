"""From sums to the description of one layer.

Legend: N experts, D model width, K groups of tokens (types or domains), T tokens, V distinct token ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from grmoe import geometry
from grmoe.analyze.bounds import BoundsTally
from grmoe.analyze.results import Geometry, Layer
from grmoe.analyze.statistics import Array, divide, entropy, information, pearson, shares
from grmoe.analyze.tally import LayerTally
from grmoe.probe.routing import DROPPED
from grmoe.routing import Router
from grmoe.runs.results import plain

LEAST_TOKENS = 50  # the type entropy of an expert with fewer tokens is low by chance


def concentrations(router: Router) -> Array | None:
    """κ of each expert, (N,). Diagonal concentrations: the mean over columns. None for a router without κ."""
    log_kappa = getattr(router, "log_kappa", None)
    if log_kappa is None or len(log_kappa) != router.num_experts:  # Grassmannian Soft MoE has one per slot
        return None
    kappa = log_kappa.detach().double().exp().cpu()
    out: Array = (kappa if kappa.ndim == 1 else kappa.mean(-1)).numpy()
    return out


@torch.no_grad()
def _expert_geometry(router: Router) -> Geometry | None:
    """Overlap and principal angles of frames, or cosines of directions. None for a router with neither."""
    frames = getattr(router, "frames", None)
    if isinstance(frames, torch.Tensor) and len(frames) == router.num_experts:
        U_NDK = frames.double().cpu()
        D, k = U_NDK.shape[1:]
        angles_NNK = geometry.pairwise_angles(U_NDK)
        return Geometry(
            kind="overlap",
            gram=angles_NNK.cos().square().mean(-1).tolist(),  # ‖UᵢᵀUⱼ‖²/k is the mean cos²
            random=k / D,
            angle_min=angles_NNK.amin(-1).tolist(),
            angle_mean=angles_NNK.mean(-1).tolist(),
            angle_max=angles_NNK.amax(-1).tolist(),
        )
    rows = getattr(router, "weight", None)
    phi = getattr(router, "phi", None)
    if rows is None and phi is not None and phi.shape[-1] == router.num_experts:
        rows = phi.T  # Soft MoE, one slot per expert
    if rows is None:
        return None
    unit_ND = torch.nn.functional.normalize(rows.double().cpu(), dim=-1)
    return Geometry(kind="cosine", gram=(unit_ND @ unit_ND.T).tolist(), random=0.0)


def describe_layer(
    place: int,
    router: Router,
    tally: LayerTally,
    bounds: BoundsTally,
    leading_T: NDArray[np.int64],
    types_T: NDArray[np.int64],
    domains_T: NDArray[np.int64],
    ids_T: NDArray[np.int64],
    generator: np.random.Generator,
) -> Layer:
    """One layer of `Analysis`. ids_T: token ids, numbered from 0 without gaps."""
    types, domains = tally.types, tally.domains
    led_NK = types.led_GN.T
    tokens = types.tokens_G.sum()
    kappa, type_entropy_N = concentrations(router), entropy(led_NK)
    enough_N = led_NK.sum(1) >= LEAST_TOKENS
    mean_K = divide(types.entropy_G, types.tokens_G)
    variance_K = divide(types.entropy_squared_G, types.tokens_G) - mean_K**2
    served_T = leading_T != DROPPED

    def by_token_id(group_T: NDArray[np.int64], K: int) -> Array:
        """How often each token id with an expert has each group, (V, K)."""
        pairs = np.bincount(ids_T[served_T] * K + group_T[served_T], minlength=(ids_T.max() + 1) * K)
        return pairs.reshape(-1, K).astype(float)

    shown: dict[str, Any] = {
        "of_expert": shares(led_NK),
        "of_type": shares(types.led_GN).T,
        "gate_of_type": divide(types.gate_GN, types.tokens_G[:, None]).T,
        "load_of_type": divide(types.received_GN, types.tokens_G[:, None]).T,
        "experts_per_token": divide(types.received_GN.sum(1), types.tokens_G),
        "load": divide(types.received_GN.sum(0), tokens),
        "leading_load": divide(led_NK.sum(1), tokens),
        "gate_load": divide(types.gate_GN.sum(0), tokens),
        "entropy": divide(types.entropy_G.sum(), tokens),
        "type_entropy": mean_K,
        "type_entropy_std": np.sqrt(np.maximum(variance_K, 0.0)),
        "domain_of_expert": shares(domains.led_GN),
        "domain_gate": divide(domains.gate_GN, domains.tokens_G[:, None]),
        "domain_entropy": divide(domains.entropy_G, domains.tokens_G),
        "kappa": kappa,
        "expert_type_entropy": type_entropy_N,
    }
    return Layer(
        layer=place,
        alpha=router.alpha,
        tokens=int(tokens),
        dropped=int((~served_T).sum()),
        counts=led_NK.astype(int).tolist(),
        expert_tokens=led_NK.sum(1).astype(int).tolist(),
        kappa_correlation=None if kappa is None else pearson(kappa[enough_N], type_entropy_N[enough_N]),
        information=information(led_NK, by_token_id(types_T, len(types.tokens_G)), generator),
        domain_information=information(
            domains.led_GN.T, by_token_id(domains_T, len(domains.tokens_G)), generator
        ),
        geometry=_expert_geometry(router),
        separation=bounds.separation(),
        top_mass=bounds.top_mass(),
        **plain(shown),  # NaN becomes None
    )
