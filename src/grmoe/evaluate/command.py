"""What `grmoe eval` does: open a model, go through texts and tasks at each α, keep the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.progress import Progress

from grmoe.checks import positive_int, require
from grmoe.evaluate.perplexity import count_windows, measure
from grmoe.evaluate.points import Point, points_of, routing, show
from grmoe.evaluate.report import write_results
from grmoe.evaluate.texts import VALIDATION, Stream, from_files, from_run
from grmoe.runs.folder import CONFIG, saved_config
from grmoe.runs.open import LoadedModel, open_model
from grmoe.terminal import Watch

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What was asked for; None and empty lists leave the choice to the model and the tasks."""

    model: Path
    texts: Sequence[str] = ()
    tasks: Sequence[str] = ()
    tasks_from: Path | None = None
    alphas: Sequence[float] = ()
    shots: int | None = None
    limit: int | None = None
    tokens: int | None = None
    length: int | None = None
    stride: int | None = None
    batch: int = 8
    checkpoint: str = "best"
    out: Path = Path("runs/eval")


@dataclass(frozen=True)
class Result:
    points: list[Point]
    length: int
    stride: int
    numbers: Path


def run(settings: Settings, progress: Callable[[], Progress], say: Say) -> Result:
    """Texts first, then tasks. Numbers are on disk as soon as they are known."""
    opened = open_model(settings.model, settings.checkpoint)
    length, stride = window_length(opened, settings.length, settings.stride)
    points = points_of(opened.model, settings.alphas)
    wants_tasks = bool(settings.tasks) or settings.tasks_from is not None
    texts = settings.texts or ([] if wants_tasks else [VALIDATION])
    streams = gather(opened, texts, settings.tokens, say)
    harness = None
    if wants_tasks:  # loaded before anything is measured: a mistake in a name shows at once
        from grmoe.evaluate.harness import Harness, specify

        specs = specify(settings.tasks, settings.tasks_from, settings.out / "tasks")
        harness = Harness(specs, opened.model, opened.tokenizer, settings.batch, settings.shots)
    known = asdict(settings) | {"step": opened.step, "texts": list(texts), "length": length, "stride": stride}
    known |= {"device": str(opened.model.device), "dtype": str(opened.model.dtype).removeprefix("torch.")}
    for point in points if streams else []:
        _turn(opened, point)
        measure_texts(opened, streams, point, length, stride, settings.batch, progress)
        point.text_routing.update(routing(opened.model))
        numbers = write_results(points, known, settings.out)
    if harness is not None:
        for point in points:
            say(f"{', '.join(task.task_name for task in harness.tasks)} at α = {show(point.alpha)}")
            _turn(opened, point)
            point.tasks.update(harness.run(settings.limit))
            point.task_routing.update(routing(opened.model))
            numbers = write_results(points, known, settings.out)
    return Result(points, length, stride, numbers)


def _turn(opened: LoadedModel, point: Point) -> None:
    opened.model.set_alpha(point.alpha)
    opened.model.reset_routing_metrics()


def window_length(
    opened: LoadedModel, length: int | None = None, stride: int | None = None
) -> tuple[int, int]:
    """(length, stride): by default the length a run was trained on, or the model's longest, without overlap."""
    longest = opened.model.config.max_position_embeddings
    trained = saved_config(opened.path).data.sequence_length if (opened.path / CONFIG).is_file() else None
    length = positive_int("length", length or trained or longest)
    require(length <= longest, f"length must be at most the model's {longest}, got {length}")
    stride = positive_int("stride", stride or length)
    require(stride <= length, f"stride must be at most the length of a window, {length}, got {stride}")
    return length, stride


def gather(opened: LoadedModel, texts: Sequence[str], most: int | None, say: Say) -> list[Stream]:
    """The streams of all texts; "validation" is the split a run was validated on."""
    streams = []
    for name in dict.fromkeys(texts):
        if name != VALIDATION:
            streams += from_files(name, opened.tokenizer, most, say)
            continue
        data = opened.held_out("--text FILE, or --task")
        require(bool(data.domains), f"the data of {opened.path} has no validation split; give --text")
        streams += from_run(data, opened.tokenizer, most)
    return streams


def measure_texts(
    opened: LoadedModel,
    streams: Sequence[Stream],
    point: Point,
    length: int,
    stride: int,
    batch: int,
    progress: Callable[[], Progress],
) -> None:
    """Every stream at the model's present α, into `point`."""
    counts = [count_windows(stream, length, stride) for stream in streams]
    with progress() as bar:
        watch = Watch(bar, sum(counts))
        for stream, count in zip(streams, counts, strict=True):
            moved = partial(_move, watch, f"{stream.domain} at α = {show(point.alpha)}", count)
            value = measure(opened.model, stream, length, stride, batch, moved)
            point.texts[stream.text, stream.domain] = value


def _move(watch: Watch, label: str, count: int, done: int) -> None:
    watch(label, done, count)
