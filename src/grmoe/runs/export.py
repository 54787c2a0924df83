"""From a run's checkpoint, written by any number of processes, to a folder everything in Hugging Face's world loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from grmoe.model import GrmoeForCausalLM, export_remote_code
from grmoe.runs.card import MODEL_CARD, run_card
from grmoe.runs.checkpoint import Checkpoint
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import checkpoints_of, saved_config, tokenizer_of, vocabulary
from grmoe.runs.state import gather


def find_checkpoint(folder: Path, which: str = "best") -> tuple[TrainConfig, Checkpoint]:
    """A run's configuration and one of its checkpoints: "best", "last" or a step."""
    config = saved_config(folder)
    checkpoints = checkpoints_of(folder, config)
    found = checkpoints.all()
    if not found:
        raise ValueError(f"{folder} has no checkpoint yet")
    if which == "best":
        return config, checkpoints.best() or found[-1]
    if which == "last":
        return config, found[-1]
    for checkpoint in found:
        if str(checkpoint.step) == which:
            return config, checkpoint
    kept = ", ".join(str(c.step) for c in found)
    raise ValueError(f"checkpoint must be best, last or one of the steps {kept}, got {which!r}")


def load_model(folder: Path, which: str = "best") -> tuple[GrmoeForCausalLM, Path, Checkpoint]:
    """The model of a checkpoint, in one process on the CPU, and the folder of its tokenizer. Needs no data."""
    config, checkpoint = find_checkpoint(folder, which)
    tokenizer = tokenizer_of(folder, config)
    model = GrmoeForCausalLM(config.model_config(*vocabulary(tokenizer)))
    weights = gather(model, [])["model"]  # the live tensors, filled in place
    checkpoints_of(folder, config).load(checkpoint, {"model": weights})
    return model.eval(), tokenizer, checkpoint


def export(
    run: Path,
    out: Path,
    which: str = "best",
    alpha: float | Sequence[float] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Checkpoint:
    """Write safetensors, configuration, tokenizer, remote code and a model card; the folder is whole or not there."""
    if out.exists() and not _is_export(out):
        raise ValueError(f"{out} exists and is no exported model; give another folder (--out)")
    model, tokenizer, checkpoint = load_model(run, which)
    if alpha is not None:
        model.set_alpha(alpha)
    writing = out.with_name(f".writing-{out.name}")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        nn.Module.to(model, dtype)  # routers stay in fp32
        model.save_pretrained(writing)
        for file in sorted(tokenizer.iterdir()):
            shutil.copyfile(file, writing / file.name)
        export_remote_code(writing)
        saved = "the trained setting" if alpha is None else f"the trained setting but for α = {alpha}"
        card = run_card(run, checkpoint, out.name, model.config.router, saved)
        (writing / MODEL_CARD).write_text(card, encoding="utf-8")
        shutil.rmtree(out, ignore_errors=True)
        os.rename(writing, out)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    return checkpoint


def _is_export(folder: Path) -> bool:
    try:
        return json.loads((folder / "config.json").read_text()).get("model_type") == "grmoe"
    except (OSError, ValueError):
        return not any(folder.iterdir()) if folder.is_dir() else False
