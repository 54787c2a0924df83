"""Write a model in memory as a folder that Hugging Face libraries load."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError

from grmoe import checks
from grmoe.files import read_json, reason, replace_files, was_interrupted
from grmoe.model import export_remote_code
from grmoe.model.saved import CONFIG, is_saved, seal
from grmoe.runs.card import MODEL_CARD, card_name, model_card
from grmoe.runs.checkpoint import Checkpoint
from grmoe.runs.folder import CONFIG as RUN_CONFIG
from grmoe.runs.folder import saved_config
from grmoe.runs.open import LoadedModel, open_model
from grmoe.terminal import note

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
# Files of an earlier export that would change this model, if this export has none of the name.
_STALE = (
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("generation_config.json", "special_tokens_map.json", "added_tokens.json"),
)
_NOT_COPIED = (".git", ".cache", "__pycache__")


def export(
    run: Path,
    out: Path,
    which: str = "best",
    alpha: float | Sequence[float] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    budget: float | None = None,
) -> Checkpoint:
    """Export a run's checkpoint ("best", "last" or a step), at this α or this budget. Returns the checkpoint."""
    checks.require(
        (run / RUN_CONFIG).is_file() or not (run / CONFIG).is_file(),
        f"{run} is an exported model already; this command takes a run of `grmoe train`",
    )
    saved_config(run)  # raises if there is no run
    check_place(run, out)
    loaded = open_model(run, which, alpha, device="cpu", dtype=dtype, budget=budget)
    write_model(loaded, out, model_card(loaded, card_name(out)))
    assert loaded.checkpoint is not None
    return loaded.checkpoint


def write_model(loaded: LoadedModel, out: Path, card: str) -> Path:
    """Write safetensors, configuration, tokenizer, remote code and the card.

    Weights, dtype and dial are those in memory. The run or folder the model came from does not change. Other files
    of an exported folder (for example a licence) are copied. What else lies in `out`, for example the .git of a clone,
    stays. After a crash `out` has the old model or the new one, or does not open until it is written again.
    """
    check_place(loaded.path, out)
    with replace_files(out, last=CONFIG, stale=_STALE) as writing:
        try:
            _fill(writing, loaded, card)
        except (OSError, SafetensorError) as error:
            if getattr(error, "filename", None):
                raise
            raise OSError(f"cannot write {out}: {reason(error)}") from error  # a full disk names nothing
    return out


def _fill(folder: Path, loaded: LoadedModel, card: str) -> None:
    loaded.model.save_pretrained(folder)
    seal(folder)
    if loaded.is_run:
        for file in sorted(loaded.tokenizer_folder.iterdir()):
            shutil.copyfile(file, folder / file.name)
    else:
        # Copies the content, because the folder may hold links into a download cache.
        skipped = shutil.ignore_patterns(*_WEIGHTS, *_NOT_COPIED, *(p.name for p in folder.iterdir()))
        shutil.copytree(loaded.path, folder, ignore=skipped, dirs_exist_ok=True)
    export_remote_code(folder)
    (folder / MODEL_CARD).write_text(card, encoding="utf-8")


def set_aside(loaded: LoadedModel, folder: Path, command: str, advice: str) -> None:
    """Move a model that an earlier command wrote out of the way, unless it is the model in memory.

    A model never stays beside results that differ from it. Nothing is deleted: `model` becomes `model-old`, or
    `model-old-2` if there is one. advice: a sentence after what is said about it, without its full stop.
    """
    if not (folder / CONFIG).is_file() or not _is_export(folder) or is_saved(loaded.model, folder):
        return
    old = f"{folder.name}-old"
    names = itertools.chain([old], (f"{old}-{i}" for i in itertools.count(2)))
    aside = next(place for name in names if not (place := folder.with_name(name)).exists())
    folder.rename(aside)
    note(f"{folder} was of an earlier {command}: moved to {aside}. {advice}")


def check_place(source: Path, out: Path) -> None:
    """Refuse to overwrite anything but an exported model. Call it before long work."""
    place = out.resolve()
    checks.require(
        not (source / CONFIG).is_file() or source.resolve() not in (place, *place.parents),
        f"out must be outside the model's own folder {source}, got {out}",
    )
    checks.require(
        not out.exists() or _is_export(out) or was_interrupted(out),
        f"{out} exists and is not an exported model; give another folder (--out)",
    )


def _is_export(folder: Path) -> bool:
    """Whether a folder is empty or holds a model of grmoe."""
    try:
        return read_json(folder / CONFIG).get("model_type") == "grmoe"
    except (OSError, ValueError):
        return folder.is_dir() and not any(folder.iterdir())
