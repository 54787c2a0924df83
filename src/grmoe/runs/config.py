"""The configuration of a training run. Every key has a default, and the defaults train.

A YAML file holds these groups. `grmoe train run.yaml optim.lr=6e-4 model.router=softmax` overrides single keys. The
docstrings of the fields are the configuration reference (`grmoe.config.describe_fields`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from grmoe.checks import finite, positive_int, require
from grmoe.model import PRESETS, GrmoeConfig, preset
from grmoe.model.choices_grmoe import OWN_CHOICE
from grmoe.parallel.world import ParallelConfig
from grmoe.runs.model_settings import convert_model

# Fields of a model that a run writes down, because a later version of its preset may have others.
_OF_PRESET = ("norm_topk_prob", "embedding_multiplier", "residual_loss_coef", "router_rank")

# Kinds of parameters. Each has its own peak learning rate and may have its own schedule.
Kind = Literal["weights", "kappa", "frames"]
KINDS: tuple[Kind, ...] = ("weights", "kappa", "frames")


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


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run."""

    out: str = "runs/train"
    """Folder of the run."""
    steps: int = 1000
    """Optimiser steps. A resumed run may have more; its learning rates then follow the longer schedule."""
    seed: int = 0
    """Seed of the weights, of the order of the data and of everything random in a step."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:N`, or `auto` for a GPU if there is one."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of the forward and backward pass. `auto`: bf16 on a GPU. Weights are always fp32."""
    compile: bool | None = None
    """Use torch.compile. Default: on a GPU."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more arithmetic."""
    start_from: str | None = None
    """Folder of a run or of an exported model that gives the model and its first weights: `grmoe train --from`."""
    model: dict[str, Any] = field(default_factory=dict)
    """A preset (default: `small`; `tiny` for `grmoe train` on a CPU; `null` for none) and fields of `GrmoeConfig`:
    {preset: tiny, router: softmax}."""
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    alpha: AlphaConfig = field(default_factory=AlphaConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        positive_int("steps", self.steps)
        require(-(2**63) <= self.seed < 2**63, f"seed must have 64 bits at most, got {self.seed}")
        # Explicit, so that printed and saved configurations name the preset.
        object.__setattr__(self, "model", convert_model({"preset": "small", **self.model}))
        known_preset = self.preset is None or self.preset in PRESETS
        require(known_preset, f"model.preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")

    @property
    def preset(self) -> str | None:
        return self.model["preset"]

    def schedule(self, kind: Kind) -> tuple[int, float]:
        """(steps of warm-up, last learning rate as a share of the peak) of a kind of parameters."""
        o = self.optim
        warmups = {"weights": o.warmup, "kappa": o.kappa_warmup, "frames": o.frames_warmup}
        floors = {"weights": o.floor, "kappa": o.kappa_floor, "frames": o.frames_floor}
        given = (warmups[kind], o.warmup, min(2000, 3 * self.steps // 10))
        floor = floors[kind]
        return next(w for w in given if w is not None), o.floor if floor is None else floor

    def model_config(self, vocab_size: int, end_of_text: int) -> GrmoeConfig:
        """The model's configuration for a tokenizer. Raises if its vocabulary is too small for the tokenizer."""
        tokens = {"vocab_size": vocab_size, "bos_token_id": end_of_text, "eos_token_id": end_of_text}
        changes = tokens | {k: v for k, v in self.model.items() if k != "preset"}
        advice = (
            "" if self.start_from is None else f": prepare the text with the tokenizer of {self.start_from}"
        )
        require(
            changes["vocab_size"] >= vocab_size,
            f"model.vocab_size must be at least the data's {vocab_size}, got {changes['vocab_size']}{advice}",
        )
        return GrmoeConfig(**changes) if self.preset is None else preset(self.preset, **changes)

    def resolved(self) -> TrainConfig:
        """With the choices written out that follow from other keys. Raises where `elastic` does not fit the model.

        A run saves them, so that a later version with other defaults still knows how it was trained.
        """
        model, elastic = self.model_config(1, 0), self.elastic  # the size of the vocabulary plays no part
        why_not = _why_not_elastic(model)
        require(
            self.alpha.schedule == "constant" or model.router != "hash",
            f"alpha.schedule must be constant with the router 'hash', which has no dial, got {self.alpha.schedule}",
        )
        require(
            self.alpha.schedule != "anneal" or min(model.alphas) > 0,
            f"alpha.schedule=anneal is geometric, so model.alpha must be above zero, got {model.alpha}",
        )
        asked = elastic.unit != "off" and (elastic.on or elastic.full_share > 0 or elastic.distill > 0)
        require(not (why_not and asked), f"elastic.unit must be off, because {why_not}; got {elastic}")
        require(
            not self.routing.entropy_weight or model.router != "hash",
            f"routing.entropy_weight must be 0 with the router 'hash', which learns no gate, "
            f"got {self.routing.entropy_weight}",
        )
        require(
            not self.routing.leading_weight or model.router not in OWN_CHOICE,
            f"routing.leading_weight must be 0 with the router {model.router!r}, which chooses by itself, "
            f"got {self.routing.leading_weight}",
        )
        if elastic.unit == "auto":
            elastic = replace(elastic, unit="off" if why_not else "token")
        N, pairs = model.num_experts, self.routing.overlap_pairs
        require(
            isinstance(pairs, str) or pairs <= N * (N - 1) // 2,
            f"routing.overlap_pairs must be at most the {N * (N - 1) // 2} pairs of {N} experts, got {pairs}",
        )
        routing = RoutingConfig(
            prior_counts="candidates" if elastic.on else "computed",
            leading_weight=0.01 if elastic.on else 0.0,
        )
        model_choices = {name: getattr(model, name) for name in _OF_PRESET}
        return self.filled_from(TrainConfig(model=model_choices, elastic=elastic, routing=routing))

    def filled_from(self, other: TrainConfig) -> TrainConfig:
        """With the choices of another configuration where this one leaves them open."""
        elastic, routing = self.elastic, self.routing
        if elastic.unit == "auto":
            elastic = replace(elastic, unit=other.elastic.unit)
        if routing.prior_counts == "auto":
            routing = replace(routing, prior_counts=other.routing.prior_counts)
        if routing.leading_weight is None:
            routing = replace(routing, leading_weight=other.routing.leading_weight)
        model = {name: value for name, value in other.model.items() if name in _OF_PRESET} | self.model
        open_rates = [n for n in ("warmup", "frames_lr", "kappa_lr") if getattr(self.optim, n) is None]
        optim = replace(self.optim, **{name: getattr(other.optim, name) for name in open_rates})
        return replace(self, model=model, optim=optim, elastic=elastic, routing=routing)

    def continuing(self, shorter: TrainConfig) -> TrainConfig:
        """With the warm-up of the run that it continues with more steps, because that warm-up is over or under way."""
        return replace(self, optim=replace(self.optim, warmup=shorter.schedule("weights")[0]))


# Keys that may change when a run is resumed. They change what is logged, what is kept or where it runs, but not what
# is trained. The data may have moved, because a checkpoint stores its checksum. `steps` may be raised.
_MAY_CHANGE_ON_RESUME = (
    "out", "steps", "device", "compile", "activation_checkpointing", "data.path", "data.micro_batch_size", "validation",
    "log", "checkpoint", "parallel",
)  # fmt: skip


def may_change_on_resume(difference: str) -> bool:
    """Whether a line of `grmoe.config.differences` may change when a run is resumed."""
    name = difference.partition(":")[0]
    return any(name == key or name.startswith(f"{key}.") for key in _MAY_CHANGE_ON_RESUME)


def _why_not_elastic(model: GrmoeConfig) -> str:
    """Why random budgets change nothing in this model; empty where they do."""
    if model.router in OWN_CHOICE:
        return f"the router {model.router!r} chooses by itself"
    if model.selection not in ("topk", "mass"):
        return f"the selection {model.selection!r} has no budget"
    return "" if (model.num_experts_per_tok or 0) > 1 else "the model computes one expert per token"
