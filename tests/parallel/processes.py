"""Real processes with gloo between them, forked from a server that has imported everything once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grmoe.cli import main
from grmoe.parallel.world import ParallelConfig, World, start, stop

SECONDS = 60.0  # nothing here takes more than a few; two processes that wait for each other take forever


def run(config: ParallelConfig, size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(world, *args)` in `size` processes; what each returned, by rank. Raises what one of them raised."""
    return Processes(size, _joined, config, work, *args).answers()


def _joined(config: ParallelConfig, work: Callable[..., Any], *args: Any) -> Any:
    result = work(start(config, "cpu"), *args)
    if dist.is_initialized():
        dist.barrier()  # the first holds the store that others may still need
    stop()
    return result


class Processes:
    """`work(*args)` in `size` processes, which know of each other as torchrun would tell them."""

    def __init__(self, size: int, work: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["pytest", "matplotlib.pyplot", "grmoe.cli", "grmoe.train.loop", "grmoe.runs.export"]
        )
        os.environ["OMP_NUM_THREADS"] = "1"  # the server starts with the first process and passes this on
        port = _free_port()
        self.ends: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_process, args=(theirs, rank, size, port, work, args))
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)

    def answers(self) -> list[Any]:
        """What each returned, by rank. Raises what one of them raised."""
        results: dict[int, Any] = {}
        size = len(self.processes)
        try:
            while len(results) < size:
                ready = wait([self.ends[r] for r in range(size) if r not in results], timeout=SECONDS)
                assert ready, f"processes {sorted(set(range(size)) - set(results))} did not answer"
                for end in ready:
                    rank = self.ends.index(end)
                    results[rank], error = pickle.loads(end.recv_bytes())
                    if error is not None:
                        raise RuntimeError(f"process {rank}:\n{error}")
            self.join()
        finally:
            self.kill()
        return [results[rank] for rank in range(size)]

    def join(self) -> list[int | None]:
        """Until all have ended; the exit status of each, -9 of one that was killed."""
        for process in self.processes:
            process.join(timeout=SECONDS)
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class Command:
    """`grmoe` with these arguments in a process of its own, without the seconds that its imports take."""

    def __init__(self, said: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.said = said
        self.processes = Processes(1, run_command, said, list(arguments), environment)
        [self.process] = self.processes.processes

    def wait_for(self, text: str) -> None:
        """Until it has said this."""
        while True:
            alive = self.process.is_alive()
            said = self.said.read_text() if self.said.exists() else ""
            if text in said:
                return
            assert alive, said
            time.sleep(0.002)

    def wait(self) -> int:
        """Its exit status."""
        [status] = self.processes.join()
        if status is None:
            self.kill()  # or it takes time from all tests after this one
        assert status is not None, f"it did not end: {self.said.read_text()}"
        return status

    def kill(self) -> None:
        self.processes.kill()


def run_command(said: Path, arguments: list[str], environment: dict[str, str] | None = None) -> None:
    """`grmoe` with these arguments in this process. What it writes to either stream is added to a file."""
    os.environ.update(environment or {})
    with said.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["grmoe", *arguments]
    main()


def _process(
    answer: Connection, rank: int, size: int, port: int, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    try:
        # Not `send`: torch hands tensors over in shared memory, which ends with the process.
        answer.send_bytes(pickle.dumps((work(*args), None)))
    except SystemExit:
        raise  # a command that says how it ended
    except BaseException:
        answer.send_bytes(pickle.dumps((None, traceback.format_exc())))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


@torch.no_grad()
def full_state_dict(model: nn.Module, world: World) -> dict[str, Tensor] | None:
    """Full CPU tensors by name on the first process, None on the others. All processes call it together."""
    whole: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            # One tensor at a time, because the full model may not fit on one device.
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            seen[id(tensor)] = full.cpu().clone() if world.first else torch.empty(0)
        whole[name.replace("_orig_mod.", "")] = seen[id(tensor)]
    return whole if world.first else None
