"""lm-evaluation-harness tasks: found by name, described, and the harness's own numbers to the last digit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.evaluate.harness import STOCK, find_files, task_config, task_specs
from grmoe.runs.results import load_results

runner = CliRunner()


def test_files_are_found_by_their_names(tasks: Path, tmp_path: Path) -> None:
    found = find_files(tasks)
    assert {name: list(files) for name, files in found.items()} == {
        "arc_easy": ["test"], "hellaswag": ["validation"], "lambada_openai": ["test"], "piqa": ["validation"],
    }  # fmt: skip
    for name in (
        "PIQA.jsonl",
        "arc-easy-dev.jsonl.gz",
        "arc_easy.train.jsonl",
        "hellaswag_train.jsonl",
        "a.jsonl",
    ):
        (tmp_path / name).write_text("{}\n")
    assert {name: set(files) for name, files in find_files(tmp_path).items()} == {
        "piqa": {"validation"},
        "arc_easy": {"validation", "train"},  # hellaswag has training rows alone
    }
    (tmp_path / "piqa_valid.jsonl.xz").write_text("")
    with pytest.raises(ValueError, match="two files for piqa"):
        find_files(tmp_path)
    with pytest.raises(ValueError, match="tasks_from must be a folder"):
        find_files(tmp_path / "nowhere")


def test_only_data_and_splits_of_a_stock_task_are_replaced(tmp_path: Path) -> None:
    alone = task_config("hellaswag", {"validation": tmp_path / "v.jsonl"}, Path("/stock"))
    assert alone["include"] == "/stock/hellaswag/hellaswag.yaml"
    assert alone["dataset_kwargs"] == {"data_files": {"validation": str(tmp_path / "v.jsonl")}}
    # The harness keeps the row being asked out of its own examples where these two are the same.
    assert alone["fewshot_split"] == alone["test_split"] == "validation"
    assert alone["training_split"] is None
    both = task_config(
        "arc_easy", {"test": tmp_path / "t.jsonl", "train": tmp_path / "r.jsonl"}, Path("/stock")
    )
    assert "fewshot_split" not in both
    assert "training_split" not in both  # as in the stock task
    assert (both["validation_split"], both["test_split"]) == (None, "test")


def own_numbers(exported: Path, written: Path, out: Path, *more: str) -> dict[str, Any]:
    """The harness's own command on the exported folder, in a process that has never seen grmoe's evaluation."""
    arguments = [
        "--model", "hf", "--model_args", f"pretrained={exported},trust_remote_code=True", "--device", "cpu",
        "--include_path", str(written), "--tasks", "hellaswag,arc_easy,piqa,lambada_openai", "--batch_size", "4",
        "--output_path", str(out / "own.json"), *more,
    ]  # fmt: skip
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "lm_eval", *arguments], check=True, env=environment, cwd=out)
    (path,) = out.glob("own_*.json")
    results: dict[str, Any] = json.loads(path.read_text())["results"]
    return results


@pytest.mark.parametrize("shots", [0, 2])
def test_numbers_are_the_harness_s_own(exported: Path, tasks: Path, tmp_path: Path, shots: int) -> None:
    pytest.importorskip("lm_eval", reason="pip install 'grmoe[eval]'")
    arguments = ["eval", str(exported), "--tasks-from", str(tasks), "--batch", "4", "--limit", "10"]
    arguments += ["--shots", str(shots), "--alpha", "3", "--alpha", "1", "--out", str(tmp_path)]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    sharp, saved = load_results(tmp_path / "results.json", "eval").body["points"]
    own = own_numbers(exported, tmp_path / "tasks", tmp_path, "--limit", "10", "--num_fewshot", str(shots))
    assert set(saved["tasks"]) == set(own) == {"hellaswag", "arc_easy", "piqa", "lambada_openai"}
    for name, numbers in saved["tasks"].items():
        assert (numbers["rows"], numbers["shots"]) == (10, shots)
        measured = {key: value for key, value in numbers.items() if "," in key}
        assert measured == {key: own[name][key] for key in own[name] if "," in key}
    perplexities = [p["tasks"]["lambada_openai"]["perplexity,none"] for p in (sharp, saved)]
    assert perplexities[0] != perplexities[1]  # α reached the model
    assert sharp["experts_per_token"] < saved["experts_per_token"]
    assert "lambada_openai" in result.output


@pytest.mark.parametrize("name", ["hellaswag", "arc_easy", "piqa", "lambada_openai"])
def test_a_row_is_never_its_own_example(tasks: Path, tmp_path: Path, name: str) -> None:
    manager = pytest.importorskip("lm_eval.tasks", reason="pip install 'grmoe[eval]'").TaskManager
    (spec,) = task_specs([name], tasks, tmp_path)
    task = manager(include_defaults=False).load([spec])["tasks"][name]
    task.set_fewshot_seed(0)
    for row in task.eval_docs:
        # Eleven examples of twelve rows: all the others.
        prompt = task.fewshot_context(row, num_fewshot=11)
        asked = task.doc_to_text(row)
        assert prompt.count(asked) == 1
        assert prompt.endswith(asked)


def test_a_yaml_file_is_a_task(exported: Path, tasks: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="pip install 'grmoe[eval]'")
    rows = tmp_path / "capitals.jsonl"
    rows.write_text("".join(json.dumps({"q": f"one {i}", "a": "two"}) + "\n" for i in range(3)))
    task = tmp_path / "capitals.yaml"
    task.write_text(
        f"task: capitals\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {rows}}}}}\n"
        "output_type: loglikelihood\ntest_split: test\ndoc_to_text: '{{q}}'\ndoc_to_target: ' {{a}}'\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    result = runner.invoke(app, ["eval", str(exported), "--task", str(task), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    (point,) = load_results(tmp_path / "out" / "results.json", "eval").body["points"]
    assert point["tasks"]["capitals"]["rows"] == 3
    # The harness's own bars became our progress.
    assert "requests at α = 1" in result.output
    assert "it/s" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "mmlu", "--tasks-from", "TASKS"], "arc_easy, hellaswag, lambada_openai, piqa"),
        (["--task", "nowhere.yaml"], "task must be a file that exists, got nowhere.yaml"),
        (["--tasks-from", "EMPTY"], "must hold TASK_SPLIT.jsonl"),
        (["--task", "piqa", "--tasks-from", "BROKEN"], "task piqa could not be loaded"),
        (["--task", "piqa", "--tasks-from", "TASKS", "--shots", "12"], "shots must be below the 12 rows"),
    ],
)
def test_mistakes_are_one_line(
    exported: Path, tasks: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    pytest.importorskip("lm_eval", reason="pip install 'grmoe[eval]'")
    for name in ("empty", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "piqa_val.jsonl").write_text("not json\n")
    places = {"TASKS": tasks, "EMPTY": tmp_path / "empty", "BROKEN": tmp_path / "broken"}
    given = [str(places.get(argument, argument)) for argument in arguments]
    result = runner.invoke(app, ["eval", str(exported), *given, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert message in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_the_stock_tasks_are_where_we_look() -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="pip install 'grmoe[eval]'")
    import yaml

    for name, stock in STOCK.items():
        path = Path(lm_eval.__file__).parent / "tasks" / stock.path
        config = yaml.load(path.read_text().replace("!function", ""), yaml.SafeLoader)
        assert config["task"] == name
        if "include" not in config:
            splits = tuple(config.get(f"{kind}_split") for kind in ("training", "validation", "test"))
            assert splits == (stock.training, stock.validation, stock.test)
