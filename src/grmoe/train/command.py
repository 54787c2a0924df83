"""`grmoe train` behind its options: runs, says how it ended, and what to do next."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from grmoe.data import unigram_perplexity
from grmoe.data.dataset import TokenDataset
from grmoe.runs.checkpoint import CheckpointError
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import LOG, checkpoints_of, read_log
from grmoe.terminal import console
from grmoe.train.loop import Outcome, TrainingStopped, train


def run(config: TrainConfig, resume: bool) -> int:
    """Train; returns the exit status."""
    errors = Console(stderr=True)
    if resume and _first() and checkpoints_of(Path(config.out), config).latest() is None:
        begins = f"{config.out} holds no checkpoint to go on from: a new run begins."
        errors.print(escape(begins), highlight=False, soft_wrap=True)
    try:
        outcome = train(config, resume)
    except TrainingStopped as stopped:
        if _first():
            # After a signal it goes on; what became NaN does so again, to the bit.
            again = (
                "It would meet the same step again; a smaller optim.lr is another run (out=…). All the same"
            )
            lead = "Go on with" if stopped.status > 128 else again
            resumed = f"grmoe train --resume out={config.out}"
            errors.print(escape(f"{stopped}\n{lead}: {resumed}"), highlight=False, soft_wrap=True)
        return stopped.status
    except (ValueError, CheckpointError, OSError) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 2 if isinstance(error, ValueError) else 1
    if _first():
        _report(config, outcome)
    return 0


def _first() -> bool:
    """Whether this is the process that speaks; torchrun tells."""
    return os.environ.get("RANK", "0") == "0"


def _report(config: TrainConfig, outcome: Outcome) -> None:
    lines = read_log(outcome.folder)
    held_out = [line for line in lines if line["kind"] == "validation"]
    last: dict[str, Any] | None = held_out[-1] if held_out else None
    if outcome.validation is None:
        console.print(f"{escape(config.out)} had reached its last step already.", highlight=False)
    else:  # known also where somebody has removed the log
        last = {"perplexity": outcome.validation.perplexity, "domains": outcome.validation.domains}
    unigram = unigram_perplexity(TokenDataset(config.data.path, "validation"))
    if last is not None:
        each = ", ".join(f"{name} {math.exp(loss):.2f}" for name, loss in last["domains"].items())
        console.print(
            f"Validation perplexity [bold]{last['perplexity']:.2f}[/] ({escape(each)}); unigram model {unigram:.1f}",
            highlight=False,
            soft_wrap=True,
        )
    if not held_out or not any(line["kind"] == "train" for line in lines):
        gone = f"{outcome.folder / LOG} has lost its lines: there is nothing to draw."
        console.print(escape(gone), highlight=False, soft_wrap=True)
    elif importlib.util.find_spec("matplotlib") is not None:
        from grmoe.train.curves import draw_curves

        figure = draw_curves([outcome.folder], outcome.folder / "curves.png", unigram)
        console.print(f"Figure:     [bold]{escape(str(figure))}[/]", highlight=False, soft_wrap=True)
    console.print(f"Checkpoint: {escape(str(outcome.checkpoint.path))}", highlight=False, soft_wrap=True)
    console.print(f"Next:       grmoe export {escape(config.out)}", highlight=False, soft_wrap=True)
