"""Checkpoints that are whole or not there: written under a temporary name, synced, then renamed.

A checkpoint is a folder `step-00000100` with PyTorch's distributed checkpoint in it (so that another number of
processes can read it) and `meta.json` (step, metric, whatever the trainer adds). What a crash leaves behind has a
temporary name, is never read and is removed by the next save.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

PREFIX, TEMPORARY = "step-", ".writing-"
META = "meta.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read or written, with its name. `status`: the exit status of a command."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


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
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

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
        measured = [c for c in self.all() if c.metric is not None and not math.isnan(c.metric)]
        return min(measured, key=lambda c: (c.metric, c.step), default=None)

    def save(
        self, step: int, state: dict[str, Any], meta: dict[str, Any] | None = None, background: bool = False
    ) -> Checkpoint:
        """Write `state` (tensors, optimiser states, plain values) as the checkpoint of a step.

        All processes call this together. On any failure the earlier checkpoints are as they were.
        background: copy the state to the CPU, return, and let a thread write it. There is one at a time: the next
        save waits for it, as `wait` does, and raises what went wrong with it.
        """
        self.wait()
        if dist.is_initialized() and self._group is None:
            # A group of its own: what the thread tells other processes must not mix with what training does.
            self._group = dist.new_group(backend="gloo")
        _expect_to_be_alone()
        checkpoint = Checkpoint(self.folder / f"{PREFIX}{step:08d}", step, {"step": step, **(meta or {})})
        if background:
            self._thread = threading.Thread(
                target=self._write_behind, args=(checkpoint, _copy(state)), daemon=True
            )
            self._thread.start()
        else:
            self._write(checkpoint, state)
        return checkpoint

    @property
    def failed(self) -> bool:
        """Whether the one in the background could not be written; `wait` says why."""
        return self._failure is not None

    def wait(self) -> None:
        """Until the one in the background is written; raises what went wrong with it, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write_behind(self, checkpoint: Checkpoint, state: dict[str, Any]) -> None:
        try:
            self._write(checkpoint, state)
        except Exception as error:
            self._failure = error

    def _write(self, checkpoint: Checkpoint, state: dict[str, Any]) -> None:
        final = checkpoint.path
        writing = self.folder / f"{TEMPORARY}{final.name}"

        def prepare() -> None:
            self._clean()
            writing.mkdir(parents=True)

        def finish() -> None:
            (writing / META).write_text(json.dumps(checkpoint.meta, indent=1))
            _sync(writing)
            replaced = final.with_name(f"{final.name}.replaced")
            if final.exists():  # the same step again, after a resume; until the new one stands, this one does
                if replaced.exists():  # as a crash between the two renames of an earlier time left it
                    self._remove(replaced)
                os.rename(final, replaced)
            os.rename(writing, final)
            _sync_folder(self.folder)
            if replaced.exists():
                self._remove(replaced)
            self._prune()

        try:
            _by_first(prepare, self._group)
            save(
                state,
                checkpoint_id=writing,
                storage_writer=_Writer(writing),
                process_group=self._group,
                no_dist=not dist.is_initialized(),
            )
            _by_first(finish, self._group)
        except (OSError, RuntimeError, CheckpointException) as error:
            if _first():
                self._clean()
            last = self.latest()
            kept = f"the last whole one is {last.path}" if last else "there is none yet"
            message = f"could not write checkpoint {final}: {_reason(error)}; {kept}"
            raise CheckpointError(message, status=1) from error

    def load(self, checkpoint: Checkpoint, state: dict[str, Any]) -> dict[str, Any]:
        """Fill `state`, shaped as it was saved, in place where it holds tensors; returns it."""
        _expect_to_be_alone()
        try:
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


class _Writer(FileSystemWriter):
    """Fails with what the system said: PyTorch's archive, half written, complains of itself over it."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # Here, for only the process that failed has the chain of errors.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None


def _expect_to_be_alone() -> None:
    """PyTorch warns that a single process saves for itself, which is what is meant."""
    # For good: a filter that is taken back is taken back for all threads, whatever they have set in between.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _copy(state: Any) -> Any:
    """The same tree with tensors of its own, on the CPU; a sharded tensor's copy is sharded alike."""
    if isinstance(state, dict):
        return {key: _copy(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(_copy, state))
    return state.detach().to("cpu", copy=True) if isinstance(state, Tensor) else state


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _by_first(work: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """The first process does it and the others wait. Where it fails, it fails for all: nobody waits for ever."""
    failure: list[Exception | None] = [None]
    if _first():
        try:
            work()
        except Exception as error:
            failure[0] = error
    if dist.is_initialized():
        dist.broadcast_object_list(failure, group=group)
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
