"""lm-evaluation-harness tasks, from local files or the hub, through its own Python interface.

For a local file we write a task of a few lines: the stock task with its data replaced. Prompts, scoring and metrics
are the harness's, and so are the numbers.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grmoe.checks import require
from grmoe.model import GrmoeForCausalLM


@dataclass(frozen=True)
class Stock:
    """A task of the harness: its file there, and which of its splits are for what."""

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
ALIASES = {"lambada": "lambada_openai", "arc-easy": "arc_easy", "arc-challenge": "arc_challenge"}
SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(
    ("val", "valid", "validation", "dev"), "validation"
)
_NAME = re.compile(
    r"(?P<task>.+?)(?:[_.-](?P<split>train|val|valid|validation|dev|test))?\.jsonl(?:\.(gz|xz|zst))?"
)


def find_files(folder: Path) -> dict[str, dict[str, Path]]:
    """{task: {split: file}} of the files TASK_SPLIT.jsonl (also .gz, .xz, .zst) in `folder`.

    SPLIT is train, val, valid, validation, dev or test; without one it is the split the stock task evaluates. Tasks of
    which there are training rows alone are left out.
    """
    require(folder.is_dir(), f"there is no folder {folder} to take tasks from")
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name.lower())
        if match is None:
            continue
        task = match["task"]
        task = ALIASES.get(task, task)
        if task not in STOCK:
            continue
        split = SPLITS[match["split"]] if match["split"] else STOCK[task].evaluated
        other = found.setdefault(task, {}).setdefault(split, path)
        require(other == path, f"{folder} holds two files for {task} ({split}): {other.name}, {path.name}")
    return {task: files for task, files in found.items() if set(files) != {"train"}}


def describe(task: str, files: dict[str, Path], stock_folder: Path) -> dict[str, Any]:
    """The stock task with its data replaced.

    Where there are training rows, examples for few-shot prompts come from them, as in the stock task. Where there are
    none, they come from the rows evaluated, never the one being asked: the harness leaves it out if the split of the
    examples is the test split, so that is what we call it.
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


def specify(tasks: Sequence[str], folder: Path | None, out: Path) -> list[str]:
    """What the harness is to load: YAML files for what is local or known, names for the rest.

    Tasks made from local files are written to `out`, where the harness's own command finds them (--include_path).
    """
    import lm_eval.tasks

    stock_folder = Path(lm_eval.tasks.__file__).parent
    found = {} if folder is None else find_files(folder)
    if folder is not None and not tasks:
        known = ", ".join(STOCK)
        require(bool(found), f"{folder} holds no TASK_SPLIT.jsonl (also .gz, .xz, .zst) of the tasks {known}")
    specs = []
    for given in dict.fromkeys(tasks or found):
        name = ALIASES.get(given, given)
        if given.endswith((".yaml", ".yml")):
            require(Path(given).is_file(), f"there is no task file {given}")
            specs.append(str(Path(given).resolve()))
        elif folder is not None:
            held = ", ".join(found) or "none"
            require(name in found, f"task {given} is not among those of {folder}: {held}")
            out.mkdir(parents=True, exist_ok=True)
            path = out / f"{name}.yaml"
            path.write_text(yaml.safe_dump(describe(name, found[name], stock_folder), sort_keys=False))
            specs.append(str(path.resolve()))
        else:
            specs.append(str(stock_folder / STOCK[name].path) if name in STOCK else name)
    return specs


def _is_file(spec: str) -> bool:
    return spec.endswith((".yaml", ".yml"))


class Harness:
    """Loaded tasks and the model they are put to. A dial that moves in between is the caller's."""

    def __init__(
        self, specs: Sequence[str], model: GrmoeForCausalLM, tokenizer: Any, batch: int, shots: int | None
    ) -> None:
        """shots: examples in a prompt; None leaves each task its own number."""
        import datasets
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        datasets.logging.set_verbosity(
            logging.CRITICAL
        )  # what it logs of a file it cannot read, it raises too
        datasets.disable_progress_bars()
        # Reading all of its thousands of task files takes a while: only for a name that we do not know.
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
            raise ValueError(f"lm_eval has no task {spec}; near it: {', '.join(near)}")
        try:
            return list(self.manager.load([spec])["tasks"].values())
        except (
            Exception
        ) as error:  # the hub's, the network's, the template's: whatever a row or a proxy comes up with
            reason = (str(error).strip().splitlines() or [""])[0]
            raise ValueError(
                f"task {name} could not be loaded ({type(error).__name__}: {reason}); "
                "--tasks-from FOLDER takes it from local files"
            ) from error

    def run(self, limit: int | None) -> dict[str, dict[str, Any]]:
        """{task: {"metric,filter": number}}, names and numbers as the harness has them, with its own seeds.

        limit: rows of each task.
        """
        from lm_eval import simple_evaluate

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
