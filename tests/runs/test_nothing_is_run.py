"""Pickles in a run or a model: every command that opens one refuses them, and nothing they name is called."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import WEIGHTS, plain_meta
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.runs.checkpoint import CheckpointError, Checkpoints
from grmoe.runs.config import TrainConfig
from grmoe.runs.export import export
from grmoe.runs.open import open_model
from grmoe.runs.pickled import DamageError, unpickle_index
from grmoe.train.loop import train


class Touch:
    """Unpickled freely, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def run(
    make_settings: Callable[[Path], Callable[..., TrainConfig]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    config = make_settings(tmp_path_factory.mktemp("crafted"))(steps=2)
    train(config)
    return Path(config.out)


def crafted(run: Path, place: Path, mark: Path) -> Path:
    """A copy of the run with a pickle for its index, as older versions have one and without checksums."""
    copy = place / "run"
    shutil.copytree(run, copy)
    plain_meta(copy)
    (step,) = (copy / "checkpoints").glob("step-*")
    for name in (".metadata", "__0.metadata"):
        (step / name).write_bytes(pickle.dumps(Touch(mark)))
    return copy


COMMANDS = {
    "generate": ["--prompt", "x"],
    "export": [],
    "eval": [],
    "analyze": [],
    "dial": [],
    "prune": [],
    "report": [],
    "train": [],
    "train --from": [],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_what_lies_in_a_run(command: str, run: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    copy = crafted(run, tmp_path, mark)
    arguments = {
        "train": ["train", "--resume", f"out={copy}"],
        "train --from": ["train", "--from", str(copy), f"out={tmp_path / 'tuned'}"],
    }
    result = CliRunner().invoke(app, arguments.get(command) or [command, str(copy), *COMMANDS[command]])
    assert not mark.exists()
    assert isinstance(result.exception, SystemExit | None), result.exception
    said = " ".join(result.output.split())
    if command == "report":  # shows the log, and says why there is no more
        page = (copy / "report.html").read_text()
        assert "names pathlib.Path.touch" in page
    else:
        assert result.exit_code == 2
        assert "names pathlib.Path.touch, which does not belong in a checkpoint" in said
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


def test_the_pickle_would_run_if_it_were_unpickled_freely(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Touch(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def test_pickled_weights_of_a_model_are_not_read(run: Path, tmp_path: Path) -> None:
    """Neither in place of the safetensors, nor through adapters and code that lie beside."""
    mark, model = tmp_path / "ran", tmp_path / "model"
    export(run, model)
    torch.save(Touch(mark), model / "pytorch_model.bin")
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "nowhere", "peft_type": "LORA"}')
    torch.save(Touch(mark), model / "adapter_model.bin")
    for name in ("modeling_grmoe.py", "configuration_grmoe.py"):
        (model / name).write_text(f"open({str(mark)!r}, 'w')\n")
    assert open_model(model).model.config.model_type == "grmoe"
    (model / WEIGHTS).unlink()
    for command in (["generate", "--prompt", "x"], ["serve", "--port", "0"], ["eval", "--text", __file__]):
        result = CliRunner().invoke(app, [*command, str(model)])
        assert result.exit_code == 2
        assert WEIGHTS in result.stderr
        assert result.stderr.count("\n") == 1
    assert not mark.exists()


def test_values_beside_the_tensors_are_text_and_numbers(tmp_path: Path) -> None:
    """The options of the optimisers are pickled too, in a file that training reads."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    saved = checkpoints.save(1, {"weight": torch.ones(2), "groups": Touch(tmp_path / "ran")})
    with pytest.raises(CheckpointError, match="groups is damaged, or holds more than text and numbers"):
        checkpoints.load(saved, {"weight": torch.zeros(2), "groups": ""})
    assert not (tmp_path / "ran").exists()


def changes_a_class() -> bytes:
    """Sets `Metadata.version` for the whole process."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    return b"\x80\x02" + name + b"N}X\x07\x00\x00\x00versionX\x03\x00\x00\x00bads\x86b."


def hashes_for_ever() -> bytes:
    """A key of nested pairs: the same pair, forty times inside itself."""
    return b"\x80\x02})" + b"\x71\x00h\x00\x86" * 40 + b"Ns."


@pytest.mark.parametrize("content", [changes_a_class(), hashes_for_ever(), b"\x80\x04cbuiltins\neval\n."])
def test_tricks_of_pickles(content: bytes) -> None:
    with pytest.raises(DamageError, match=r"it (changes a class|has a key of type|names)"):
        unpickle_index(content)
    assert Metadata.version is None


def test_an_index_is_what_was_pickled() -> None:
    index = Metadata({}, storage_data={MetadataIndex("a", [0, 1]): None}, version="1")
    assert unpickle_index(pickle.dumps(index)) == index
