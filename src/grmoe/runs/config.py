"""Everything a training run can be told, with defaults that train.

The YAML file has these groups; `grmoe train run.yaml optim.lr=6e-4 model.router=softmax` overrides single keys.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any, Literal

from grmoe.checks import finite, positive_int, require
from grmoe.model import PRESETS, GrmoeConfig, preset
from grmoe.parallel.world import ParallelConfig

Kind = Literal[
    "weights", "kappa", "frames"
]  # of parameters: each has its own peak rate and may have its own schedule
KINDS: tuple[Kind, ...] = ("weights", "kappa", "frames")


@dataclass(frozen=True)
class DataConfig:
    path: str = "runs/data"  # as `grmoe prepare` wrote it
    sequence_length: int | None = None  # the model's longest, unless said
    batch_size: int = 32  # sequences a step, all processes together
    micro_batch_size: int | None = None  # sequences a process computes at once; fewer accumulate gradients

    def __post_init__(self) -> None:
        positive_int("batch_size", self.batch_size)
        for name in ("sequence_length", "micro_batch_size"):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name))


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 3e-4
    frames_lr: float | None = None  # of the subspaces, on their manifold; 0.003·√rank unless said
    kappa_lr: float | None = None  # of log κ; 5·lr unless said: at lr the concentrations hardly move
    warmup: int | None = None  # steps; 2000, or three tenths of a shorter run
    floor: float = 0.1  # the last rate, as a share of the peak
    # The subspaces' and log κ's own; as the weights' unless said.
    frames_warmup: int | None = None
    frames_floor: float | None = None
    kappa_warmup: int | None = None
    kappa_floor: float | None = None
    betas: tuple[float, ...] = (0.9, 0.95)  # of AdamW, as eps
    eps: float = 1e-8
    weight_decay: float = 0.1  # of matrices; never of norms, κ and subspaces
    clip: float = 1.0  # largest norm of a step's gradient; 0: as large as it comes

    def __post_init__(self) -> None:
        for name in ("lr", "frames_lr", "kappa_lr", "eps", "weight_decay", "clip"):
            if getattr(self, name) is not None:
                finite(name, getattr(self, name), at_least=0)
        for own in ("", "frames_", "kappa_"):
            warmup, floor = getattr(self, f"{own}warmup"), getattr(self, f"{own}floor")
            if warmup is not None:
                positive_int(f"{own}warmup", warmup, at_least=0)
            if floor is not None:
                finite(f"{own}floor", floor, at_least=0)
                require(floor <= 1, f"{own}floor must be at most 1, got {floor}")
        require(len(self.betas) == 2, f"betas must be two numbers, got {self.betas}")


@dataclass(frozen=True)
class RoutingConfig:
    """What shapes the routers while they train. Losses of the baselines are options of theirs: model.router_options."""

    overlap_weight: float = 0.01  # β of the overlap regulariser; 0: none
    overlap_rho: float = 0.5  # ρ0, its hinge, as a share of the overlap of random subspaces
    overlap_pairs: Literal["auto", "all"] = "auto"  # auto: a sample of 4N pairs where there are more
    prior_rate: float = 0.05  # η of the balanced prior, times the learning rate's schedule

    def __post_init__(self) -> None:
        for name in ("overlap_weight", "overlap_rho", "prior_rate"):
            finite(name, getattr(self, name), at_least=0)


@dataclass(frozen=True)
class AlphaConfig:
    """What the dial does while training. Validation and the saved model are at the model's own α."""

    schedule: Literal["constant", "anneal", "sample"] = "constant"
    low: float = 0.5  # anneal: from here to the model's α, geometrically; sample: log-uniform in [low, high]
    high: float = 4.0

    def __post_init__(self) -> None:
        finite("low", self.low, above=0)
        finite("high", self.high, at_least=self.low)


@dataclass(frozen=True)
class ValidationConfig:
    every: int = 500  # steps; 0: at the end only
    tokens: int = 250_000  # of each domain, at most
    batch_size: int | None = None  # sequences at once; those of training unless said

    def __post_init__(self) -> None:
        positive_int("every", self.every, at_least=0)
        positive_int("tokens", self.tokens)
        if self.batch_size is not None:
            positive_int("batch_size", self.batch_size)


@dataclass(frozen=True)
class LogConfig:
    every: int = 10  # steps; log.jsonl is written always
    tensorboard: bool = False
    wandb: str | None = None  # the project's name

    def __post_init__(self) -> None:
        positive_int("every", self.every)


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500  # steps; 0: at the end only
    keep_last: int = 2
    keep_best: bool = True  # the one of lowest validation loss
    background: bool = False  # copy the state and train on while a thread writes it

    def __post_init__(self) -> None:
        positive_int("every", self.every, at_least=0)
        positive_int("keep_last", self.keep_last)


@dataclass(frozen=True)
class TrainConfig:
    out: str = "runs/train"
    steps: int = 1000
    seed: int = 0
    device: str = "auto"  # the GPU where there is one
    precision: Literal["auto", "bf16", "fp32"] = "auto"  # auto: bf16 on a GPU; weights are fp32 in any case
    compile: bool | None = None  # torch.compile; on a GPU unless said
    activation_checkpointing: bool = False  # less memory for a third more arithmetic
    # A preset ("small" unless said, null for none) and fields of GrmoeConfig: {preset: tiny, router: softmax}.
    model: dict[str, Any] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    alpha: AlphaConfig = field(default_factory=AlphaConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        positive_int("steps", self.steps)
        # Written out: what is shown and saved says which model it is.
        object.__setattr__(self, "model", {"preset": "small", **self.model})
        known = ["preset", *_model_fields()]
        for name in self.model:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown key 'model.{name}'{hint}")
        known_preset = self.preset is None or self.preset in PRESETS
        require(known_preset, f"model.preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")

    @property
    def preset(self) -> str | None:
        return self.model["preset"]

    def schedule(self, kind: Kind) -> tuple[int, float]:
        """(steps of warm-up, last rate as a share of the peak) of a kind of parameters."""
        o = self.optim
        warmups = {"weights": o.warmup, "kappa": o.kappa_warmup, "frames": o.frames_warmup}
        floors = {"weights": o.floor, "kappa": o.kappa_floor, "frames": o.frames_floor}
        given = (warmups[kind], o.warmup, min(2000, 3 * self.steps // 10))
        floor = floors[kind]
        return next(w for w in given if w is not None), o.floor if floor is None else floor

    def model_config(self, vocab_size: int, end_of_text: int) -> GrmoeConfig:
        """The model's configuration for a tokenizer; a vocabulary that is too small for it is refused."""
        changes = {k: v for k, v in self.model.items() if k != "preset"}
        changes = {
            "vocab_size": vocab_size,
            "bos_token_id": end_of_text,
            "eos_token_id": end_of_text,
        } | changes
        require(
            changes["vocab_size"] >= vocab_size,
            f"model.vocab_size must be at least the data's {vocab_size}, got {changes['vocab_size']}",
        )
        return GrmoeConfig(**changes) if self.preset is None else preset(self.preset, **changes)


# A run goes on with another value of these: they change what is shown, kept or where it runs, not what is trained. Data
# may lie elsewhere, for a checkpoint knows their checksum.
MAY_CHANGE_ON_RESUME = (
    "out", "device", "compile", "activation_checkpointing", "data.path", "data.micro_batch_size", "validation", "log",
    "checkpoint", "parallel",
)  # fmt: skip


def may_change_on_resume(difference: str) -> bool:
    """Whether a line of `grmoe.config.differences` may change when a run is resumed."""
    name = difference.partition(":")[0]
    return any(name == key or name.startswith(f"{key}.") for key in MAY_CHANGE_ON_RESUME)


def _model_fields() -> list[str]:
    return [f.name for f in dataclasses.fields(GrmoeConfig)]
