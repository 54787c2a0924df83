"""The results envelope: what is written is read again, and nothing else is taken for it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import grmoe
from grmoe.runs.config import TrainConfig
from grmoe.runs.export import export
from grmoe.runs.open import LoadedModel, open_model
from grmoe.runs.results import (
    FORMAT,
    ResultsError,
    find_results,
    load_results,
    plain,
    results_folder,
    save_results,
)
from grmoe.train.loop import train


@dataclass(frozen=True)
class Body:
    perplexity: float
    losses: list[float]
    where: Path


BODY = Body(12.5, [1.0, math.nan, math.inf], Path("a/b"))


@pytest.fixture(scope="module")
def loaded(
    make_settings: Callable[[Path], Callable[..., TrainConfig]], tmp_path_factory: pytest.TempPathFactory
) -> LoadedModel:
    config = make_settings(tmp_path_factory.mktemp("results"))(steps=2)
    train(config)
    return open_model(config.out)


def test_what_is_saved_is_found_again(loaded: LoadedModel) -> None:
    out = results_folder(loaded.path, "dial")
    assert out == loaded.path / "dial"
    path = save_results(loaded, "dial", BODY, out, card="## The dial")
    found = find_results(loaded.path, "dial")
    assert found == load_results(path, "dial")
    assert found is not None
    assert found.body == {"perplexity": 12.5, "losses": [1.0, None, None], "where": "a/b"}
    assert (found.kind, found.step, found.model) == ("dial", 2, str(loaded.path))
    assert (found.device, found.dtype, found.format) == ("CPU", "float32", FORMAT)
    assert (found.grmoe, found.card) == (grmoe.__version__, "## The dial")
    assert find_results(loaded.path, "prune") is None


def test_another_call_says_what_it_replaces(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*words: str, kind: str = "eval", tells: bool = True) -> str:
        monkeypatch.setattr("sys.argv", ["/bin/grmoe", *words])
        save_results(loaded, kind, BODY, tmp_path, tells=tells)
        return capsys.readouterr().err

    assert call("eval", "a model") == ""
    assert call("eval", "a model") == ""  # the same call again
    created = load_results(tmp_path / "results.json", "eval").created
    said = f"Replaced the results of {created}, made by: grmoe eval 'a model'. --out OTHER keeps both\n"
    assert call("eval", "a model", "--budget", "1") == said
    assert call("eval", "other", tells=False) == ""
    assert call("prune", "other", kind="prune") == ""  # of another kind: cannot be read as this one
    (tmp_path / "results.json").write_text("[]")
    assert call("eval", "a model") == ""


def test_results_of_an_exported_folder_lie_beside_it(loaded: LoadedModel, tmp_path: Path) -> None:
    export(loaded.path, tmp_path / "model")
    assert results_folder(tmp_path / "model", "eval") == tmp_path / "model-eval"


@pytest.mark.parametrize(("inside", "name"), [("", "."), ("notes", ".."), ("notes", "../notes/..")])
def test_an_exported_folder_may_be_the_current_one(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str, name: str
) -> None:
    export(loaded.path, tmp_path / "model")
    (tmp_path / "model/notes").mkdir()
    monkeypatch.chdir(tmp_path / "model" / inside)
    exported = open_model(name)
    path = save_results(exported, "eval", BODY, results_folder(exported.path, "eval"))
    assert path.resolve() == tmp_path / "model-eval/results.json"
    path.write_text("[]")
    with pytest.raises(ResultsError, match=r"make it again with: grmoe eval \S*/model$"):
        find_results(Path(name), "eval")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": FORMAT - 1}, "was written by another version"),
        ({"kind": "prune"}, "was written by another version"),
        ({"body": None, "drop": "body"}, "is damaged \\(without body\\)"),
        ({"body": []}, "is damaged \\(body is \\[\\]\\)"),
        ({"step": "two"}, "is damaged \\(step is 'two'\\)"),
        ({"card": 5}, "is damaged \\(card is 5\\)"),
    ],
)
def test_other_files_are_refused_with_the_command_that_makes_new_ones(
    loaded: LoadedModel, change: dict[str, Any], why: str
) -> None:
    path = save_results(loaded, "eval", BODY, results_folder(loaded.path, "eval"))
    content = json.loads(path.read_text()) | change
    if "drop" in change:
        del content[content.pop("drop")]
    path.write_text(json.dumps(content))
    with pytest.raises(ResultsError, match=f"{why}.*make it again with: grmoe eval .*run"):
        load_results(path, "eval")
    for content in (b'{"points": [', b"[]", bytes(range(256)), b'{"a":' * 100_000, b""):
        path.write_bytes(content)
        with pytest.raises(ResultsError, match=r"^[^\n]*results.json is damaged[^\n]*$"):
            load_results(path, "eval")
    path.unlink()  # exporting this run would be refused


def test_the_command_names_the_exported_folder_itself(loaded: LoadedModel, tmp_path: Path) -> None:
    export(loaded.path, tmp_path / "my-model")
    folder = results_folder(tmp_path / "my-model", "analysis")
    folder.mkdir()
    (folder / "results.json").write_text("[]")
    with pytest.raises(ResultsError, match=r"make it again with: grmoe analyze \S*/my-model$"):
        find_results(tmp_path / "my-model", "analysis")


def test_a_disk_that_is_full_leaves_the_old_file(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = results_folder(loaded.path, "prune")
    path = save_results(loaded, "prune", BODY, out)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_results(loaded, "prune", {"new": 1}, out)
    assert path.read_bytes() == before
    assert [p.name for p in out.iterdir()] == [path.name]


def test_plain_data_and_digits() -> None:
    value = {"a": np.float32(0.5), "b": torch.tensor([1, 2]), 3: (math.pi, "text", None, True)}
    assert plain(value) == {"a": 0.5, "b": [1, 2], "3": [math.pi, "text", None, True]}
    assert plain([math.pi, 123456789.0], digits=3) == [3.14, 123000000.0]
