"""What one process trains with: model, optimisers and their device (`Learner`), and the text of a run (`Trainer`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from grmoe.checks import require
from grmoe.data import TokenDataset
from grmoe.hardware import peak_flops
from grmoe.model import Cost, GrmoeConfig, GrmoeForCausalLM, count
from grmoe.optim import GrassmannAdam, ProjectedAdam, QRAdam, optimizer_groups
from grmoe.parallel.build import build_model
from grmoe.parallel.shard import split_by_mesh
from grmoe.parallel.world import World
from grmoe.routing import Elastic, EntropyTerm, routers, set_balances, set_elastic, set_entropy, set_leading
from grmoe.routing.budget import Balances
from grmoe.routing.elastic import Unit
from grmoe.runs.config import TrainConfig
from grmoe.runs.config_groups import OptimConfig
from grmoe.runs.model_settings import check_size
from grmoe.runs.start import check_tokenizer, open_source
from grmoe.runs.state import copy_weights
from grmoe.train.objective import forward_loss
from grmoe.train.schedule import remember_peaks


@dataclass(kw_only=True)
class Learner:
    """A model and all that a step of training needs. Batches come from the caller (`grmoe.train.step`)."""

    config: TrainConfig
    world: World
    masked: bool
    """Batches hold context: negative tokens, on which no loss counts."""
    model: GrmoeForCausalLM
    forward: Callable[..., Any]
    """The model, compiled or not."""
    optimizers: list[Optimizer]
    length: int
    """Tokens per sequence."""
    rows: int
    """Sequences of this process per step."""
    micro_rows: int
    """Sequences per micro-batch."""
    cost: Cost
    """Of the model at this length and its full budget."""
    peak_flops: float | None
    """Of this process's device; None if unknown."""
    guards_on_device: bool
    """The device itself skips the update of a step with NaN or Inf, so the host need not wait for the step."""
    found_inf: Tensor
    """0-d: one from the first step with NaN or Inf on."""

    @property
    def tokens_per_step(self) -> int:
        return self.config.data.batch_size * self.length

    def autocast(self) -> AbstractContextManager[Any]:
        # Shards are cast when they are gathered. A second cast would only cost time.
        if not uses_bf16(self.config, self.world) or self.world.mesh is not None:
            return nullcontext()
        return torch.autocast(self.world.device.type, torch.bfloat16)

    def run(self, forward: Callable[..., Any], rows_BS: Tensor, **options: Any) -> Any:
        """The output of the model (`forward`: compiled or not) for sequences (B, S + 1) on the device."""
        with self.autocast():
            return forward_loss(forward, rows_BS, **options)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


@dataclass(kw_only=True)
class Trainer(Learner):
    """One process's part of a run: a learner and its text."""

    data: TokenDataset
    validation: TokenDataset


def uses_bf16(config: TrainConfig, world: World) -> bool:
    return config.precision == "bf16" or (config.precision == "auto" and world.device.type == "cuda")


def build_trainer(config: TrainConfig, world: World) -> Trainer:
    """Build everything from the configuration. The same seed gives the same start on any number of processes."""
    config = config.resolved()
    data, validation = (TokenDataset(config.data.path, split) for split in ("train", "validation"))
    require(
        validation.tokens > 1,
        f"data.path must hold validation text, got {config.data.path} without any; "
        "prepare it again with --validation 1%",
    )
    model_config = config.model_config(data.vocab_size, data.end_of_text)
    check_size(model_config, world, config.parallel.replicate)
    length = config.data.sequence_length or model_config.max_position_embeddings
    require(
        length <= model_config.max_position_embeddings,
        f"data.sequence_length must be at most the model's {model_config.max_position_embeddings}, got {length}",
    )
    rows, _ = _divide_batch(config, world)
    _check_enough(data, rows * world.size, length)
    learner = build_learner(config, world, model_config, length, masked=data.masked)
    return Trainer(**vars(learner), data=data, validation=validation)


def _check_enough(data: TokenDataset, sequences: int, length: int) -> None:
    """Raise now, and not after minutes of building, if the data is too short for one batch."""
    require(
        data.num_windows(length) >= sequences,
        f"{data.folder} holds {data.tokens:,} tokens to train on, less than one batch of {sequences} sequences of "
        f"{length} tokens: give more text, or smaller data.sequence_length or data.batch_size",
    )


def load_start(trainer: Trainer, path: str) -> None:
    """Give the model the weights of a run or of an exported model. Optimisers start fresh."""
    source, data = open_source(path), trainer.data
    check_tokenizer(source, data.folder, data.tokenizer_folder, data.vocab_size)
    copy_weights(trainer.model, source.model.state_dict(), path)


def build_learner(
    config: TrainConfig, world: World, model_config: GrmoeConfig, length: int, masked: bool = False
) -> Learner:
    """Build the model and all that trains it. `config` is resolved."""
    rows, micro_rows = _divide_batch(config, world)
    torch.manual_seed(config.seed)
    model = build_model(model_config, world, bf16=uses_bf16(config, world)).train()
    if config.alpha.schedule == "learned":
        for router in routers(model):
            router.learn_alpha()
        model.config.alpha = 1.0  # a factor on the learned ones
    elastic = config.elastic
    if elastic.on:
        set_elastic(model, Elastic(cast(Unit, elastic.unit), elastic.rule))
    set_balances(model, cast(Balances, config.routing.prior_counts))
    if config.routing.entropy_weight:
        set_entropy(model, EntropyTerm(config.routing.entropy_weight, config.routing.entropy_target))
    set_leading(model, config.routing.leading_weight or 0.0)
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable()
    cuda = world.device.type == "cuda"
    forward: Callable[..., Any] = model
    if cuda if config.compile is None else config.compile:
        # CUDA graphs, because launching kernel by kernel keeps the host busy longer than the device. Graphs own the
        # memory of gradients, so gradients cannot accumulate between two of them. FSDP's hooks rule graphs out.
        one_pass = rows == micro_rows and not (elastic.on and elastic.distill)
        graphs = cuda and world.mesh is None and one_pass
        mode = "reduce-overhead" if graphs else "default"
        forward = torch.compile(model, dynamic=False, mode=mode)
    return Learner(
        config=config,
        world=world,
        masked=masked,
        model=model,
        forward=forward,
        optimizers=build_optimizers(model, config.optim),
        length=length,
        rows=rows,
        micro_rows=micro_rows,
        cost=count(model_config, length),
        peak_flops=peak_flops(world.device),
        guards_on_device=cuda and world.mesh is None,
        found_inf=torch.zeros((), device=world.device),
    )


def build_optimizers(model: nn.Module, config: OptimConfig) -> list[Optimizer]:
    """AdamW for weights and κ, `frames_method` for subspaces, each with its own learning rates."""
    entrywise = {"projected": ProjectedAdam, "qr": QRAdam}.get(config.frames_method)
    frames_lr = config.lr if entrywise and config.frames_lr is None else config.frames_lr
    groups, frames = optimizer_groups(model, config.lr, config.weight_decay, frames_lr, config.kappa_lr)
    # Fused, because only then does the device skip the update of a step with NaN or Inf.
    fused = all(p.device.type == "cuda" for group in groups for p in group["params"])
    betas = (config.betas[0], config.betas[1])
    optimizers: list[Optimizer] = [
        AdamW(split_by_mesh(groups), lr=config.lr, betas=betas, eps=config.eps, fused=fused)
    ]
    if frames and entrywise:
        optimizers.append(entrywise(frames, config.lr, betas, config.eps, fused))
    elif frames:
        optimizers.append(GrassmannAdam(frames))
    remember_peaks(optimizers)
    return optimizers


def _divide_batch(config: TrainConfig, world: World) -> tuple[int, int]:
    """(sequences of this process per step, sequences per micro-batch)."""
    total, micro = config.data.batch_size, config.data.micro_batch_size
    require(
        total % world.size == 0,
        f"data.batch_size must be a multiple of the {world.size} processes, got {total}",
    )
    rows = total // world.size
    micro = rows if micro is None else min(micro, rows)
    require(rows % micro == 0, f"data.micro_batch_size must divide a process's {rows} sequences, got {micro}")
    return rows, micro
