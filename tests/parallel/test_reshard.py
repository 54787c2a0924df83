"""A checkpoint written by some processes is read by any others, and by the same ones to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import ALONE, backward, batch, tiny, whole
from processes import full_state_dict, run
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.optim import AdamW, Optimizer

from grmoe.model import GrmoeForCausalLM
from grmoe.optim import GrassmannAdam, split_parameters
from grmoe.parallel.shard import shard, split_by_mesh, sync_routers
from grmoe.parallel.world import ParallelConfig, World, mean
from grmoe.runs.checkpoint import CheckpointError, Checkpoints
from grmoe.runs.meta import TEMPORARY
from grmoe.runs.state import gather, restore

WORLDS = {
    "one": (ParallelConfig(), 1),
    "fsdp": (ParallelConfig(), 2),
    "hsdp": (ParallelConfig(replicate=2), 2),
    "expert": (ParallelConfig(expert=2), 2),
    "fsdp × expert": (ParallelConfig(fsdp=2, expert=2), 4),
}


def build(world: World, noise: float = 0.0) -> tuple[GrmoeForCausalLM, list[Optimizer]]:
    model = tiny(tie_word_embeddings=False, shared_experts=1)
    with torch.no_grad():  # what is loaded must replace all of this
        for p in model.parameters():
            p.mul_(1 + noise)
    shard(model, world)
    split = split_parameters(model)
    groups = [
        {"params": split.rest, "rate": "rest"},
        {"params": split.kappa, "rate": "kappa", "weight_decay": 0.0, "lr": 0.02},
    ]
    frames = [{**group, "rate": "frames"} for group in split.frame_groups]
    return model, [AdamW(split_by_mesh(groups), lr=0.01), GrassmannAdam(frames, lr=0.05)]


def train(world: World, model: GrmoeForCausalLM, optimizers: list[Optimizer], steps: range) -> None:
    for step in steps:
        backward(model, world, batch(8, step))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9  # a schedule, which a checkpoint has to remember
            optimizer.step()
            optimizer.zero_grad()
        sync_routers(model, world)
        model.update_priors(0.1)


@torch.no_grad()
def evaluate(world: World, model: GrmoeForCausalLM) -> Tensor:
    model.eval()
    own = batch(8, 99).chunk(world.size)[world.rank]
    loss = mean(world, model(input_ids=own, labels=own).loss)
    model.train()
    return loss


def weights(model: GrmoeForCausalLM) -> dict[str, Tensor]:
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def moments(model: GrmoeForCausalLM, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    tree = gather(model, optimizers)["moments"]
    return {f"{name}/{key}": whole(t) for name, entry in tree.items() for key, t in entry.items()}


def write(world: World, folder: Path) -> dict[str, Any]:
    """Three steps, a checkpoint, two more steps."""
    model, optimizers = build(world)
    train(world, model, optimizers, range(3))
    result = {"loss": evaluate(world, model), "saved": weights(model), "moments": moments(model, optimizers)}
    evaluate(world, model)  # leaves gathered parameters behind, which are not what is to be saved
    Checkpoints(folder).save(3, gather(model, optimizers))
    train(world, model, optimizers, range(3, 5))
    return {**result, "end": weights(model)}


def read(world: World, folder: Path) -> dict[str, Any]:
    """Other weights, fresh optimisers; the checkpoint; two more steps."""
    model, optimizers = build(world, noise=0.1)
    checkpoints = Checkpoints(folder)
    latest = checkpoints.latest()
    assert latest is not None
    restore(model, optimizers, checkpoints.load(latest, gather(model, optimizers)))
    result = {
        "loss": evaluate(world, model),
        "saved": weights(model),
        "moments": moments(model, optimizers),
        "rates": {group["rate"]: group["lr"] for o in optimizers for group in o.param_groups},
    }
    train(world, model, optimizers, range(3, 5))
    exported = full_state_dict(model, world)
    return {**result, "end": weights(model), "exported": exported}


def anywhere(name: str, work: Any, folder: Path) -> list[dict[str, Any]]:
    config, size = WORLDS[name]
    return [work(ALONE, folder)] if size == 1 else run(config, size, work, folder)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The checkpoint of each arrangement, and what the run that wrote it was."""
    made = {}
    for name in WORLDS:
        folder = tmp_path_factory.mktemp("run")
        made[name] = (folder, anywhere(name, write, folder)[0])
    return made


PAIRS = [
    ("fsdp", "one"),
    ("one", "fsdp"),
    ("hsdp", "one"),
    ("expert", "one"),
    ("one", "expert"),
    ("fsdp × expert", "one"),
    ("fsdp", "expert"),
    ("expert", "fsdp × expert"),
]


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_read_by_others(writer: str, reader: str, written: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    folder, want = written[writer]
    for rank, got in enumerate(anywhere(reader, read, folder)):
        assert float(got["loss"]) == pytest.approx(float(want["loss"]), abs=1e-6)
        for kind in ("saved", "moments"):
            assert set(got[kind]) == set(want[kind])
            for name, tensor in want[kind].items():
                assert torch.equal(got[kind][name], tensor), name
        # Schedule, moments and weights together: where the run would have been.
        for name, tensor in want["end"].items():
            assert (got["end"][name] - tensor).abs().max() < 1e-5, name
        assert sorted(got["rates"].values()) == pytest.approx([r * 0.9**3 for r in (0.01, 0.02, 0.05)])
        assert (got["exported"] is None) == (rank > 0)
        if rank == 0:
            plain = tiny(tie_word_embeddings=False, shared_experts=1)
            plain.load_state_dict(got["exported"], strict=True)
            for name, tensor in plain.state_dict().items():
                assert torch.equal(tensor, got["end"][name]), name


@pytest.mark.parametrize("name", WORLDS)
def test_read_by_as_many_goes_on_to_the_bit(
    name: str, written: dict[str, tuple[Path, dict[str, Any]]]
) -> None:
    folder, want = written[name]
    for got in anywhere(name, read, folder):
        assert torch.equal(got["loss"], want["loss"])
        for tensor_name, tensor in want["end"].items():
            assert torch.equal(got["end"][tensor_name], tensor), tensor_name


def failing(world: World, folder: Path) -> list[str]:
    """A disk that is full for the last process, then a folder the first one cannot make."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    model, optimizers = build(world)
    checkpoints, messages = Checkpoints(folder), []
    checkpoints.save(1, gather(model, optimizers))
    original = FileSystemWriter.write_data
    if world.rank == 1:
        FileSystemWriter.write_data = full  # type: ignore[method-assign]
    for target in (checkpoints, Checkpoints(folder / "file" / "run")):
        try:
            target.save(2, gather(model, optimizers))
        except CheckpointError as error:
            messages.append(str(error))
        FileSystemWriter.write_data = original  # type: ignore[method-assign]
    checkpoints.save(3, gather(model, optimizers))
    return [*messages, *(c.path.name for c in checkpoints.all())]


def test_where_one_process_fails_all_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for told in run(ParallelConfig(), 2, failing, tmp_path):
        full, folder, *kept = told
        assert "No space left on device; the last complete one is" in full
        assert "step-00000001" in full
        assert "could not write checkpoint" in folder
        assert "Not a directory" in folder
        assert kept == ["step-00000001", "step-00000003"]
    assert not list(tmp_path.glob(f"{TEMPORARY}*"))


def damaged(world: World, folder: Path) -> list[str]:
    """The file of the second process: one bit flipped, then empty. Then the index, which all of them read."""
    model, optimizers = build(world)
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, gather(model, optimizers))
    saved, messages = checkpoints.save(2, gather(model, optimizers)), []
    for name, work in (("__1_0.distcp", flipped), ("__1_0.distcp", lambda _: b""), ("index.json", flipped)):
        path = saved.path / name
        before = path.read_bytes()
        dist.barrier()
        if world.first:
            path.write_bytes(work(before))
        dist.barrier()
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load(saved, gather(model, optimizers))
        messages.append(str(caught.value))
    return messages


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


def test_damage_is_named_by_all(tmp_path: Path) -> None:
    said = run(ParallelConfig(), 2, damaged, tmp_path)
    for messages in said:
        bit, empty, index = messages
        start = f"could not read checkpoint {tmp_path}/step-00000002: "
        assert bit.startswith(f"{start}{tmp_path}/step-00000002/__1_0.distcp is not the file that was saved")
        assert empty.startswith(f"{start}{tmp_path}/step-00000002/__1_0.distcp is cut off")
        assert index.startswith(f"{start}{tmp_path}/step-00000002/index.json is not the file that was saved")
    assert all("step 1 has no damage" in message for message in said[0])
