"""`grmoe train`: train, and say how it ended and what to do next."""

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


def run(config: TrainConfig, resume: bool) -> Outcome:
    """Train, or continue training. Says so if there is nothing to continue."""
    if resume and _is_first() and checkpoints_of(Path(config.out), config).latest() is None:
        text = f"{config.out} holds no checkpoint to continue from: a new run begins."
        Console(stderr=True).print(escape(text), highlight=False, soft_wrap=True)
    return train(config, resume)


def show(config: TrainConfig, outcome: Outcome) -> None:
    """Print the last validation, draw the curves, and name the next command. Only on the first process."""
    if not _is_first():
        return
    lines = read_log(outcome.folder)
    held_out = [line for line in lines if line["kind"] == "validation"]
    last: dict[str, Any] | None = held_out[-1] if held_out else None
    if outcome.validation is None:
        console.print(f"{escape(config.out)} had already reached its last step.", highlight=False)
    else:  # the log may have been removed
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
        text = f"{outcome.folder / LOG} has no lines to draw."
        console.print(escape(text), highlight=False, soft_wrap=True)
    elif importlib.util.find_spec("matplotlib") is not None:
        from grmoe.train.curves import draw_curves

        figure = draw_curves([outcome.folder], outcome.folder / "curves.png", unigram)
        console.print(f"Figure:     [bold]{escape(str(figure))}[/]", highlight=False, soft_wrap=True)
    console.print(f"Checkpoint: {escape(str(outcome.checkpoint.path))}", highlight=False, soft_wrap=True)
    console.print(f"Next:       grmoe export {escape(config.out)}", highlight=False, soft_wrap=True)


def main(config: TrainConfig, resume: bool) -> int:
    """Run and show. Returns the exit status."""
    errors = Console(stderr=True)
    try:
        show(config, run(config, resume))
    except TrainingStopped as stopped:
        if _is_first():
            errors.print(escape(str(stopped)), highlight=False, soft_wrap=True)
        return stopped.status
    except (ValueError, CheckpointError, OSError) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 2 if isinstance(error, ValueError) else 1
    return 0


def _is_first() -> bool:
    """Whether this process prints: rank 0, as torchrun numbers them."""
    return os.environ.get("RANK", "0") == "0"
