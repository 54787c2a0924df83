"""The configuration of a training run. Every key has a default, and the defaults train.

A YAML file holds groups of keys (`grmoe.runs.config_groups`). `grmoe train run.yaml optim.lr=6e-4 model.router=softmax`
overrides single keys. Here is what concerns several groups: choices that follow from other keys, combinations that are
refused, and what a resumed run may change.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from grmoe.checks import positive_int, require
from grmoe.model import PRESETS, GrmoeConfig, preset
from grmoe.model.choices_grmoe import OWN_CHOICE
from grmoe.parallel.world import ParallelConfig
from grmoe.runs.config_groups import (
    AlphaConfig,
    CheckpointConfig,
    DataConfig,
    ElasticConfig,
    LogConfig,
    OptimConfig,
    RoutingConfig,
    ValidationConfig,
)
from grmoe.runs.model_settings import MODEL_KEYS, convert_model

# Fields of a model that a run writes down, because a later version of its preset may have others.
_OF_PRESET = ("norm_topk_prob", "embedding_multiplier", "residual_loss_coef", "router_rank")

# Kinds of parameters. Each has its own peak learning rate and may have its own schedule.
Kind = Literal["weights", "kappa", "frames"]
KINDS: tuple[Kind, ...] = ("weights", "kappa", "frames")


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
    model: dict[str, Any] = field(default_factory=dict, metadata={"keys": MODEL_KEYS})
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
        keys = {
            "unit": elastic.on and elastic.unit,
            "full_share": elastic.full_share,
            "distill": elastic.distill,
        }
        asked = [f"elastic.{key}={value}" for key, value in keys.items() if value and elastic.unit != "off"]
        require(
            not (why_not and asked),
            f"elastic.unit must be off, because {why_not}; got {' '.join(asked)}",
        )
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
