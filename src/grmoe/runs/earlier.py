"""What a run of an earlier version means: it left choices open that had other defaults then."""

from __future__ import annotations

from grmoe.runs.config import TrainConfig
from grmoe.runs.config_groups import ElasticConfig, OptimConfig, RoutingConfig


def as_old_run(config: TrainConfig) -> TrainConfig:
    """With the choices of versions that saved none: weights that sum to one, full budgets, no leading term, a residual
    stream as it comes, slow subspaces and fast κ. A run of today has saved them all."""
    if config.routing.leading_weight is not None:
        return config
    present = config.model_config(1, 0)
    rank = config.model.get("router_rank", 32 if config.preset == "small" else present.router_rank)
    model = {
        "norm_topk_prob": (present.num_experts_per_tok or 1) > 1, "embedding_multiplier": 1.0,
        "residual_loss_coef": 0.0, "router_rank": rank,
    }  # fmt: skip
    slow = config.optim.lr if config.optim.frames_method == "projected" else 0.003 * (rank or 0) ** 0.5
    return config.filled_from(
        TrainConfig(
            model=model,
            elastic=ElasticConfig(unit="off"),
            routing=RoutingConfig(prior_counts="computed", leading_weight=0.0),
            optim=OptimConfig(frames_lr=slow, kappa_lr=5 * config.optim.lr),
        )
    )
