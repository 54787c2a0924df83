"""A model to look at, from wherever it lies: the folder of a run, or an exported one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from grmoe.data import TokenDataset
from grmoe.model import GrmoeForCausalLM
from grmoe.model.generation import load
from grmoe.train.export import load_model
from grmoe.train.record import CONFIG


@dataclass(frozen=True)
class Opened:
    path: Path
    model: GrmoeForCausalLM  # in eval mode, on `device`
    tokenizer: Any
    data: TokenDataset | None  # the validation split a run was measured on; None for an exported folder
    step: int | None  # of a run's checkpoint


def open_model(
    path: str | Path,
    checkpoint: str = "best",
    alpha: float | Sequence[float] | None = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> Opened:
    """A run's checkpoint ("best", "last" or a step) in fp32, or an exported folder as it was saved.

    alpha: in place of the dial saved with it. device: by default the GPU, where there is one. dtype: of everything but
    the routers.
    """
    path = Path(path)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    data: TokenDataset | None = None
    step: int | None = None
    if (path / CONFIG).is_file():
        model, train, found = load_model(path, checkpoint)
        data, step = TokenDataset(train.folder, "validation"), found.step
        tokenizer = PreTrainedTokenizerFast.from_pretrained(train.tokenizer_folder)
        if alpha is not None:
            model.set_alpha(alpha)
    elif (path / "config.json").is_file():
        model, tokenizer = load(path, alpha)
    else:
        raise ValueError(f"{path} is neither a run of `grmoe train` nor an exported model")
    torch.nn.Module.to(model, device=place, dtype=dtype)  # routers stay in fp32
    return Opened(path, model.eval(), tokenizer, data, step)
