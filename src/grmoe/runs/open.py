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
from grmoe.runs.checkpoint import Checkpoint
from grmoe.runs.export import load_model
from grmoe.runs.folder import CONFIG, data_checksum, saved_config


@dataclass(frozen=True)
class LoadedModel:
    path: Path
    model: GrmoeForCausalLM  # in eval mode, on `device`
    tokenizer: Any
    data: TokenDataset | None  # the validation split a run was measured on; None where there is none
    step: int | None  # of a run's checkpoint
    missing: str = "an exported model has none"  # why `data` is None

    def held_out(self, give: str = "--text FILE") -> TokenDataset:
        """The validation split, or an error that says why there is none and what to give instead."""
        if self.data is None:
            raise ValueError(
                f"{self.path} comes without held-out text ({self.missing}): give some with {give}"
            )
        return self.data


def open_model(
    path: str | Path,
    checkpoint: str = "best",
    alpha: float | Sequence[float] | None = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> LoadedModel:
    """A run's checkpoint ("best", "last" or a step) in fp32, or an exported folder as it was saved.

    alpha: in place of the dial saved with it. device: by default the GPU, where there is one. dtype: of everything but
    the routers. Where a run's data have moved, vanished or changed, its model opens all the same, without text.
    """
    path = Path(path)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if (path / CONFIG).is_file():
        model, tokenizer_folder, found = load_model(path, checkpoint)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
        if alpha is not None:
            model.set_alpha(alpha)
    elif (path / "config.json").is_file():
        found = None
        model, tokenizer = load(path, alpha)
    else:
        raise ValueError(f"{path} is neither a run of `grmoe train` nor an exported model")
    torch.nn.Module.to(model, device=place, dtype=dtype)  # routers stay in fp32
    if found is None:
        return LoadedModel(path, model.eval(), tokenizer, None, None)
    try:
        data, why = _held_out(path, found), ""
    except ValueError as error:
        data, why = None, str(error)
    return LoadedModel(path, model.eval(), tokenizer, data, found.step, why)


def _held_out(run: Path, checkpoint: Checkpoint) -> TokenDataset:
    place = saved_config(run).data.path
    data = TokenDataset(place, "validation")
    if checkpoint.meta["data"] != data_checksum(data.folder):
        raise ValueError(f"{place} is not the data it was trained on")
    return data
