"""The groups of a run's configuration: what every setting means, its default, and the values that it may have.

`grmoe.runs.config` puts them together and looks at what follows from several groups. The group `model` is in
`grmoe.runs.model_settings`, the group `parallel` in `grmoe.parallel.world`. The docstrings of the fields are the
configuration reference (`grmoe.config.describe_fields`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grmoe.checks import finite, positive_int, require


@dataclass(frozen=True)
class DataConfig:
    """The training text, and how it is cut into batches."""

    path: str = "runs/data"
    """Folder that `grmoe prepare` wrote."""
    sequence_length: int | None = None
    """Tokens per sequence. Default: the model's `max_position_embeddings`; `grmoe train` of `tiny` on a CPU: 128."""
    batch_size: int = 32
    """Sequences per step, over all processes. `grmoe train` of `tiny` on a CPU: 16."""
    micro_batch_size: int | None = None
    """Sequences that a process computes at once. Smaller values need less memory and accumulate gradients.
    Default: all sequences of a process at once."""

    def __post_init__(self) -> None:
        positive_int("batch_size", self.batch_size)
        for name in ("sequence_length", "micro_batch_size"):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Learning rates, their schedules, and the optimisers: AdamW for weights and κ, `GrassmannAdam` for subspaces.

    A learning rate rises linearly during the warm-up and then follows a cosine down to its floor.
    """

    lr: float = 3e-4
    """Peak learning rate of the weights. `grmoe train` of `tiny` on a CPU: 4e-3."""
    frames_lr: float | None = None
    """Peak learning rate of the subspaces: the length of a step on their manifold. Default: lr·√(hidden_size ·
    router_rank), so that they turn as fast as a linear gate of the same shape. With `frames_method=projected` and `qr`:
    `lr`."""
    frames_method: Literal["grassmann", "projected", "qr"] = "grassmann"
    """How subspaces are trained. `grassmann`: on their manifold (`GrassmannAdam`). The others are for comparison.
    `projected`: Adam on their entries, then QR. `qr`: Adam on a matrix without constraints, with its QR frame in the
    model."""
    kappa_lr: float | None = None
    """Peak learning rate of log κ. Default: lr."""
    warmup: int | None = None
    """Steps of warm-up. Default: 2000, at most 3/10 of the run. `grmoe train` of `tiny` on a CPU: at most 100."""
    floor: float = 0.1
    """Learning rate of the last step, as a share of the peak."""
    frames_warmup: int | None = None
    """Steps of warm-up of the subspaces. Default: `warmup`."""
    frames_floor: float | None = None
    """Last learning rate of the subspaces, as a share of the peak. Default: `floor`."""
    kappa_warmup: int | None = None
    """Steps of warm-up of log κ. Default: `warmup`."""
    kappa_floor: float | None = None
    """Last learning rate of log κ, as a share of the peak. Default: `floor`."""
    betas: tuple[float, ...] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    eps: float = 1e-8
    """Added to the denominator of AdamW."""
    weight_decay: float = 0.1
    """Weight decay of matrices. Norms, κ and subspaces have none."""
    clip: float = 1.0
    """Largest norm of a step's gradient. 0: no clipping."""

    def __post_init__(self) -> None:
        for name in ("lr", "frames_lr", "kappa_lr", "eps", "weight_decay", "clip"):
            if getattr(self, name) is not None:
                finite(name, getattr(self, name), at_least=0)
        for kind in ("", "frames_", "kappa_"):
            warmup, floor = getattr(self, f"{kind}warmup"), getattr(self, f"{kind}floor")
            if warmup is not None:
                positive_int(f"{kind}warmup", warmup, at_least=0)
            if floor is not None:
                finite(f"{kind}floor", floor, at_least=0)
                require(floor <= 1, f"{kind}floor must be at most 1, got {floor}")
        in_range = all(0 <= beta < 1 for beta in self.betas)
        require(
            len(self.betas) == 2 and in_range, f"betas must be two numbers in [0, 1), got {list(self.betas)}"
        )


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """What shapes the routers during training.

    The losses of the baseline routers are options of these routers: `model.router_options`.
    """

    overlap_weight: float = 0.01
    """β, the weight of the overlap penalty in the objective. 0: none."""
    overlap_rho: float = 0.5
    """ρ₀, the hinge of the overlap penalty, in the unit `overlap_unit`."""
    overlap_unit: Literal["random", "absolute"] = "random"
    """Unit of ρ₀. `random`: the overlap k²/d of random subspaces; ρ₀ below 1 pushes subspaces further apart than random
    ones. `absolute`: the paper's ‖UᵀU'‖² ≤ ρ₀·k; its ρ₀ = 0.3 is 4.8 times the random overlap at d = 768, k = 48."""
    overlap_pairs: Literal["auto", "all"] | int = "auto"
    """Pairs of experts in the penalty: `all`, a number M for a random sample of M pairs per step, or `auto` for the
    paper's M = 4N, or all pairs if there are fewer. A sample is scaled up to an unbiased estimate of all pairs."""
    prior_rate: float = 0.05
    """η, the rate of the balanced prior. It follows the learning-rate schedule of the weights."""
    prior_counts: Literal["auto", "computed", "candidates", "leading", "both"] = "auto"
    """Which experts of a token the balanced prior counts. `computed`: those computed. `candidates`: those of the full
    budget, whatever was drawn. `leading`: the most probable one. `both`: the mean of the last two. `auto`: `candidates`
    with random budgets (`elastic`), else `computed`."""
    entropy_weight: float = 0.0
    """Weight of the entropy term: the mean over tokens of (H − `entropy_target`·log N)², summed over layers. It is
    logged as part of `router_loss`. 0: none."""
    entropy_target: float = 0.5
    """The entropy that a token's gate should have, as a share of log N. 0: all of the gate on one expert. 1: every
    expert alike."""
    leading_weight: float | None = None
    """Weight of the leading term: N·Σ_e s_e·p_e, summed over layers. p_e is the mean probability of expert e. s_e is
    the share of the tokens that it led in the step before. The term makes the load more even where tokens get one or
    few experts. It is logged as part of `router_loss`. 0: none. Default: 0.01 with random budgets (`elastic`), else
    0."""

    def __post_init__(self) -> None:
        for name in ("overlap_weight", "overlap_rho", "prior_rate", "entropy_weight", "entropy_target"):
            finite(name, getattr(self, name), at_least=0)
        if self.leading_weight is not None:
            finite("leading_weight", self.leading_weight, at_least=0)
        if not isinstance(self.overlap_pairs, str):
            positive_int("overlap_pairs", self.overlap_pairs)
        require(
            self.entropy_target <= 1,
            f"entropy_target must be a share of log N, at most 1, got {self.entropy_target}",
        )


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Random budgets: the model learns to work with any number of experts per token.

    Validation uses the full budget.
    """

    unit: Literal["auto", "off", "token", "sequence", "layer", "step"] = "auto"
    """What gets a budget of its own: every `token`, `sequence`, `layer` or `step`. `off`: all budgets are full. `auto`:
    `token` where a selection chooses more than one expert (`topk` or `mass` with K > 1), else `off`."""
    rule: Literal["mass", "count"] = "mass"
    """What is random. `mass`: a token adds experts until they hold the drawn probability. `count`: the most experts per
    token."""
    full_share: float = 0.0
    """Share of the steps with the full budget."""
    distill: float = 0.0
    """δ, the weight of the divergence from the predictions of the full budget. 0: none. Otherwise a step computes its
    sequences twice, with the full budget too."""

    def __post_init__(self) -> None:
        finite("full_share", self.full_share, at_least=0)
        require(self.full_share <= 1, f"full_share must be at most 1, got {self.full_share}")
        finite("distill", self.distill, at_least=0)

    @property
    def on(self) -> bool:
        """Whether budgets are random. Ask a resolved configuration."""
        return self.unit not in ("auto", "off")


@dataclass(frozen=True)
class AlphaConfig:
    """α during training. Validation and the saved model use the model's own α, or the learned one."""

    schedule: Literal["constant", "anneal", "sample", "learned"] = "constant"
    """`constant`: the model's α. `anneal`: from `low` to the model's α, geometrically. `sample`: a new α per step,
    log-uniform in [`low`, `high`]. `learned`: a parameter per layer that starts at the model's α and is trained like κ;
    the saved model has the learned values."""
    low: float = 0.5
    """Smallest α of `sample`, first α of `anneal`."""
    high: float = 4.0
    """Largest α of `sample`."""

    def __post_init__(self) -> None:
        finite("low", self.low, above=0)
        finite("high", self.high, at_least=self.low)


@dataclass(frozen=True)
class ValidationConfig:
    """Perplexity on held-out text."""

    every: int = 500
    """Steps between validations. 0: only after the last step."""
    tokens: int = 250_000
    """Largest number of tokens per domain."""
    batch_size: int | None = None
    """Sequences computed at once. Default: as in training."""

    def __post_init__(self) -> None:
        positive_int("every", self.every, at_least=0)
        positive_int("tokens", self.tokens)
        if self.batch_size is not None:
            positive_int("batch_size", self.batch_size)


@dataclass(frozen=True)
class LogConfig:
    """Where metrics go. `log.jsonl` in the run's folder is always written."""

    every: int = 10
    """Steps between lines."""
    tensorboard: bool = False
    """Also write to the folder `tensorboard` of the run."""
    wandb: str | None = None
    """Project of Weights & Biases to write to as well."""

    def __post_init__(self) -> None:
        positive_int("every", self.every)


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and what to keep."""

    every: int = 500
    """Steps between checkpoints. 0: only after the last step."""
    keep_last: int = 2
    """Number of newest checkpoints to keep."""
    keep_best: bool = True
    """Also keep the checkpoint with the lowest validation loss."""
    background: bool = False
    """Copy the state, and let a thread write it while training continues."""

    def __post_init__(self) -> None:
        positive_int("every", self.every, at_least=0)
        positive_int("keep_last", self.keep_last)
