"""Atomic checkpoints: written under a temporary name, flushed to disk, then renamed.

A checkpoint is a folder `step-00000100`. It holds PyTorch's distributed checkpoint, which any number of processes can
read, an index of it with checksums (`grmoe.runs.stored`), and `meta.json`: step, metric, what the trainer adds, and the
checksums of itself and of the index. A crash leaves a folder with a temporary name. It is never read, and the next
save removes it.

Reading runs nothing that the files hold, and refuses damaged ones. Checkpoints without checksums, of older versions,
are read too.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from grmoe.runs.meta import PREFIX, REPLACED, TEMPORARY, read_meta, write_meta
from grmoe.runs.pickled import DamageError
from grmoe.runs.stored import Planner, Reader, Sums, read_index, sum_written, write_index

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written. `status`: the exit status of a command."""

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
        """The number that `keep_best` compares. Smaller is better."""
        return self.meta.get("metric")

    def compares_with(self, other: Checkpoint) -> bool:
        """Whether both metrics are of the same text. Of older checkpoints it is not known."""
        texts = [c.meta["measured_on"] for c in (self, other) if "measured_on" in c.meta]
        return len(texts) < 2 or texts[0] == texts[1]


class Checkpoints:
    """The checkpoints of one run: the last few, and the best."""

    def __init__(self, folder: Path, keep_last: int = 3, keep_best: bool = True) -> None:
        self.folder, self.keep_last, self.keep_best = folder, keep_last, keep_best
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def all(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first."""
        return sorted((c for c in self._list() if isinstance(c, Checkpoint)), key=lambda c: c.step)

    def require_readable(self) -> Checkpoints:
        """Raise if a `meta.json` is damaged: which checkpoint is the last or the best is then unknown. Returns self."""
        for found in self._list():
            if isinstance(found, DamageError):
                raise CheckpointError(f"{found}{self._advice(None)}")
        return self

    def _list(self) -> Iterator[Checkpoint | DamageError]:
        for path in sorted(self.folder.glob(f"{PREFIX}*")):
            if path.name.removeprefix(PREFIX).removesuffix(REPLACED).isdecimal():
                try:
                    meta, _ = read_meta(path)
                    yield Checkpoint(path, meta["step"], meta)
                except (OSError, ValueError) as error:
                    if path.exists():  # else a run that is training has removed it just now
                        yield DamageError(str(error))

    def latest(self) -> Checkpoint | None:
        return found[-1] if (found := self.all()) else None

    def best(self) -> Checkpoint | None:
        """Of those measured on the same text as the last one."""
        measured = [c for c in self.all() if c.metric is not None and not math.isnan(c.metric)]
        alike = [c for c in measured if c.compares_with(measured[-1])]
        return min(alike, key=lambda c: (c.metric, c.step), default=None)

    def save(
        self, step: int, state: dict[str, Any], meta: dict[str, Any] | None = None, background: bool = False
    ) -> Checkpoint:
        """Write `state` (tensors, optimiser states, plain values) as the checkpoint of a step.

        All processes call this together. A failure leaves earlier checkpoints unchanged.
        background: copy the state to the CPU, return, and let a thread write it. The next `save` or `wait` waits for
        the thread and raises its error.
        """
        self.wait()
        if dist.is_initialized() and self._group is None:
            # A separate group, because the thread must not mix its messages with those of training.
            self._group = dist.new_group(backend="gloo")
        _ignore_single_process_warning()
        checkpoint = Checkpoint(self.folder / f"{PREFIX}{step:08d}", step, {"step": step, **(meta or {})})
        if background:
            copied = (checkpoint, _copy(state))
            self._thread = threading.Thread(target=self._write_behind, args=copied, daemon=True)
            self._thread.start()
        else:
            self._write(checkpoint, state)
        return checkpoint

    @property
    def failed(self) -> bool:
        """Whether the background write failed. `wait` raises its error."""
        return self._failure is not None

    def wait(self) -> None:
        """Wait for the background write. Raises its error, once."""
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
        writer = _Writer(writing)
        sums: Sums = {}

        def prepare() -> None:
            self._clean()
            writing.mkdir(parents=True)

        def finish() -> None:
            assert writer.content is not None
            write_meta(writing, checkpoint.meta, write_index(writing, checkpoint.step, writer.content, sums))
            _sync(writing)
            replaced = final.with_name(f"{final.name}{REPLACED}")
            if (
                final.exists()
            ):  # the same step, after a resume: keep the old one until the new one is in place
                if replaced.exists():  # left by a crash between the two renames
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
                storage_writer=writer,
                process_group=self._group,
                no_dist=not dist.is_initialized(),
            )
            for own in _of_all(writer.sums, self._group):
                sums |= own
            _by_first(finish, self._group)
        except (OSError, RuntimeError, CheckpointException) as error:
            if _first():
                self._clean()
            last = self.latest()
            kept = f"the last complete one is {last.path}" if last else "there is none yet"
            message = f"could not write checkpoint {final}: {_reason(error)}; {kept}"
            raise CheckpointError(message, status=1) from error

    def load(self, checkpoint: Checkpoint, state: dict[str, Any]) -> dict[str, Any]:
        """Fill `state`, which has the structure that was saved. Tensors are filled in place. Returns it.

        Every byte that is used is compared with its checksum. If there is damage, the error names an older checkpoint
        without any.
        """
        _ignore_single_process_warning()
        try:
            reader = _on_all(lambda: self._open(checkpoint))
            load(state, storage_reader=reader, planner=Planner(), no_dist=not dist.is_initialized())
        except (OSError, RuntimeError, ValueError, CheckpointException) as error:
            cause = _cause(error)
            advice = self._advice(checkpoint) if isinstance(cause, DamageError | OSError) and _first() else ""
            message = f"could not read checkpoint {checkpoint.path}: {_reason(error)}{advice}"
            raise CheckpointError(message) from error
        return state

    def tensors(self, checkpoint: Checkpoint) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """(shape, dtype) of the saved tensors by name, from the index alone."""
        try:
            return self._open(checkpoint).index.shapes()
        except ValueError as error:
            message = f"could not read checkpoint {checkpoint.path}: {error}{self._advice(checkpoint)}"
            raise CheckpointError(message) from error

    def _open(self, checkpoint: Checkpoint) -> Reader:
        meta, checksum = read_meta(checkpoint.path)
        index = read_index(checkpoint.path, checksum)
        if index.step not in (None, meta["step"]):
            raise DamageError(f"{checkpoint.path} holds the tensors of step {index.step}")
        return Reader(checkpoint.path, index)

    def _advice(self, damaged: Checkpoint | None) -> str:
        """Names the newest other checkpoint without damage. Reads each as a whole until one is found."""
        for other in reversed(self.all()):
            if damaged is None or other.path != damaged.path:
                try:
                    self._open(other).check_all()
                except (OSError, ValueError):
                    continue
                return (
                    f"; step {other.step} has no damage: open it with --checkpoint {other.step}, or remove the damaged "
                    "folder and train on from there with --resume"
                )
        return "; no other checkpoint of this run can be read"

    def _prune(self) -> None:
        found = self.all()
        kept = {c.path for c in found[-self.keep_last :]}
        if self.keep_best and (best := self.best()) is not None:
            kept.add(best.path)
        for checkpoint in found:
            if checkpoint.path not in kept:
                self._remove(checkpoint.path)

    def _remove(self, path: Path) -> None:
        # Renamed first, because an interrupted removal must not leave part of a checkpoint under its final name.
        trash = self.folder / f"{TEMPORARY}old-{path.name}"
        os.rename(path, trash)
        shutil.rmtree(trash)

    def _clean(self) -> None:
        for path in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)


class _Writer(FileSystemWriter):
    """Sums what it wrote, and raises the system's error: PyTorch's archive hides it behind one of its own."""

    sums: Sums
    content: Metadata | None = None
    """What was written, by all processes. The first process has it."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        # Built here, because older PyTorch fills in a copy of `metadata` that only its file holds.
        places = {one.index: one.storage_data for of_process in results for one in of_process}
        self.content = replace(metadata, storage_data=places)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            written = super().write_data(plan, planner)
            self.sums = sum_written(Path(self.path), written.value())
            return written
        except RuntimeError as error:
            # Done here, because only the process that failed has the chain of errors.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None


def _ignore_single_process_warning() -> None:
    """PyTorch warns when a single process saves without torch.distributed. That is intended here."""
    # Never undone, because restoring the filters would also discard those that other threads set meanwhile.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _copy(state: Any) -> Any:
    """A copy of the tree with its tensors on the CPU. Sharded tensors stay sharded."""
    if isinstance(state, dict):
        return {key: _copy(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(_copy, state))
    return state.detach().to("cpu", copy=True) if isinstance(state, Tensor) else state


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _by_first(work: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Run `work` on the first process while the others wait. An error is raised on all of them."""
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


def _of_all(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The values of all processes."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def _on_all(work: Callable[[], T]) -> T:
    """Run `work` on every process. An error on one of them is raised on all."""
    result, failure = None, None
    try:
        result = work()
    except (OSError, ValueError) as error:
        failure = error
    for found in _of_all(failure, None):
        if found is not None:
            raise found
    assert result is not None
    return result


def _cause(error: BaseException) -> BaseException:
    """The error itself. PyTorch collects the error of each process with its stack."""
    failures = getattr(error, "failures", {})
    return next((failure[0] for failure in failures.values()), error)


def _reason(error: BaseException) -> str:
    """The cause in one line."""
    cause = _cause(error)
    return (str(cause).strip() or type(cause).__name__).splitlines()[-1][:300]


def _sync(folder: Path) -> None:
    """Flush every file and the folder itself to disk. The rename must come after this."""
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
