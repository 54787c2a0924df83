"""Open a trained model from the folder of a run or of an exported model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerFast

from grmoe import checks
from grmoe.data import TokenDataset
from grmoe.hardware import find_device
from grmoe.model import GrmoeForCausalLM
from grmoe.model.presets import find_config
from grmoe.routing import routers
from grmoe.runs.checkpoint import Checkpoint
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import CONFIG, checkpoints_of, data_checksum, find_checkpoint, tokenizer_of, vocabulary
from grmoe.runs.results import ResultsError, find_results
from grmoe.runs.state import gather


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in eval mode on its device, with what belongs to it."""

    path: Path
    """Folder of the run or of the exported model."""
    model: GrmoeForCausalLM
    tokenizer: Any
    tokenizer_folder: Path
    length: int
    """Tokens per window: what the run was trained on; for an exported model, its longest context."""
    checkpoint: Checkpoint | None = None
    """Checkpoint of a run; None for an exported model."""
    data: TokenDataset | None = None
    """Validation split the run was measured on; None where there is none."""
    no_data: str = "an exported model has none"
    """Why `data` is None."""

    @property
    def step(self) -> int | None:
        return None if self.checkpoint is None else self.checkpoint.step

    @property
    def is_run(self) -> bool:
        return self.checkpoint is not None

    def held_out(self) -> TokenDataset:
        """The validation split, or an error that says why there is none and what to give instead."""
        if self.data is None:
            raise ValueError(f"{self.path} has no held-out text ({self.no_data}): give --text FILE")
        return self.data


def open_model(
    path: str | Path,
    checkpoint: str = "best",
    alpha: float | Sequence[float] | None = None,
    device: str = "auto",
    dtype: torch.dtype | Literal["served"] | None = None,
    budget: float | None = None,
) -> LoadedModel:
    """Open a run's checkpoint ("best", "last" or a step) or an exported folder.

    alpha: replaces the dial saved with the model.
    device: "auto" is the GPU, if there is one.
    dtype: of everything but the routers, which stay in fp32. None keeps the saved one, which is fp32 for a run.
        "served" turns a run into bf16 on a GPU, the precision it is served in.
    budget: experts per token, within the curve that `grmoe dial` calibrated. A run has the curve of its last
        calibration, if that was of the same checkpoint.
    A run opens without text if its data was moved, removed or changed.
    """
    checks.require(alpha is None or budget is None, "give alpha or budget, not both: a budget sets α too")
    path = Path(path)
    place = find_device(device)
    if (path / CONFIG).is_file():
        loaded = _open_run(path, checkpoint)
    elif (path / "config.json").is_file():
        loaded = _open_export(path)
    else:
        raise ValueError(f"{path} is neither a run of `grmoe train` nor an exported model")
    if dtype == "served":
        dtype = torch.bfloat16 if loaded.is_run and place.type == "cuda" else None
    torch.nn.Module.to(loaded.model, device=place, dtype=dtype)
    if alpha is not None:
        loaded.model.set_alpha(alpha)
    if budget is not None:
        loaded.model.set_budget(budget)
    return loaded


def _open_run(run: Path, which: str) -> LoadedModel:
    config, checkpoint = find_checkpoint(run, which)
    tokenizer_folder = tokenizer_of(run, config)
    model = GrmoeForCausalLM(config.model_config(*vocabulary(tokenizer_folder)))
    learned = routers(model) if config.alpha.schedule == "learned" else []
    for router in learned:
        router.learn_alpha()
    weights = gather(model, [])["model"]  # the live tensors, filled in place
    checkpoints_of(run, config).load(checkpoint, {"model": weights})
    for router in learned:
        router.keep_alpha()
    if learned:
        model.set_alpha(model.alpha)
    model.config.budget_curve = _calibrated(run, checkpoint.step)
    model.set_budget(None)  # makes room for the largest budget of the curve
    try:
        data, why = _held_out(config, checkpoint), ""
    except ValueError as error:
        data, why = None, str(error)
    return LoadedModel(
        path=run,
        model=model.eval(),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(tokenizer_folder),
        tokenizer_folder=tokenizer_folder,
        length=config.data.sequence_length or model.config.max_position_embeddings,
        checkpoint=checkpoint,
        data=data,
        no_data=why,
    )


def _calibrated(run: Path, step: int) -> list[dict[str, Any]] | None:
    """The curve of budgets that `grmoe dial` measured at this step; None where there is nothing that can be read."""
    try:
        results = find_results(run, "dial")
    except ResultsError:
        return None
    if results is None or results.step != step or not results.body.get("curve"):
        return None
    curve: list[dict[str, Any]] = results.body["curve"]
    return curve


def _open_export(folder: Path) -> LoadedModel:
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} must hold a saved model with its tokenizer: tokenizer.json is missing")
    find_config(folder)  # a model of another kind is refused by name
    model: Any = GrmoeForCausalLM.from_pretrained(folder, dtype="auto")
    return LoadedModel(
        path=folder,
        model=model.eval(),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(folder),
        tokenizer_folder=folder,
        length=model.config.max_position_embeddings,
    )


def _held_out(config: TrainConfig, checkpoint: Checkpoint) -> TokenDataset:
    data = TokenDataset(config.data.path, "validation")
    if checkpoint.meta["data"] != data_checksum(data.folder):
        raise ValueError(f"{config.data.path} is not the data it was trained on")
    return data
