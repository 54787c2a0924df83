"""Grassmannian Mixture-of-Experts: experts own subspaces, one dial sets the sparsity after training.

Names are imported when they are first used, so that `grmoe --help` does not wait for torch. transformers knows our
models from here on.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from grmoe import registration

if TYPE_CHECKING:
    from grmoe import bingham, certificates, geometry, routing
    from grmoe.layer import MoE
    from grmoe.optim import GrassmannAdam, ModelOptimizer, split_parameters
    from grmoe.regularizers import overlap_penalty
    from grmoe.routing import GrassmannRouter, build_router, routers, set_alpha
    from grmoe.runs.open import open_model

__version__ = "0.1.0"

__all__ = [
    "GrassmannAdam",
    "GrassmannRouter",
    "MoE",
    "ModelOptimizer",
    "__version__",
    "bingham",
    "build_router",
    "certificates",
    "geometry",
    "open_model",
    "overlap_penalty",
    "routers",
    "routing",
    "set_alpha",
    "split_parameters",
]

_HOME = {
    "GrassmannAdam": "optim",
    "GrassmannRouter": "routing",
    "MoE": "layer",
    "ModelOptimizer": "optim",
    "build_router": "routing",
    "open_model": "runs.open",
    "overlap_penalty": "regularizers",
    "routers": "routing",
    "set_alpha": "routing",
    "split_parameters": "optim",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        found = getattr(_import(f"grmoe.{_HOME[name]}"), name)
        globals()[name] = found
        return found
    if not name.startswith("_") and importlib.util.find_spec(f"grmoe.{name}") is not None:
        return _import(f"grmoe.{name}")
    raise AttributeError(f"module 'grmoe' has no attribute {name!r}")


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        from grmoe.extras import explain

        raise ModuleNotFoundError(explain(error), name=error.name) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


registration.register()
