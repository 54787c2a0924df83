"""Optimisers: Riemannian Adam for frames, and the split of a model's parameters between optimisers."""

from grmoe.optim.grassmann_adam import GrassmannAdam, Manifold
from grmoe.optim.parameters import ParameterSplit, split_parameters

__all__ = ["GrassmannAdam", "Manifold", "ParameterSplit", "split_parameters"]
