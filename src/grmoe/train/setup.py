"""What a run works with: data, model, optimisers, and where they live."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from grmoe.checks import require
from grmoe.data import TokenDataset
from grmoe.hardware import peak_flops
from grmoe.model import GrmoeForCausalLM, count
from grmoe.optim import GrassmannAdam, split_parameters
from grmoe.parallel.build import build_model
from grmoe.parallel.shard import split_by_mesh
from grmoe.parallel.world import World
from grmoe.runs.config import OptimConfig, TrainConfig
from grmoe.train.schedule import remember_peaks


@dataclass
class Session:
    """One process's part of a run."""

    config: TrainConfig
    world: World
    data: TokenDataset
    validation: TokenDataset
    model: GrmoeForCausalLM
    forward: Callable[..., Any]  # the model, compiled or not
    optimizers: list[Optimizer]
    length: int  # tokens of a sequence
    rows: int  # sequences of this process in a step
    micro_rows: int  # computed at once
    flops_per_token: float
    peak_flops: float | None  # of this process's device, where it is known
    guarded: bool  # a bad step is undone on the device, without waiting for it
    bad: Tensor  # 0-d: one from the first bad step on

    @property
    def tokens_per_step(self) -> int:
        return self.config.data.batch_size * self.length

    def autocast(self) -> AbstractContextManager[Any]:
        # Shards are cast when they are gathered; a second cast would only cost time.
        if not uses_bf16(self.config, self.world) or self.world.mesh is not None:
            return nullcontext()
        return torch.autocast(self.world.device.type, torch.bfloat16)

    def run(self, forward: Callable[..., Any], rows_BS: Tensor) -> Any:
        """The model's output, loss without logits, for sequences (B, S + 1) on the device."""
        targets = rows_BS[:, 1:].contiguous()
        with self.autocast():
            return forward(
                input_ids=rows_BS[:, :-1],
                labels=targets,
                shift_labels=targets,
                use_cache=False,
                skip_logits=True,
            )


def uses_bf16(config: TrainConfig, world: World) -> bool:
    return config.precision == "bf16" or (config.precision == "auto" and world.device.type == "cuda")


def open_session(config: TrainConfig, world: World) -> Session:
    """Build everything from the configuration; the same seed gives the same start on any number of processes."""
    data, validation = (TokenDataset(config.data.path, split) for split in ("train", "validation"))
    require(validation.tokens > 1, f"{config.data.path} holds no validation text; prepare some")
    model_config = config.model_config(data.vocab_size, data.end_of_text)
    length = config.data.sequence_length or model_config.max_position_embeddings
    require(
        length <= model_config.max_position_embeddings,
        f"data.sequence_length must be at most the model's {model_config.max_position_embeddings}, got {length}",
    )
    rows, micro_rows = _share(config, world)
    data.batches(
        rows, length, config.seed, world.rank, world.size
    )  # refuses data that is too short for a batch

    torch.manual_seed(config.seed)
    model = build_model(model_config, world, bf16=uses_bf16(config, world)).train()
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable()
    cost = count(model_config, length)
    optimizers = build_optimizers(model, config.optim)
    cuda = world.device.type == "cuda"
    forward: Callable[..., Any] = model
    if cuda if config.compile is None else config.compile:
        # Launching kernel by kernel keeps the host busy longer than the device. Graphs own the memory of gradients,
        # so nothing can be accumulated between two of them; FSDP's hooks allow none.
        graphs = cuda and world.mesh is None and rows == micro_rows
        mode = "reduce-overhead" if graphs else "default"
        forward = torch.compile(model, dynamic=False, mode=mode)
    return Session(
        config, world, data, validation, model, forward, optimizers, length, rows, micro_rows,
        cost.train_flops, peak_flops(world.device), cuda and world.mesh is None,
        torch.zeros((), device=world.device),
    )  # fmt: skip


def build_optimizers(model: nn.Module, config: OptimConfig) -> list[Optimizer]:
    """AdamW for weights and κ, `GrassmannAdam` for subspaces, each with the rates of its own groups."""
    split = split_parameters(model)
    matrices, vectors = [p for p in split.rest if p.ndim > 1], [p for p in split.rest if p.ndim <= 1]
    kappa_lr = _or(config.kappa_lr, 5 * config.lr)
    groups: list[dict[str, Any]] = [
        {"kind": "weights", "params": matrices, "weight_decay": config.weight_decay},
        {"kind": "weights", "params": vectors, "weight_decay": 0.0},
        {"kind": "kappa", "params": split.kappa, "weight_decay": 0.0, "lr": kappa_lr},
    ]
    fused = all(p.device.type == "cuda" for p in split.rest)
    betas = (config.betas[0], config.betas[1])
    groups = split_by_mesh(g for g in groups if g["params"])
    optimizers: list[Optimizer] = [AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)]
    if split.frame_groups:
        rank = split.frame_groups[0]["params"][0].shape[-1]
        frames = [{"kind": "frames", **group} for group in split.frame_groups]
        optimizers.append(GrassmannAdam(frames, lr=_or(config.frames_lr, 0.003 * rank**0.5)))
    remember_peaks(optimizers)
    return optimizers


def _share(config: TrainConfig, world: World) -> tuple[int, int]:
    """(sequences of this process in a step, sequences at once)."""
    total, micro = config.data.batch_size, config.data.micro_batch_size
    require(
        total % world.size == 0,
        f"data.batch_size must be a multiple of the {world.size} processes, got {total}",
    )
    rows = total // world.size
    micro = rows if micro is None else min(micro, rows)
    require(rows % micro == 0, f"data.micro_batch_size must divide a process's {rows} sequences, got {micro}")
    return rows, micro


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
