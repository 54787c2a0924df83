"""Grassmannian Mixture-of-Experts: experts own subspaces, one dial sets the sparsity after training."""

from grmoe import bingham, certificates, geometry
from grmoe.layer import MoE
from grmoe.optim import GrassmannAdam, split_parameters
from grmoe.regularizers import overlap_penalty
from grmoe.routing import GrassmannRouter, build_router, routers, set_alpha

__version__ = "0.1.0"

__all__ = [
    "GrassmannAdam",
    "GrassmannRouter",
    "MoE",
    "__version__",
    "bingham",
    "build_router",
    "certificates",
    "geometry",
    "overlap_penalty",
    "routers",
    "set_alpha",
    "split_parameters",
]
