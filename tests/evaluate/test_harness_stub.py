"""What can be said about tasks without lm-evaluation-harness: a stub stands in for it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from grmoe.evaluate.harness import STOCK, Harness, _bars_as, find_files, task_config, task_specs

KNOWN = ["hellaswag", "hellaswag_de", "mmlu", "winogrande"]


class Stub(ModuleType):
    """lm_eval, with tasks of `rows` rows each."""

    def __init__(self, folder: Path) -> None:
        super().__init__("lm_eval")
        self.rows, self.broken = 10, False
        self.managers: list[Any] = []
        self.built: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.answer: dict[str, Any] = {}
        stub = self

        class TaskManager:
            all_tasks = KNOWN

            def __init__(self, include_defaults: bool) -> None:
                self.include_defaults = include_defaults
                stub.managers.append(self)

            def load(self, specs: list[str]) -> dict[str, Any]:
                if stub.broken:
                    raise KeyError("no such row\nsecond line")
                sampler = SimpleNamespace(df=range(stub.rows))
                names = [Path(spec).stem for spec in specs]
                return {"tasks": {n: SimpleNamespace(task_name=n, sampler=sampler) for n in names}}

        def make_model(**options: Any) -> str:
            self.built.append(options)
            return "lm"

        def simple_evaluate(**options: Any) -> dict[str, Any]:
            self.calls.append(options)
            return self.answer

        tasks, models, inner = (ModuleType(f"lm_eval.{n}") for n in ("tasks", "models", "models.huggingface"))
        tasks.__file__ = str(folder / "__init__.py")
        vars(tasks)["TaskManager"] = TaskManager
        vars(inner)["HFLM"] = make_model
        vars(self).update(tasks=tasks, models=models, simple_evaluate=simple_evaluate, __path__=[])
        vars(models).update(huggingface=inner, __path__=[])
        self.modules = {m.__name__: m for m in (self, tasks, models, inner)}


@pytest.fixture
def lm_eval(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stub:
    stub = Stub(tmp_path / "stock")
    datasets = ModuleType("datasets")
    vars(datasets).update(
        logging=SimpleNamespace(set_verbosity=lambda level: None), disable_progress_bars=lambda: None
    )
    for name, module in (stub.modules | {"datasets": datasets}).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(logging.getLogger("lm_eval"), "level", logging.NOTSET)
    return stub


def harness(specs: list[str], shots: int | None = None) -> Harness:
    model: Any = "model"
    return Harness(specs, model, "tokenizer", 4, shots)


def test_where_examples_come_from() -> None:
    def splits(task: str, *files: str) -> dict[str, Any]:
        config = task_config(task, {name: Path(f"/{name}.jsonl") for name in files}, Path("/stock"))
        return {name: split for name, split in config.items() if name.endswith("_split")}

    # Training rows and the split that the stock task evaluates: as in the stock task.
    assert splits("arc_easy", "train", "validation", "test") == {
        "validation_split": "validation", "test_split": "test",
    }  # fmt: skip
    assert splits("hellaswag", "train", "validation") == {
        "validation_split": "validation",
        "test_split": None,
    }
    # Another split than the stock task's: examples still come from the training rows.
    none = {"training_split": None, "validation_split": None}
    for files in (("train", "validation"), ("validation", "train")):
        other = splits("arc_easy", *files)
        assert other == none | {"test_split": "validation", "fewshot_split": "train"}
    # Without training rows: from the evaluated rows.
    assert splits("arc_easy", "validation", "test") == none | {"test_split": "test", "fewshot_split": "test"}
    assert splits("piqa", "test") == none | {"test_split": "test", "fewshot_split": "test"}
    # The stock task has no training split to take them from by itself.
    lambada = none | {"test_split": "test", "fewshot_split": "train"}
    assert splits("lambada_openai", "train", "test") == lambada


def test_a_task_file_says_where_its_rows_are(tmp_path: Path) -> None:
    config = task_config("piqa", {"validation": tmp_path / "x" / ".." / "v.jsonl"}, Path("/stock"))
    assert config["task"] == "piqa"
    assert config["include"] == "/stock/piqa/piqa.yaml"
    assert (config["dataset_path"], config["dataset_name"]) == ("json", None)
    assert config["dataset_kwargs"]["data_files"] == {"validation": str((tmp_path / "v.jsonl").resolve())}


def test_a_name_without_a_split_is_what_the_stock_task_evaluates(tmp_path: Path) -> None:
    assert {name: stock.evaluated for name, stock in STOCK.items()} == {
        "hellaswag": "validation", "arc_easy": "test", "arc_challenge": "test", "piqa": "validation",
        "lambada_openai": "test", "lambada_standard": "test",
    }  # fmt: skip
    for name in ("lambada.jsonl", "arc-challenge.valid.jsonl.zst", "hellaswag-dev.jsonl", "hellaswag.txt"):
        (tmp_path / name).write_text("")
    found = find_files(tmp_path)
    assert {task: list(files) for task, files in found.items()} == {
        "lambada_openai": ["test"], "arc_challenge": ["validation"], "hellaswag": ["validation"],
    }  # fmt: skip
    assert found["hellaswag"]["validation"].name == "hellaswag-dev.jsonl"


def test_what_the_harness_is_given(lm_eval: Stub, tmp_path: Path) -> None:
    stock, out, rows = tmp_path / "stock", tmp_path / "deep" / "out", tmp_path / "rows"
    own = tmp_path / "own.yml"
    own.write_text("")
    specs = task_specs(["lambada", "mmlu", str(own), "mmlu"], None, out)
    assert specs == [str(stock / "lambada/lambada_openai.yaml"), "mmlu", str(own)]
    assert not out.exists()  # nothing local, nothing written
    rows.mkdir()
    for name in ("piqa_val.jsonl", "arc_easy_test.jsonl"):
        (rows / name).write_text("")
    assert task_specs([], rows, out) == [str(out / "arc_easy.yaml"), str(out / "piqa.yaml")]
    assert (out / "piqa.yaml").read_text().startswith("include: ")  # in the order of a task file
    written = yaml.safe_load((out / "piqa.yaml").read_text())
    assert written == task_config("piqa", {"validation": rows / "piqa_val.jsonl"}, stock)
    assert task_specs(["arc-easy"], rows, out) == [str(out / "arc_easy.yaml")]
    for tasks, folder, message in (
        (["mmlu"], rows, r"holds \(arc_easy, piqa\), got mmlu"),
        (["mmlu"], tmp_path, r"holds \(none\), got mmlu"),
        ([], tmp_path, r"must hold TASK_SPLIT.jsonl .* of one of hellaswag, arc_easy"),
        (["gone.yaml"], None, "task must be a file that exists, got gone.yaml"),
    ):
        with pytest.raises(ValueError, match=message):
            task_specs(tasks, folder, out)


def test_names_are_looked_up_only_where_a_name_is_given(lm_eval: Stub) -> None:
    files = harness(["/a/piqa.yaml", "/b/own.yml"])
    assert [task.task_name for task in files.tasks] == ["piqa", "own"]
    harness(["/a/piqa.yaml", "mmlu"])
    assert [m.include_defaults for m in lm_eval.managers] == [False, True]
    assert lm_eval.built[0] == {"pretrained": "model", "tokenizer": "tokenizer", "batch_size": 4}


def test_an_unknown_name_is_refused_with_its_neighbours(lm_eval: Stub) -> None:
    with pytest.raises(
        ValueError, match=r"one of lm_eval, got helaswag; similar names: hellaswag, hellaswag_de"
    ):
        harness(["helaswag"])
    with pytest.raises(ValueError, match="got zzz; similar names: hellaswag, arc_easy, arc_challenge, piqa"):
        harness(["zzz"])
    lm_eval.broken = True
    with pytest.raises(
        ValueError, match=r"task piqa could not be loaded \(KeyError: [^;]*no such row.*--tasks-from"
    ):
        harness(["/a/piqa.yaml"])


def test_examples_must_leave_a_row_to_ask(lm_eval: Stub) -> None:
    for shots in (None, 0, 9):
        assert harness(["mmlu"], shots).shots == shots
    for shots in (10, 11):
        with pytest.raises(ValueError, match=f"shots must be below the 10 rows of winogrande, got {shots}"):
            harness(["winogrande"], shots)
    lm_eval.rows = 0
    harness(["mmlu"], 0)


def test_numbers_are_the_metrics_with_their_shots_and_rows(lm_eval: Stub) -> None:
    lm_eval.answer = {
        "results": {
            "mmlu": {"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": "m"},
            "group": {"acc,none": 0.7},  # a mean over tasks has no rows of its own
        },
        "n-shot": {"mmlu": 2},
        "n-samples": {"mmlu": {"original": 99, "effective": 7}},
    }
    loaded = harness(["mmlu"], 2)
    assert loaded.run(7) == {"mmlu": {"acc,none": 0.5, "acc_stderr,none": 0.1, "shots": 2, "rows": 7}}
    (call,) = lm_eval.calls
    assert (call["model"], call["num_fewshot"], call["limit"], call["batch_size"]) == ("lm", 2, 7, 4)
    assert call["tasks"] == loaded.tasks
    assert call["log_samples"] is False


def test_bars_become_progress_and_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm import std

    said: list[tuple[str, int, int]] = []

    def note(stage: str, done: int, total: int) -> None:
        said.append((stage, done, total))

    with _bars_as(note):
        for _ in std.tqdm(range(2), desc="requests", mininterval=0):
            pass
        std.tqdm(iter([])).refresh()
    assert ("requests", 0, 2) in said
    assert ("tasks", 0, 0) in said
    assert capsys.readouterr().err == ""
    with pytest.raises(RuntimeError, match="stop"), _bars_as(note):
        raise RuntimeError("stop")
    said.clear()
    std.tqdm(iter([]), desc="afterwards").refresh()
    assert "afterwards" in capsys.readouterr().err
    assert said == []
