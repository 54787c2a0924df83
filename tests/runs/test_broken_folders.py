"""Folders that are broken, crafted or damaged: opening them ends in one line that names the file, never in a model."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from broken import MODELS, RUNS, parts, plain_meta, tensors
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.runs.checkpoint import CheckpointError
from grmoe.runs.config import TrainConfig
from grmoe.runs.export import export
from grmoe.runs.open import open_model
from grmoe.train.loop import train

MakeSettings = Callable[[Path], Callable[..., TrainConfig]]


@pytest.fixture(scope="module")
def run(make_settings: MakeSettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_settings(tmp_path_factory.mktemp("broken"))(steps=4, checkpoint={"every": 2})
    train(config)
    return Path(config.out)


@pytest.fixture(scope="module")
def model(run: Path) -> Path:
    export(run, run.with_name("model"), "last", dtype=torch.float32)
    return run.with_name("model")


def refusal(folder: Path, which: str = "best") -> str:
    """Why the folder does not open. Other errors than ours fail the test."""
    with pytest.raises((ValueError, CheckpointError)) as refused:
        open_model(folder, which)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


@pytest.mark.parametrize("kind", MODELS)
def test_a_broken_model_is_refused(kind: str, model: Path, tmp_path: Path) -> None:
    work, named = MODELS[kind]
    shutil.copytree(model, tmp_path / "model")
    work(tmp_path / "model")
    message = refusal(tmp_path / "model")
    assert str(tmp_path) in message
    assert named in message


@pytest.mark.parametrize("kind", RUNS)
def test_a_broken_run_is_refused(kind: str, run: Path, tmp_path: Path) -> None:
    work, named = RUNS[kind]
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("*.png"))
    work(tmp_path / "run")
    assert named in refusal(tmp_path / "run", "last")


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("generate --prompt x", "half a header"),
        ("generate --prompt x", "a billion layers"),
        ("generate --prompt x", "a tokenizer without keys"),
        ("serve --port 0", "no frames"),
        ("serve --port 0", "more tokens than the model"),
        ("info", "a billion layers"),
        ("info", "half a configuration"),
    ],
)
def test_commands_say_it_in_one_line(command: str, kind: str, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    MODELS[kind][0](tmp_path / "model")
    result = CliRunner().invoke(app, [*command.split(), str(tmp_path / "model")])
    assert isinstance(result.exception, SystemExit), result.exception  # no traceback
    assert result.exit_code == 2
    assert result.output.startswith("error: ")
    assert MODELS[kind][1] in result.output
    assert result.output.count("\n") == 1


def test_what_is_sound_opens(run: Path, model: Path, tmp_path: Path) -> None:
    """Not only sealed folders: weights saved again by others, in parts, and runs of older versions."""
    want = open_model(run, "last").model.state_dict()
    for name, work in (("again", tensors(lambda found: None)), ("parts", parts())):
        shutil.copytree(model, tmp_path / name)
        work(tmp_path / name)
        assert_same(want, tmp_path / name)
    shutil.copytree(run, tmp_path / "run")
    plain_meta(tmp_path / "run")
    assert_same(want, tmp_path / "run")


def assert_same(want: dict[str, torch.Tensor], folder: Path) -> None:
    got = open_model(folder, "last").model.state_dict()
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert torch.equal(tensor, got[name]), name


def damage(path: Path, draw: random.Random) -> str:
    """Flip a few bits of a file, or cut it. Says what was done."""
    content = bytearray(path.read_bytes())
    if draw.random() < 0.2:
        size = draw.randrange(len(content))
        path.write_bytes(content[:size])
        return f"cut at {size}"
    places = [draw.randrange(len(content)) for _ in range(draw.choice((1, 1, 1, 8)))]
    for place in places:
        content[place] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return f"flipped at {places}"


@pytest.mark.parametrize("kind", ["run", "model"])
def test_damaged_files_are_refused_or_make_no_difference(
    kind: str, run: Path, model: Path, tmp_path: Path
) -> None:
    """Random bits flipped and files cut: the weights are bit for bit those that were saved, or one line says why."""
    source = {"run": run, "model": model}[kind]
    folder = tmp_path / kind
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".lock", "*.png", "step-00000002"))
    want = open_model(folder, "last").model.state_dict()
    # Opening reads no Python file. The larger a file, the more there is to find.
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix not in (".py", ".md"))
    sizes = [p.stat().st_size ** 0.3 for p in files]
    draw, messages = random.Random(14), []
    for _ in range(30):
        (path,) = draw.choices(files, sizes)
        before = path.read_bytes()
        done = damage(path, draw)
        try:
            got = open_model(folder, "last").model.state_dict()
        except (ValueError, CheckpointError) as error:
            messages.append(str(error))
        else:
            assert all(torch.equal(want[name], got[name]) for name in want), (path, done)
        path.write_bytes(before)
    assert len(messages) > 8
    assert not [message for message in messages if "\n" in message]
