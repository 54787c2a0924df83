"""Open a trained model from the folder of a run or of an exported model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerFast

from grmoe import checks
from grmoe.data import TokenDataset
from grmoe.files import read_json, reading
from grmoe.hardware import find_device
from grmoe.model import GrmoeForCausalLM
from grmoe.model.saved import Shapes, check_shapes, check_tensor, load_saved, read_config
from grmoe.routing import routers
from grmoe.runs.checkpoint import Checkpoint
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import CONFIG, checkpoints_of, data_checksum, find_checkpoint, tokenizer_of, vocabulary
from grmoe.runs.missing import not_a_model
from grmoe.runs.results import RESULTS, ResultsError, belong, find_results, results_folder
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
    """Tokens per window: those of a sequence in training. An exported model that does not store them: its context."""
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
        raise ValueError(not_a_model(path))
    if dtype == "served":
        dtype = torch.bfloat16 if loaded.is_run and place.type == "cuda" else None
    torch.nn.Module.to(loaded.model, device=place, dtype=dtype)
    if alpha is not None:
        loaded.model.config.check_has_dial()
        loaded.model.set_alpha(alpha)
    if budget is not None:
        loaded.model.set_budget(budget)
    return loaded


def _open_run(run: Path, which: str) -> LoadedModel:
    config, checkpoint = find_checkpoint(run, which)
    tokenizer_folder = tokenizer_of(run, config)
    with reading(tokenizer_folder):
        size, end = vocabulary(tokenizer_folder)
    model_config = config.model_config(size, end)
    checkpoints = checkpoints_of(run, config)
    saved = _model_part(checkpoints.tensors(checkpoint))
    check_shapes(saved, model_config, checkpoint.path, run / CONFIG)
    model = GrmoeForCausalLM(model_config)
    learned = routers(model) if config.alpha.schedule == "learned" else []
    for router in learned:
        router.learn_alpha()
    weights = gather(model, [])["model"]  # the live tensors, filled in place
    checkpoints.load(checkpoint, {"model": weights})
    for name, tensor in weights.items():
        check_tensor(name, tensor, checkpoint.path)
    for router in learned:
        router.keep_alpha()
    if learned:
        model.set_alpha(model.alpha)
    _add_budgets(run, model, checkpoint)
    model.config.trained_length = config.data.sequence_length
    try:
        data, why = _held_out(config, checkpoint), ""
    except (ValueError, OSError) as error:
        data, why = None, str(error)
    return LoadedModel(
        path=run,
        model=model.eval(),
        tokenizer=_open_tokenizer(tokenizer_folder, model_config.vocab_size),
        tokenizer_folder=tokenizer_folder,
        length=_length(model),
        checkpoint=checkpoint,
        data=data,
        no_data=why,
    )


def _model_part(saved: Shapes) -> Shapes:
    """The tensors of the model among those of a checkpoint. The others are the optimisers'."""
    return {name.removeprefix("model."): about for name, about in saved.items() if name.startswith("model.")}


def _open_tokenizer(folder: Path, vocab_size: int) -> Any:
    path = folder / "tokenizer.json"
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            read_json(folder / name)
    with reading(path):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        last = max(tokenizer.get_vocab().values(), default=-1)
        checks.require(last >= 0, f"{path} has no tokens")
        tokenizer("a")  # a tokenizer can be read and still fail
    checks.require(
        last < vocab_size,
        f"{folder} does not fit its model: token {last} is not in the model's vocabulary of {vocab_size}",
    )
    return tokenizer


def _add_budgets(run: Path, model: GrmoeForCausalLM, checkpoint: Checkpoint) -> None:
    """Give the model the curve of budgets that `grmoe dial` measured with these weights, if one can be read."""
    results = None
    with contextlib.suppress(ResultsError):
        results = find_results(run, "dial")
    own = results is not None and belong(results, checkpoint.step, checkpoint.path)
    curve = results.body.get("curve") if results is not None and own else None
    with reading(results_folder(run, "dial") / RESULTS):
        model.config.budget_curve = curve or None
        model.set_budget(None)  # makes room for the largest budget of the curve


def _open_export(folder: Path) -> LoadedModel:
    read_config(folder)  # first: a tokenizer would not help another kind of model
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} must hold a saved model with its tokenizer: tokenizer.json is missing")
    model = load_saved(folder)
    return LoadedModel(
        path=folder,
        model=model.eval(),
        tokenizer=_open_tokenizer(folder, model.config.vocab_size),
        tokenizer_folder=folder,
        length=_length(model),
    )


def _length(model: GrmoeForCausalLM) -> int:
    """Of the sequences in training. A context that was cut afterwards is shorter."""
    longest: int = model.config.max_position_embeddings
    return min(model.config.trained_length or longest, longest)


def _held_out(config: TrainConfig, checkpoint: Checkpoint) -> TokenDataset:
    data = TokenDataset(config.data.path, "validation")
    if checkpoint.meta.get("data") != data_checksum(data.folder):
        raise ValueError(f"{config.data.path} is not the data that the run was trained on")
    return data
