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
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from grmoe.config import to_dict
from grmoe.hardware import device_name
from grmoe.model.count import short
from grmoe.routing import RoutingMetrics
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import LOG, first_start
from grmoe.train.setup import Trainer, uses_bf16

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
        _need("tensorboard", "log.tensorboard")
        sinks.append(TensorBoard(folder / "tensorboard", first_step))
    if config.log.wandb is not None:
        _need("wandb", "log.wandb")
        sinks.append(WandB(config))
    return Logger(sinks)


def _need(module: str, key: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{key} needs {module}; install with: pip install {module}")


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
    """On stderr: what is trained; then a bar with the newest numbers on a terminal, else a line per log step."""

    def __init__(self, steps: int, first_step: int, begins: str) -> None:
        console = Console(stderr=True)
        self.bar: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(bar_width=20),
                TaskProgressColumn(), TextColumn("{task.description}"), TextColumn("left"), TimeRemainingColumn(),
            )  # fmt: skip
            self.bar = Progress(*columns, console=console, speed_estimate_period=300)
            self.bar.start()
            self.task = self.bar.add_task("starting", total=steps, completed=first_step)
        self._say(begins)

    def write(self, line: dict[str, Any]) -> None:
        if line["kind"] == "validation":
            self._say(f"step {line['step']}: {_describe_validation(line)}")
        elif self.bar is None:
            left = f"  {_duration(line['seconds_left'])} left"
            self._say(f"step {line['step']}: {describe(line)}{left}")
        else:
            self.bar.update(self.task, completed=line["step"], description=describe(line))

    def _say(self, text: str) -> None:
        if self.bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self.bar.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


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

    Names are those of `RoutingMetrics`: load is of the tokens an expert receives.
    """

    def average(name: str) -> float:
        return sum(getattr(m, name) for m in layers) / len(layers)

    overlaps = [m.max_overlap for m in layers if m.max_overlap is not None]
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
        "layers": [{name: getattr(m, name) for name in _LAYER_FIGURES} for m in layers],
    }


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


def describe(line: dict[str, Any]) -> str:
    mfu = f"  MFU {line['mfu']:.1%}" if line["mfu"] is not None else ""
    overlap = f"  overlap {line['max_overlap']:.3f}" if line["max_overlap"] is not None else ""
    return (
        f"loss {line['loss']:.3f}  {line['tokens_per_second']:,.0f} tok/s{mfu}  {line['memory_gb']:.1f} GB  "
        f"H {line['entropy']:.2f}  {describe_load(line)}  {line['experts_per_token']:.2f} experts{overlap}"
    )


def describe_load(line: dict[str, Any]) -> str:
    """Balance as text: of received tokens, or of leading experts where every expert computes every token."""
    if all(layer["experts_per_token"] == len(layer["load"]) for layer in line["layers"]):
        return f"leading CV {line['leading_cv']:.2f}  leads at least {line['leading_min_load']:.3f}"
    return f"CV {line['load_cv']:.2f}  min load {line['min_load']:.3f}"


def _describe_validation(line: dict[str, Any]) -> str:
    domains = ", ".join(f"{name} {math.exp(min(loss, 700)):.2f}" for name, loss in line["domains"].items())
    return f"validation loss {line['loss']:.4f}, perplexity {line['perplexity']:.2f} ({domains})"


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
