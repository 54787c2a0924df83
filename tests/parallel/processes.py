"""Real processes with gloo between them, forked from a server that has imported everything once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from grmoe.parallel.world import ParallelConfig, start, stop

SECONDS = 60.0  # nothing here takes more than a few; two processes that wait for each other take forever


def run(config: ParallelConfig, size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(world, *args)` in `size` processes; what each returned, by rank. Raises what one of them raised."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "grmoe.parallel.shard", "grmoe.train.state"])
    os.environ["OMP_NUM_THREADS"] = "1"  # the server starts with the first process and passes this on
    port, ends, processes = _free_port(), [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_process, args=(theirs, rank, size, port, config, work, args))
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    results: dict[int, Any] = {}
    try:
        while len(results) < size:
            ready = wait([ends[r] for r in range(size) if r not in results], timeout=SECONDS)
            assert ready, f"processes {sorted(set(range(size)) - set(results))} did not answer"
            for end in ready:
                rank = ends.index(end)
                results[rank], error = pickle.loads(end.recv_bytes())
                if error is not None:
                    raise RuntimeError(f"process {rank}:\n{error}")
    finally:
        for process in processes:
            process.join(timeout=SECONDS if len(results) == size else 0.0)
            process.kill()
    return [results[rank] for rank in range(size)]


def _process(
    answer: Connection,
    rank: int,
    size: int,
    port: int,
    config: ParallelConfig,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    try:
        world = start(config, "cpu")
        result = work(world, *args)
        stop()
        # Not `send`: torch hands tensors over in shared memory, which ends with the process.
        answer.send_bytes(pickle.dumps((result, None)))
    except BaseException:
        answer.send_bytes(pickle.dumps((None, traceback.format_exc())))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port
