"""The log of a run: log.jsonl and the terminal, and TensorBoard and Weights & Biases if asked for."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from grmoe.config import to_dict
from grmoe.hardware import device_name
from grmoe.model.count import short
from grmoe.routing import RoutingMetrics
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import LOG, first_start
from grmoe.tables import largest, shortened
from grmoe.train.interrupt import duration
from grmoe.train.setup import Trainer, uses_bf16

# Columns of a terminal from which the bar shows its percentage, and the bar itself.
_NARROW, _WIDE, _BAR = 60, 110, 20
_MOST_DOMAINS = 5  # named on a line

_LAYER_FIGURES = (
    "entropy", "experts_per_token", "load", "load_cv", "min_load", "leading_load", "leading_cv", "gate_load",
    "kappa_min", "kappa_max", "max_overlap",
)  # fmt: skip


class Sink(Protocol):
    def write(self, line: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Logger:
    """Passes every line to all sinks. A line has a `kind` ("train" or "validation") and a `step`."""

    def __init__(self, sinks: list[Sink]) -> None:
        self.sinks = sinks

    def say(self, text: str | None) -> None:
        """A remark for the screen alone; None is none."""
        for sink in self.sinks:
            if isinstance(sink, Screen) and text is not None:
                sink.say(text)

    def write(self, line: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(line)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def open_logger(trainer: Trainer, first_step: int) -> Logger:
    config = trainer.config
    folder = Path(config.out)
    screen = Screen(config.steps, first_step, describe_start(trainer, first_step))
    sinks: list[Sink] = [JsonLines(folder / LOG), screen]
    if config.log.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", first_step))
    if config.log.wandb is not None:
        sinks.append(WandB(config))
    return Logger(sinks)


def check_loggers(config: TrainConfig) -> None:
    """Raise if a package is missing that the log needs, before the run's folder is written."""
    for module, wanted in (("tensorboard", config.log.tensorboard), ("wandb", config.log.wandb is not None)):
        if wanted and importlib.util.find_spec(module) is None:
            raise ValueError(f"log.{module} needs {module}; install with: pip install {module}")


class JsonLines:
    def __init__(self, path: Path) -> None:
        self.path, self.file = path, path.open("a")

    def write(self, line: dict[str, Any]) -> None:
        try:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()  # nothing is lost if the process is killed
        except OSError as error:
            raise OSError(f"cannot write {self.path}: {error.strerror}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `write` has already raised
            self.file.close()


class Screen:
    """On stderr: what is trained; then a bar with the newest numbers on a terminal, else a line per log step.

    A terminal that was closed does not end a run.
    """

    def __init__(self, steps: int, first_step: int, begins: str) -> None:
        console = Console(stderr=True)
        self.bar: Progress | None = None
        if console.is_terminal:
            self.bar = Progress(*_columns(console.width), console=console, speed_estimate_period=300)
            self.bar.start()
            self.task = self.bar.add_task("starting", total=steps, completed=first_step)
        self.say(begins)

    def write(self, line: dict[str, Any]) -> None:
        if line["kind"] == "validation":
            self.say(f"step {line['step']}: {_describe_validation(line)}")
        elif self.bar is None:
            self.say(f"step {line['step']}: {describe(line)}  {duration(line['seconds_left'])} left")
        else:
            total = f"{self.bar.tasks[0].total:.0f}"
            room = self.bar.console.width - _room(len(total), self.bar.console.width)
            with contextlib.suppress(OSError):
                self.bar.update(self.task, completed=line["step"], description=describe(line, room))

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            if self.bar is None:
                print(text, file=sys.stderr, flush=True)
            else:
                self.bar.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.stop()


def _columns(width: int) -> list[ProgressColumn]:
    """The columns of the bar. A narrow terminal has no bar and no percentage, but the step, the loss and the time."""
    columns: list[ProgressColumn] = [TextColumn("step {task.completed:.0f}/{task.total:.0f}")]
    columns += [BarColumn(bar_width=_BAR)] if width >= _WIDE else []
    columns += [TaskProgressColumn()] if width >= _NARROW else []
    return [*columns, TextColumn("{task.description}"), TextColumn("left"), TimeRemainingColumn()]


def _room(digits: int, width: int) -> int:
    """Characters of a line that the text of the log does not have: what `_columns` shows, and spaces between."""
    step, left = len("step /") + 2 * digits + 1, len(" left 0:00:00 ")
    return step + left + (_BAR + 1 if width >= _WIDE else 0) + (5 if width >= _NARROW else 0)


class TensorBoard:
    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def write(self, line: dict[str, Any]) -> None:
        for name, value in flat(line).items():
            self.writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self.writer.close()


class WandB:
    def __init__(self, config: TrainConfig) -> None:
        import wandb

        folder = Path(config.out)
        # The start time makes the id unique: another folder of the same name, or a new run in this one, has another.
        start = "".join(filter(str.isalnum, first_start(folder)))
        self.run = wandb.init(
            project=config.log.wandb,
            name=folder.name,
            id=f"{folder.name}-{start}",
            resume="allow",
            config=to_dict(config),
            dir=config.out,
        )

    def write(self, line: dict[str, Any]) -> None:
        self.run.log(flat(line), step=line["step"])

    def close(self) -> None:
        self.run.finish()


def flat(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line by name: `train/loss`, `validation/domains/code`, `train/layers/2/entropy`."""
    found: dict[str, float] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{name}/{key}", inner)
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                walk(f"{name}/{number}", inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = float(value)

    for key, value in line.items():
        if key != "step":
            walk(f"{line['kind']}/{key}", value)
    return found


def routing_line(layers: list[RoutingMetrics]) -> dict[str, Any]:
    """Means over MoE layers, the worst of them where the worst matters, and each layer's own numbers.

    Names are those of `RoutingMetrics`: load is of the tokens an expert receives. With identity experts there is also
    `skips_per_token`, the choices per token that compute nothing.
    """

    def average(name: str) -> float:
        return sum(getattr(m, name) for m in layers) / len(layers)

    overlaps = [m.max_overlap for m in layers if m.max_overlap is not None]
    skips = [sum(m.identity_load) for m in layers if m.identity_load]
    return {
        "entropy": average("entropy"),
        "load_cv": average("load_cv"),
        "min_load": min(m.min_load for m in layers),
        "collapsed_layers": sum(m.collapsed for m in layers),
        "collapsed_layers_paper": sum(m.collapsed_paper for m in layers),
        "leading_cv": average("leading_cv"),
        "leading_min_load": min(m.leading_min_load for m in layers),
        "experts_per_token": average("experts_per_token"),
        "max_overlap": max(overlaps) if overlaps else None,
        **({"skips_per_token": sum(skips) / len(skips)} if skips else {}),
        "layers": [{name: getattr(m, name) for name in _LAYER_FIGURES} for m in layers],
    }


def heads_line(blocks: list[RoutingMetrics]) -> dict[str, Any]:
    """How blocks use their attention heads: means over blocks, and the least used head. Empty without a choice."""
    if not blocks:
        return {}
    heads = {name: sum(getattr(m, name) for m in blocks) / len(blocks) for name in ("entropy", "load_cv")}
    return {"heads": {**heads, "min_load": min(m.min_load for m in blocks)}}


def describe_start(trainer: Trainer, first_step: int) -> str:
    """What is trained, where, and where it is saved. Shown at once: the first step may take minutes."""
    config, world = trainer.config, trainer.world
    cost = trainer.cost
    device = device_name(world.device)
    processes = f"{world.size} × " if world.size > 1 else ""
    precision = "bf16 with fp32 weights" if uses_bf16(config, world) else "fp32"
    compiled = trainer.forward is not trainer.model
    how = "compiled (the first step may take minutes)" if compiled else "not compiled"
    return (
        f"step {first_step} of {config.steps}: training {config.preset or 'a custom model'} with router "
        f"{trainer.model.config.router}, {short(cost.total)} parameters, {short(cost.active)} active per token, on "
        f"{processes}{device}, {precision}, {how}; {trainer.tokens_per_step:,} tokens per step; saving to {config.out}"
    )


def describe(line: dict[str, Any], width: int | None = None) -> str:
    """The numbers of a line. Where they are wider than `width`, the less important ones are left out first."""
    parts = [(f"loss {line['loss']:.3f}", 0), (f"{line['tokens_per_second']:,.0f} tok/s", 1)]
    if line["mfu"] is not None:
        parts.append((f"MFU {line['mfu']:.1%}", 4))
    parts += [
        (f"{line['memory_gb']:.1f} GB", 3),
        (f"H {line['entropy']:.2f}", 6),
        (describe_load(line), 5),
        (f"{line['experts_per_token']:.2f} experts", 2),
    ]
    if line["max_overlap"] is not None:
        parts.append((f"overlap {line['max_overlap']:.3f}", 7))
    while True:
        text = "  ".join(part for part, _ in parts)
        if width is None or len(text) <= width or len(parts) == 1:
            return text
        parts.remove(max(parts, key=lambda part: part[1]))


def describe_load(line: dict[str, Any]) -> str:
    """Balance as text: of received tokens, or of leading experts where every expert computes every token."""
    if all(layer["experts_per_token"] == len(layer["load"]) for layer in line["layers"]):
        return f"leading CV {line['leading_cv']:.2f}  leads at least {line['leading_min_load']:.3f}"
    return f"CV {line['load_cv']:.2f}  min load {line['min_load']:.3f}"


def _describe_validation(line: dict[str, Any]) -> str:
    domains = describe_domains(line["domains"])
    return f"validation loss {line['loss']:.4f}, perplexity {line['perplexity']:.2f}{domains}"


def describe_domains(losses: dict[str, float]) -> str:
    """In parentheses: the perplexity of the largest domains, and how many others there are. Empty for a single domain.

    The largest comes first in `losses`.
    """
    if len(losses) < 2:
        return ""
    shown, others = largest(list(losses), _MOST_DOMAINS)
    each = [f"{shortened(name)} {math.exp(min(losses[name], 700)):.2f}" for name in shown]
    return f" ({', '.join([*each, others] if others else each)})"
