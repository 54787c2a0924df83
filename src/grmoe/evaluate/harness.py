"""lm-evaluation-harness tasks, from local files or the hub, through its own Python interface.

A local file becomes a short task file: the stock task with its data replaced. Prompts, scoring and metrics stay the
harness's, and so do the numbers.
"""

from __future__ import annotations

import difflib
import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import yaml

from grmoe.checks import require
from grmoe.model import GrmoeForCausalLM
from grmoe.terminal import Progress, silent


@dataclass(frozen=True)
class Stock:
    """A task of the harness: its file there, and what it uses each of its splits for."""

    path: str
    training: str | None
    validation: str | None
    test: str | None

    @property
    def evaluated(self) -> str:
        return self.test or self.validation or ""


STOCK = {
    "hellaswag": Stock("hellaswag/hellaswag.yaml", "train", "validation", None),
    "arc_easy": Stock("arc/arc_easy.yaml", "train", "validation", "test"),
    "arc_challenge": Stock("arc/arc_challenge.yaml", "train", "validation", "test"),
    "piqa": Stock("piqa/piqa.yaml", "train", "validation", None),
    "lambada_openai": Stock("lambada/lambada_openai.yaml", None, None, "test"),
    "lambada_standard": Stock("lambada/lambada_standard.yaml", None, "validation", "test"),
}
_ALIASES = {"lambada": "lambada_openai", "arc-easy": "arc_easy", "arc-challenge": "arc_challenge"}
SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(
    ("val", "valid", "validation", "dev"), "validation"
)
_NAME = re.compile(
    r"(?P<task>.+?)(?:[_.-](?P<split>train|val|valid|validation|dev|test))?\.jsonl(?:\.(gz|xz|zst))?"
)


def find_files(folder: Path) -> dict[str, dict[str, Path]]:
    """{task: {split: file}} of the files TASK_SPLIT.jsonl (also .gz, .xz, .zst) in `folder`.

    SPLIT is train, val, valid, validation, dev or test. A name without one is the split that the stock task evaluates.
    A task with training rows only is left out.
    """
    require(folder.is_dir(), f"tasks_from must be a folder, got {folder}")
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name.lower())
        if match is None:
            continue
        task = match["task"]
        task = _ALIASES.get(task, task)
        if task not in STOCK:
            continue
        split = SPLITS[match["split"]] if match["split"] else STOCK[task].evaluated
        other = found.setdefault(task, {}).setdefault(split, path)
        require(other == path, f"{folder} holds two files for {task} ({split}): {other.name}, {path.name}")
    return {task: files for task, files in found.items() if set(files) != {"train"}}


def task_name(given: str, found: Mapping[str, object], folder: Path) -> str:
    """The full name of a task that `folder` holds."""
    name = _ALIASES.get(given, given)
    held = ", ".join(found) or "none"
    require(name in found, f"task must be one that {folder} holds ({held}), got {given}")
    return name


def task_config(task: str, files: dict[str, Path], stock_folder: Path) -> dict[str, Any]:
    """The stock task with its data replaced.

    Few-shot examples come from the training rows, as in the stock task. Without training rows they come from the
    evaluated rows, but never from the row being asked: the harness leaves that row out if the examples come from the
    test split, so we call the evaluated split "test_split".
    """
    stock = STOCK[task]
    config: dict[str, Any] = {
        "include": str(stock_folder / stock.path),
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(path.resolve()) for split, path in files.items()}},
    }
    if "train" in files and stock.training and stock.evaluated in files:
        kept = {"validation_split": stock.validation, "test_split": stock.test}
        return config | {name: split if split in files else None for name, split in kept.items()}
    evaluated = stock.evaluated if stock.evaluated in files else next(s for s in files if s != "train")
    return config | {
        "training_split": None,
        "validation_split": None,
        "test_split": evaluated,
        "fewshot_split": "train" if "train" in files else evaluated,
    }


def task_specs(tasks: Sequence[str], folder: Path | None, out: Path) -> list[str]:
    """What the harness loads: YAML files for local and known tasks, names for the others.

    Tasks made from local files are written to `out`. The harness's own command finds them there (--include_path).
    """
    import lm_eval.tasks

    stock_folder = Path(lm_eval.tasks.__file__).parent
    found = {} if folder is None else find_files(folder)
    if folder is not None and not tasks:
        known = ", ".join(STOCK)
        require(bool(found), f"{folder} must hold TASK_SPLIT.jsonl (also .gz, .xz, .zst) of one of {known}")
    specs = []
    for given in dict.fromkeys(tasks or found):
        if _is_file(given):
            require(Path(given).is_file(), f"task must be a file that exists, got {given}")
            specs.append(str(Path(given).resolve()))
        elif folder is not None:
            name = task_name(given, found, folder)
            out.mkdir(parents=True, exist_ok=True)
            path = out / f"{name}.yaml"
            path.write_text(yaml.safe_dump(task_config(name, found[name], stock_folder), sort_keys=False))
            specs.append(str(path.resolve()))
        else:
            name = _ALIASES.get(given, given)
            specs.append(str(stock_folder / STOCK[name].path) if name in STOCK else name)
    return specs


def _is_file(spec: str) -> bool:
    return spec.endswith((".yaml", ".yml"))


class Harness:
    """Loaded tasks and the model that answers them. The caller sets the dial between two runs."""

    def __init__(
        self, specs: Sequence[str], model: GrmoeForCausalLM, tokenizer: Any, batch: int, shots: int | None
    ) -> None:
        """shots: examples per prompt. None keeps each task's own number."""
        import datasets
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        datasets.logging.set_verbosity(logging.CRITICAL)  # errors about a file are raised as well
        datasets.disable_progress_bars()
        # Reading its thousands of task files takes a while. Only a name that we do not know needs them.
        self.manager = TaskManager(include_defaults=not all(map(_is_file, specs)))
        self.tasks = [task for spec in specs for task in self._load(spec)]
        for task in self.tasks:
            rows = len(task.sampler.df)
            if shots and shots >= rows:
                raise ValueError(f"shots must be below the {rows} rows of {task.task_name}, got {shots}")
        self.batch, self.shots = batch, shots
        self.lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch)

    def _load(self, spec: str) -> list[Any]:
        name = Path(spec).stem
        if not _is_file(spec) and spec not in self.manager.all_tasks:
            near = difflib.get_close_matches(spec, self.manager.all_tasks) or list(STOCK)
            raise ValueError(f"task must be one of lm_eval, got {spec}; similar names: {', '.join(near)}")
        try:
            return list(self.manager.load([spec])["tasks"].values())
        except Exception as error:  # of any type: from the hub, the network, the template or a row
            reason = (str(error).strip().splitlines() or [""])[0]
            raise ValueError(
                f"task {name} could not be loaded ({type(error).__name__}: {reason}); "
                "--tasks-from FOLDER takes it from local files"
            ) from error

    def run(self, limit: int | None, progress: Progress = silent) -> dict[str, dict[str, Any]]:
        """{task: {"metric,filter": number}}: names, numbers and seeds are the harness's.

        limit: most rows of each task.
        """
        from lm_eval import simple_evaluate

        with _bars_as(progress):
            answer: Any = simple_evaluate(
                model=self.lm,
                tasks=list(self.tasks),
                num_fewshot=self.shots,
                limit=limit,
                batch_size=self.batch,
                task_manager=self.manager,
                log_samples=False,
            )
        return {
            name: {key: value for key, value in numbers.items() if "," in key}
            | {"shots": answer["n-shot"][name], "rows": answer["n-samples"][name]["effective"]}
            for name, numbers in answer["results"].items()
            if name in answer["n-shot"]
        }


@contextmanager
def _bars_as(progress: Progress) -> Iterator[None]:
    """The harness draws bars with tqdm, which would fight with ours for the terminal: show them as progress."""
    from tqdm import std

    start, display = std.tqdm.__init__, std.tqdm.display
    std.tqdm.__init__ = partialmethod(start, file=io.StringIO())
    std.tqdm.display = lambda bar, *_, **__: progress(bar.desc.strip(": ") or "tasks", bar.n, bar.total or 0)
    try:
        yield
    finally:
        std.tqdm.__init__, std.tqdm.display = start, display
