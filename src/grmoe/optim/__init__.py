"""Optimisers: Riemannian Adam for frames, both optimisers of a model in one, and the split of its parameters."""

from grmoe.optim.grassmann_adam import GrassmannAdam, Manifold
from grmoe.optim.model_optimizer import ModelOptimizer
from grmoe.optim.parameters import ParameterSplit, optimizer_groups, split_parameters
from grmoe.optim.projected import ProjectedAdam
from grmoe.optim.qr import QRAdam
from grmoe.optim.together import step_together

__all__ = [
    "GrassmannAdam", "Manifold", "ModelOptimizer", "ParameterSplit", "ProjectedAdam", "QRAdam",
    "optimizer_groups", "split_parameters", "step_together",
]  # fmt: skip
