"""One job in a process of its own: train a model, measure it, write what is kept.

`python -m grmoe.studies.models.worker JOB.json`. It trains as `grmoe train --resume` does, so a job that was stopped
continues. The process ends with the status of the training if that was stopped by a signal.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from grmoe.config import field_types, read_tree, to_dict
from grmoe.data import TokenDataset
from grmoe.dial.setting import Setting, apply, current, mass, top_k
from grmoe.files import read_json, write_file
from grmoe.hardware import device_name
from grmoe.model import GrmoeConfig, GrmoeForCausalLM
from grmoe.model.choices_grmoe import OWN_CHOICE
from grmoe.probe.losses import measure
from grmoe.probe.windows import Text, read_texts, spread_windows
from grmoe.runs.config import TrainConfig, may_change_on_resume
from grmoe.runs.folder import CHECKPOINTS, data_checksum, read_log
from grmoe.runs.open import open_model
from grmoe.runs.start import starting_config
from grmoe.studies.models.recipes import POINTS
from grmoe.studies.models.store import TRAINING, Point, Row, Run
from grmoe.studies.study import short_revision
from grmoe.train.loop import TrainingStopped, train

TAUS = (0.3, 0.5, 0.7)  # of the mass rule at the trained α, between the top-k
ALPHAS = (0.5, 1.0, 2.0, 5.0)  # the paper's table of post-hoc sparsity
DENSE_TAU = 0.9  # of the mass rule for a model that was trained dense: the paper names no rule
# What the tokenizer decides, not the recipe.
_OF_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a job is to do."""

    settings: tuple[str, ...]
    """Of `grmoe train`: base, recipe, seed, folder and data."""
    result: str
    """File to write."""
    texts: tuple[str, ...] = ()
    tokens: int | None = None
    """Of each text. Default: 8192, on a GPU 131072."""
    revision: str = ""
    """Where git is not there to ask."""
    at_once: int = 1


def main(path: str) -> int:
    tree = read_json(Path(path))
    order = Order(**{**tree, "settings": tuple(tree["settings"]), "texts": tuple(tree["texts"])})
    started = time.monotonic()
    config = starting_config(read_tree(None, order.settings), resume=True)
    continued = (Path(config.out) / CHECKPOINTS).exists()  # then the time is that of its last part
    try:
        train(config, resume=True)
    except TrainingStopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.status
    run = measure_run(Path(config.out), config.seed, order)
    run = replace(run, seconds=None if continued else round(time.monotonic() - started, 1))
    write_file(Path(order.result), json.dumps(asdict(run)).encode())
    return 0


def measure_run(folder: Path, seed: int, order: Order) -> Run:
    """A trained run at every setting on every text, with the curve of its training."""
    loaded = open_model(folder, "last", dtype="served")
    model = loaded.model
    held_out = read_texts((None, *order.texts), loaded, None, order.tokens)
    # As many windows of the text that the model was trained on, from all of it.
    stream = TokenDataset(loaded.held_out().folder, "train")
    seen = spread_windows(TRAINING, stream, held_out[0].length, held_out[0].tokens)
    trained, settings = settings_of(model.config)
    rows, on_training = [], []
    for name, setting in settings.items():
        if setting is not None:
            apply(model, setting)
        rows += [row_of(model, text, name) for text in held_out]
        on_training.append(row_of(model, seen, name))
    lines = read_log(folder)
    last = next(line for line in reversed(lines) if line["kind"] == "train")
    kappas = [[layer.get("kappa_min"), layer.get("kappa_max")] for layer in last["layers"]]
    company = f", {order.at_once} at a time" if order.at_once > 1 else ""
    environment = read_json(folder / "environment.json")
    return Run(
        seed=seed,
        tokens=last["tokens"],
        measured=order.tokens,
        trained=trained,
        revision=short_revision(environment, order.revision),
        machine=f"{device_name(model.device)}, torch {torch.__version__}{company}",
        curve=curve_of(lines),
        rows=rows,
        training=on_training,
        max_overlap=last.get("max_overlap"),
        kappa=None if None in kappas[0] else kappas,
    )


def row_of(model: GrmoeForCausalLM, text: Text, setting: str) -> Row:
    found = measure(model, text)
    return Row(
        text=Path(text.name).name,
        setting=setting,
        experts_per_token=found.experts_per_token,
        loss=found.loss,
        load_cv=found.load_cv,
        min_load=found.min_load,
        collapsed=found.collapsed,
        collapsed_paper=found.collapsed_paper,
        entropy=found.entropy,
        effective_experts=found.effective_experts_inverse,
        leading_cv=found.leading_cv,
        starved=list(found.starved),
        starved_paper=list(found.starved_paper),
    )


def settings_of(config: GrmoeConfig) -> tuple[str, dict[str, Setting | None]]:
    """(the setting a model was trained with, what it is measured at); None: as it is.

    Top-k: every power of two up to the trained K, and mass between them. Dense: the paper's α, dense and by mass.
    """
    if config.router in OWN_CHOICE:
        return "its own", {"its own": None}
    now, cap = current(config), config.num_experts_per_tok or 1
    counts = sorted({cap, *(2**i for i in range(cap.bit_length()) if 2**i <= cap)}, reverse=True)
    if config.selection == "dense":
        layers = len(now.alphas)
        found: dict[str, Setting | None] = {
            f"dense, α {a:g}": replace(now, alphas=(a,) * layers) for a in ALPHAS
        }
        found |= {f"mass {DENSE_TAU:g}, α {a:g}": mass((a,) * layers, DENSE_TAU, cap) for a in ALPHAS}
        return "dense, α 1", found | {f"top-{k}": top_k(now.alphas, k) for k in counts if k < cap}
    found = {f"top-{k}": top_k(now.alphas, k) for k in counts}
    if cap > 1:
        found |= {f"mass {tau:g}": mass(now.alphas, tau, cap) for tau in TAUS}
    return f"top-{cap}", found


def curve_of(lines: Sequence[dict[str, Any]]) -> list[Point]:
    """The validations of a log, at most 20 evenly spread ones with the last, each with the training loss before it."""
    held_out = [line for line in lines if line["kind"] == "validation"]
    count = min(POINTS, len(held_out))
    chosen = [held_out[(i + 1) * len(held_out) // count - 1] for i in range(count)]
    points, before = [], 0
    for line in chosen:
        losses = [t["loss"] for t in lines if t["kind"] == "train" and before < t["step"] <= line["step"]]
        points.append(
            Point(
                step=line["step"], loss=line["loss"], entropy=line["entropy"], load_cv=line["load_cv"],
                min_load=line["min_load"], train_loss=fmean(losses) if losses else None,
            )
        )  # fmt: skip
        before = line["step"]
    return points


# -- identity ------------------------------------------------------------------------------------------------------


def identity(config: TrainConfig) -> dict[str, Any]:
    """Every setting that changes what is trained, by dotted name; the seed and the tokenizer are left out."""
    config = config.resolved()
    model = config.model_config(1, 0)
    sizes = {n: getattr(model, n) for n in field_types(GrmoeConfig) if n not in _OF_TOKENIZER}
    flat = _flat({**to_dict(config), "model": sizes})
    return {n: v for n, v in flat.items() if n == "steps" or not (n == "seed" or may_change_on_resume(n))}


def default_identity() -> dict[str, Any]:
    """`identity` of a configuration without any setting."""
    sizes = {f"model.{name}": getattr(GrmoeConfig, name) for name in field_types(GrmoeConfig)}
    return _flat(to_dict(TrainConfig(model={"preset": None}))) | sizes


def _flat(tree: dict[str, Any], where: str = "") -> dict[str, Any]:
    """By dotted name, as it reads back from JSON."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        is_group = isinstance(value, dict) and value
        found |= _flat(value, f"{where}{name}.") if is_group else {f"{where}{name}": value}
    read_back: dict[str, Any] = json.loads(json.dumps(found))
    return read_back


def describe(folder: Path) -> dict[str, Any]:
    """Prepared text: what identifies it, and what a reader wants to know of it."""
    data = TokenDataset(folder)
    return {
        "checksum": data_checksum(folder),
        "tokens": data.tokens,
        "vocabulary": data.vocab_size,
        "domains": data.domain_tokens,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
