"""A checkpoint that was changed since it was saved is not loaded, and the error names one that was not."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grmoe.runs.checkpoint import Checkpoint, CheckpointError, Checkpoints
from grmoe.runs.config import TrainConfig
from grmoe.runs.meta import META
from grmoe.runs.open import open_model
from grmoe.train.loop import train


def state(value: float) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(int(value))
    weights = {"a": torch.randn(8, 8, generator=draw), "b": torch.randn(5, generator=draw)}
    return {"model": weights, "groups": f'[{{"lr": {value}}}]'}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["groups"] == b["groups"] and all(torch.equal(a["model"][n], b["model"][n]) for n in a["model"])


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Checkpoints, Checkpoint, Checkpoint]:
    checkpoints = Checkpoints(tmp_path)
    return checkpoints, checkpoints.save(1, state(1)), checkpoints.save(2, state(2), {"metric": 1.5})


def test_every_flipped_bit_is_found(saved: tuple[Checkpoints, Checkpoint, Checkpoint]) -> None:
    """In the data, the index, meta.json. A bit that no one reads, such as PyTorch's own index, changes nothing."""
    checkpoints, _, newest = saved
    draw, found = random.Random(0), dict.fromkeys((p.name for p in newest.path.iterdir()), 0)
    for path in newest.path.iterdir():
        content = path.read_bytes()
        for _ in range(60):
            place = draw.randrange(len(content))
            bit = bytes([content[place] ^ (1 << draw.randrange(8))])
            path.write_bytes(content[:place] + bit + content[place + 1 :])
            try:
                checkpoints.require_readable()
                assert same(checkpoints.load(newest, state(0)), state(2))
            except CheckpointError as error:
                found[path.name] += "step 1 has no damage: open it with --checkpoint 1" in str(error)
        path.write_bytes(content)
    assert found == {"__0_0.distcp": 60, "index.json": 60, META: 60, ".metadata": 0}


def test_the_data_of_two_steps_are_not_mixed_up(saved: tuple[Checkpoints, Checkpoint, Checkpoint]) -> None:
    """File by file, all but meta.json, or whole folders."""
    checkpoints, first, second = saved
    for name in ("__0_0.distcp", "index.json"):
        (first.path / name).rename(first.path / "aside")
        shutil.copyfile(second.path / name, first.path / name)
        with pytest.raises(CheckpointError, match=r"step-00000001.*is not the file that was saved"):
            checkpoints.load(first, state(0))
        if name != "index.json":
            (first.path / "aside").rename(first.path / name)
    shutil.rmtree(first.path)
    shutil.copytree(second.path, first.path)
    with pytest.raises(
        CheckpointError, match=r"meta.json is of step 2, and its folder is step-00000001; step 2 has"
    ):
        checkpoints.require_readable()


def test_where_all_are_damaged_none_is_named(saved: tuple[Checkpoints, Checkpoint, Checkpoint]) -> None:
    checkpoints, first, second = saved
    for path in (first.path, second.path):
        (path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no other checkpoint of this run can be read"):
        checkpoints.load(second, state(0))


def test_a_damaged_run_falls_back_to_the_step_that_is_named(
    settings: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = settings(steps=4, checkpoint={"every": 2})
    train(config)
    run = Path(config.out)
    older, newest = (open_model(run, which).model.state_dict() for which in ("2", "last"))
    last = run / "checkpoints" / "step-00000004"
    data = last / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 1  # in the weights or the moments
    data.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"step 2 has no damage.*remove the damaged folder and train on"
    ):
        train(config, resume=True)
    got = open_model(run, "2").model.state_dict()
    assert all(torch.equal(older[name], got[name]) for name in older)
    shutil.rmtree(last)
    train(config, resume=True)
    got = open_model(run, "last").model.state_dict()
    assert all(torch.equal(newest[name], got[name]) for name in newest)


@pytest.mark.parametrize(
    ("part", "work", "why"),
    [
        ("router.frames", lambda t: t.mul_(1.5), "must be orthonormal"),
        ("q_proj", lambda t: t.view(-1)[0].fill_(torch.nan), "1 numbers that are NaN or Inf"),
    ],
)
def test_unsound_weights_of_a_run_are_not_opened(
    part: str, work: Callable[[Any], Any], why: str, unsound: TrainConfig
) -> None:
    """Saved as they are, with the right checksums: training itself went wrong."""
    run = Path(unsound.out)
    checkpoints = Checkpoints(run / "checkpoints")
    (only,) = checkpoints.all()
    weights = {"model": open_model(run).model.state_dict()}
    name = next(name for name in weights["model"] if part in name)
    before = weights["model"][name].clone()
    work(weights["model"][name])
    del weights["model"]["lm_head.weight"]  # tied
    checkpoints.save(only.step, weights)
    with pytest.raises(ValueError, match=rf"step-00000002: .*{part}.* {why}"):
        open_model(run)
    weights["model"][name].copy_(before)
    checkpoints.save(only.step, weights)


@pytest.fixture(scope="module")
def unsound(
    make_settings: Callable[[Path], Callable[..., TrainConfig]], tmp_path_factory: pytest.TempPathFactory
) -> TrainConfig:
    config = make_settings(tmp_path_factory.mktemp("unsound"))(steps=2)
    train(config)
    return config
