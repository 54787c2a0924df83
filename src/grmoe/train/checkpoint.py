"""Checkpoints that are whole or not there: written under a temporary name, synced, then renamed.

A checkpoint is a folder `step-00000100` with PyTorch's distributed checkpoint in it (so that another number of
processes can read it) and `meta.json` (step, metric, whatever the trainer adds). What a crash leaves behind has a
temporary name, is never read and is removed by the next save.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

PREFIX, TEMPORARY = "step-", ".writing-"
META = "meta.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, with its name."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    meta: dict[str, Any]

    @property
    def metric(self) -> float | None:
        """What `keep_best` compares; smaller is better."""
        return self.meta.get("metric")


class Checkpoints:
    """The checkpoints of one run: the last few, and the best."""

    def __init__(self, folder: Path, keep_last: int = 3, keep_best: bool = True) -> None:
        self.folder, self.keep_last, self.keep_best = folder, keep_last, keep_best

    def all(self) -> list[Checkpoint]:
        """Whole ones, oldest first."""
        found = []
        for path in self.folder.glob(f"{PREFIX}*"):
            try:
                meta = json.loads((path / META).read_text())
            except (OSError, ValueError):
                continue  # not ours, or not whole
            found.append(Checkpoint(path, int(meta["step"]), meta))
        return sorted(found, key=lambda c: c.step)

    def latest(self) -> Checkpoint | None:
        return found[-1] if (found := self.all()) else None

    def best(self) -> Checkpoint | None:
        measured = [c for c in self.all() if c.metric is not None]
        return min(measured, key=lambda c: (c.metric, c.step), default=None)

    def save(self, step: int, state: dict[str, Any], meta: dict[str, Any] | None = None) -> Checkpoint:
        """Write `state` (tensors, optimiser states, plain values) as the checkpoint of a step.

        All processes call this together. On any failure the earlier checkpoints are as they were.
        """
        final = self.folder / f"{PREFIX}{step:08d}"
        writing = self.folder / f"{TEMPORARY}{final.name}"
        content = {"step": step, **(meta or {})}

        def prepare() -> None:
            self._clean()
            writing.mkdir(parents=True)

        def finish() -> None:
            (writing / META).write_text(json.dumps(content, indent=1))
            _sync(writing)
            replaced = final.with_name(f"{final.name}.replaced")
            if final.exists():  # the same step again, after a resume; until the new one stands, this one does
                os.rename(final, replaced)
            os.rename(writing, final)
            _sync_folder(self.folder)
            if replaced.exists():
                self._remove(replaced)
            self._prune()

        try:
            _by_first(prepare)
            with _alone_is_fine():
                save(state, checkpoint_id=writing, no_dist=not dist.is_initialized())
            _by_first(finish)
        except (OSError, RuntimeError, CheckpointException) as error:
            if _first():
                self._clean()
            last = self.latest()
            kept = f"the last whole one is {last.path}" if last else "there is none yet"
            raise CheckpointError(f"could not write checkpoint {final}: {_reason(error)}; {kept}") from error
        return Checkpoint(final, step, content)

    def load(self, checkpoint: Checkpoint, state: dict[str, Any]) -> dict[str, Any]:
        """Fill `state`, shaped as it was saved, in place where it holds tensors; returns it."""
        try:
            with _alone_is_fine():
                load(state, checkpoint_id=checkpoint.path, no_dist=not dist.is_initialized())
        except (OSError, RuntimeError, CheckpointException) as error:
            raise CheckpointError(f"could not read checkpoint {checkpoint.path}: {_reason(error)}") from error
        return state

    def _prune(self) -> None:
        found = self.all()
        kept = {c.path for c in found[-self.keep_last :]}
        if self.keep_best and (best := self.best()) is not None:
            kept.add(best.path)
        for checkpoint in found:
            if checkpoint.path not in kept:
                self._remove(checkpoint.path)

    def _remove(self, path: Path) -> None:
        # Renamed first: a removal that is interrupted must not leave half a checkpoint under a whole name.
        doomed = self.folder / f"{TEMPORARY}old-{path.name}"
        os.rename(path, doomed)
        shutil.rmtree(doomed)

    def _clean(self) -> None:
        for path in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """PyTorch warns that a single process saves for itself, which is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _by_first(work: Callable[[], None]) -> None:
    """The first process does it and the others wait. Where it fails, it fails for all: nobody waits for ever."""
    failure: list[Exception | None] = [None]
    if _first():
        try:
            work()
        except Exception as error:
            failure[0] = error
    if dist.is_initialized():
        dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise failure[0]


def _reason(error: BaseException) -> str:
    """The cause in one line. PyTorch collects what went wrong in each process, with its stack."""
    failures = getattr(error, "failures", {})
    cause = next((failure[0] for failure in failures.values()), error)
    return (str(cause).strip() or type(cause).__name__).splitlines()[-1][:300]


def _sync(folder: Path) -> None:
    """Every file and the folder itself onto the disk: a rename must not overtake what it names."""
    for file in _files(folder):
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
