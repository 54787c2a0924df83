"""Prepares a corpus again and again in child processes that are killed, until one gets through. A script.

    killing.py CORPUS OUT random COUNT    kill -9 after a random time, COUNT times, then let it finish
    killing.py CORPUS OUT steps           die at the second step that changes the disk, then at the third, …

It imports once and forks, so that a death costs milliseconds. Children tokenise with one thread: the parent must not
have started any.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from grmoe.data import prepare

OPTIONS: dict[str, Any] = {"tokenizer": "bpe:300", "validation": 0.1, "shard_tokens": 900}


def fork(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def die_at(step: int) -> None:
    """Make the process kill itself before its `step`-th fsync, rename or removal."""
    left = step

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "unlink"):
        setattr(os, name, deadly(getattr(os, name)))


def main() -> None:
    corpus, out, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    import_module("tokenizers")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    deaths = 0
    if mode == "random":
        started = time.monotonic()
        os.waitpid(fork(lambda: prepare([corpus], out.with_name("timed"), workers=1, **OPTIONS)), 0)
        # What a child gets done, the next one need not: all of them together have about twice the time it takes.
        longest = 4 * (time.monotonic() - started) / int(sys.argv[4])
        draw = random.Random(0)
        while deaths < int(sys.argv[4]):
            child = fork(lambda: prepare([corpus], out, workers=1, **OPTIONS))
            time.sleep(draw.uniform(0, longest))
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            if status == signal.SIGKILL:
                deaths += 1
            elif status:
                sys.exit("a child failed: its error is above")
            else:  # it got through: the machine was busy when the time was taken. Start over, with less time.
                shutil.rmtree(out)
                longest /= 2
        status = os.waitpid(fork(lambda: prepare([corpus], out, workers=1, **OPTIONS)), 0)[1]
    else:
        # Each child gets a little further than it would alone: it finds what those before it have left.
        for step in range(1, 1000):

            def work(step: int = step) -> None:
                die_at(1 + step % 40)  # a range takes some fifteen of them
                prepare([corpus], out, workers=1, **OPTIONS)

            status = os.waitpid(fork(work), 0)[1]
            if status != signal.SIGKILL:
                break
            deaths += 1
    print(deaths)
    sys.exit(status != 0)


if __name__ == "__main__":
    main()
