"""From a run's checkpoint, written by any number of processes, to a folder everything in Hugging Face's world loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grmoe.data import TokenDataset
from grmoe.model import GrmoeForCausalLM, export_remote_code
from grmoe.train.checkpoint import Checkpoint
from grmoe.train.config import TrainConfig
from grmoe.train.record import checkpoints_of, read_log, saved_config
from grmoe.train.state import gather

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [grmoe, mixture-of-experts]
---

# {name}

A Grassmannian Mixture-of-Experts language model: each expert owns a subspace, a token goes to the experts that hold
most of its energy, and one number, α, sets the sparsity after training.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)  # no need to with grmoe installed
tokenizer = AutoTokenizer.from_pretrained("{name}")
model.set_alpha(2.0)  # sharper routing, nothing is retrained
```

{numbers}
"""


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


def load_model(folder: Path, which: str = "best") -> tuple[GrmoeForCausalLM, TokenDataset, Checkpoint]:
    """The model of a checkpoint, in one process on the CPU, and the data it was trained on."""
    config, checkpoint = find_checkpoint(folder, which)
    data = TokenDataset(config.data.path)
    model = GrmoeForCausalLM(config.model_config(data.vocab_size, data.end_of_text))
    weights = gather(model, [])["model"]  # the live tensors, filled in place
    checkpoints_of(folder, config).load(checkpoint, {"model": weights})
    return model.eval(), data, checkpoint


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
    model, data, checkpoint = load_model(run, which)
    if alpha is not None:
        model.set_alpha(alpha)
    writing = out.with_name(f".writing-{out.name}")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        nn.Module.to(model, dtype)  # routers stay in fp32
        model.save_pretrained(writing)
        for file in sorted(data.tokenizer_folder.iterdir()):
            shutil.copyfile(file, writing / file.name)
        export_remote_code(writing)
        (writing / "README.md").write_text(
            CARD.format(name=out.name, numbers=_numbers(run, checkpoint)), encoding="utf-8"
        )
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


def _numbers(run: Path, checkpoint: Checkpoint) -> str:
    """What the log says about the checkpoint."""
    lines = [v for v in read_log(run) if v["kind"] == "validation" and v["step"] <= checkpoint.step]
    if not lines:
        return f"Trained for {checkpoint.step} steps."
    last: dict[str, Any] = lines[-1]
    overlap = "–" if last["max_overlap"] is None else f"{last['max_overlap']:.3f}"
    rows = [
        ("validation perplexity", f"{last['perplexity']:.3f}"),
        *((f"validation loss, {name}", f"{loss:.4f}") for name, loss in last["domains"].items()),
        ("experts a token", f"{last['experts_per_token']:.2f}"),
        ("entropy of the gate, nats", f"{last['entropy']:.3f}"),
        ("load CV", f"{last['load_cv']:.3f}"),
        ("smallest load", f"{last['min_load']:.3f}"),
        ("largest overlap", overlap),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"After {last['step']} steps:\n\n| | |\n|---|---|\n{table}"
