"""Load study of `grmoe serve`: many clients, several α, every answer checked against the offline one.

    grmoe export runs/demo/grmoe --out runs/demo/model --dtype fp32
    python benchmarks/serve.py runs/demo/model [--seconds 300] [--clients 32] [--alone] [--json PATH]

Starts the server as its own process on 127.0.0.1. The study has four parts:

1. Offline answers of every prompt at every α (`set_alpha`, `generate`, greedy, batch of one).
2. One client alone: the rate to compare with.
3. All clients at once. Half of their requests are streamed; malformed, oversized and out-of-range ones are among them.
4. The same again. Meanwhile the server is killed (-9) and started again on the same port.

At the end the server gets SIGTERM; status, port, processes and temporary files are checked. The exit status is 1 if
anything went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from grmoe.runs.open import open_model

ALPHAS = (0.5, 1.5, 4.0)
PROMPTS = (
    "def main(", "import os\n", "class Node(", "for i in range(", "return self.", "raise ValueError(", "try:\n    ",
    "with open(path", "if not isinstance(", "# The", "    def __init__(self, ", "assert ",
)  # fmt: skip
LENGTHS = (8, 24, 48)
BAD_SHARE = 0.1  # of the requests in a crowd
START_S = 60  # seconds a server may take to be ready

Key = tuple[str, float]


@dataclass
class Tally:
    """What the clients saw. Their threads share it."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    streamed: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # bad requests refused correctly, by kind
    busy: int = 0
    interrupted: int = 0  # cut off by the kill
    wrong: list[str] = field(default_factory=list)
    took: float = 0.0  # seconds in total
    lock: threading.Lock = field(default_factory=threading.Lock)


class Server:
    """`grmoe serve` as a process on a port of 127.0.0.1."""

    def __init__(self, folder: Path, port: int, temporary: Path, log: Path, options: list[str]) -> None:
        command = [sys.executable, "-m", "grmoe", "serve", str(folder), "--port", str(port)]
        self.port, self.log = port, log.open("ab")
        environment = os.environ | {"TMPDIR": str(temporary)}
        self.process = subprocess.Popen([*command, *options], stderr=self.log, env=environment)
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
            if self.process.poll() is not None:
                break
        self.process.kill()
        raise SystemExit(f"the server did not start; see {log}")

    def end(self, number: int) -> int:
        """Send a signal; the exit status."""
        main = psutil.Process(self.process.pid)
        self.family = [main, *main.children(recursive=True)]
        self.process.send_signal(number)
        status = self.process.wait(timeout=30)
        self.log.close()
        return status

    def left(self) -> list[psutil.Process]:
        """Its processes that still run some seconds after the end."""
        _, alive = psutil.wait_procs(self.family, timeout=5)
        return [each for each in alive if running(each)]


def running(process: psutil.Process) -> bool:
    """A process that has ended is there until its parent has noticed."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def offline(folder: Path, tokens: int) -> dict[Key, list[int]]:
    """Greedy answers of each prompt alone, at each α, without the end token."""
    loaded = open_model(folder)
    model: Any = loaded.model
    answers = {}
    for alpha in ALPHAS:
        model.set_alpha(alpha)
        for prompt in PROMPTS:
            ids = loaded.tokenizer(prompt, return_tensors="pt").input_ids
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
            found = out[0, ids.shape[1] :].tolist()
            ends = [found.index(end) for end in ends_of(model) if end in found]
            answers[prompt, alpha] = found[: min(ends, default=None)]
    return answers


def ends_of(model: Any) -> list[int]:
    ends = model.config.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def ask(client: httpx.Client, prompt: str, alpha: float, tokens: int, stream: bool) -> tuple[int, list[int]]:
    """(status, tokens of the answer)."""
    body = {
        "prompt": prompt, "alpha": alpha, "max_tokens": tokens, "temperature": 0, "stream": stream,
        "return_token_ids": True,
    }  # fmt: skip
    if not stream:
        response = client.post("/v1/completions", json=body)
        ids = response.json()["choices"][0]["token_ids"] if response.status_code == 200 else []
        return response.status_code, ids
    found: list[int] = []
    done = False
    with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return answer.status_code, []
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    return 500, []
                found += event["choices"][0]["token_ids"]
    return (200 if done else 0), found


BAD: dict[str, tuple[bytes, int, str]] = {
    "not JSON": (b"{", 400, "JSON"),
    "no object": (b"[1]", 400, "object"),
    "no prompt": (b'{"max_tokens": 4}', 400, "prompt"),
    "alpha too large": (b'{"prompt": "x", "alpha": 99}', 400, "between 0.5 and 5"),
    "alpha a string": (b'{"prompt": "x", "alpha": "hot"}', 400, "alpha"),
    "alpha not finite": (b'{"prompt": "x", "alpha": NaN}', 400, "alpha"),
    "max_tokens 0": (b'{"prompt": "x", "max_tokens": 0}', 400, "max_tokens"),
    "max_tokens too large": (b'{"prompt": "x", "max_tokens": 1000000}', 400, "max_tokens"),
    "prompt too long": (json.dumps({"prompt": "word " * 5000}).encode(), 400, "prompt"),
    "body too large": (b'{"prompt": "' + b"x" * (1 << 20) + b'"}', 413, "bytes"),
    "unknown field": (b'{"prompt": "x", "alhpa": 2}', 400, "alhpa"),
    "unsupported field": (b'{"prompt": "x", "suffix": "y"}', 400, "suffix is not supported"),
    "other model": (b'{"prompt": "x", "model": "other"}', 404, "model"),
}


def misbehave(client: httpx.Client, kind: str) -> str | None:
    """Send a bad request. Returns what is wrong with the refusal, or None."""
    body, status, word = BAD[kind]
    response = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    message = response.json()["error"]["message"]
    ok = response.status_code == status and word in message
    return None if ok else f"{kind}: {response.status_code} {message}"


def one_client(
    seed: int, port: int, stop: threading.Event, answers: dict[Key, list[int]], tally: Tally, bad: bool
) -> None:
    """Send requests one after another until `stop` is set. Try again while the server is down."""
    draw = random.Random(seed)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        while not stop.is_set():
            try:
                if bad and draw.random() < BAD_SHARE:
                    kind = draw.choice(list(BAD))
                    wrong = misbehave(client, kind)
                    with tally.lock:
                        tally.refused[kind] += wrong is None
                        tally.wrong += [wrong] if wrong else []
                    continue
                prompt, alpha = draw.choice(PROMPTS), draw.choice(ALPHAS)
                length, stream = draw.choice(LENGTHS), draw.random() < 0.5
                start = time.monotonic()
                status, found = ask(client, prompt, alpha, length, stream)
                taken = time.monotonic() - start
            except httpx.TransportError:
                with tally.lock:
                    tally.interrupted += 1
                time.sleep(0.5)
                continue
            with tally.lock:
                if status == 429:
                    tally.busy += 1
                elif status != 200:
                    tally.interrupted += status == 0
                    tally.wrong += [f"status {status}"] if status else []
                elif found != answers[prompt, alpha][:length]:
                    tally.wrong.append(f"mismatch: {prompt!r} at {alpha}: {found}")
                else:
                    tally.seconds.append(taken)
                    tally.tokens += len(found)
                    tally.streamed += stream


@contextmanager
def crowd(count: int, port: int, answers: dict[Key, list[int]], *, bad: bool) -> Iterator[Tally]:
    """Run `count` clients during the block. Yields what they saw."""
    tally, start, stop = Tally(), time.monotonic(), threading.Event()
    threads = [
        threading.Thread(target=one_client, args=(i, port, stop, answers, tally, bad)) for i in range(count)
    ]
    for thread in threads:
        thread.start()
    try:
        yield tally
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        tally.took = time.monotonic() - start


def show(name: str, tally: Tally) -> dict[str, Any]:
    cuts = statistics.quantiles(tally.seconds, n=100) if len(tally.seconds) > 1 else [0.0] * 99
    row = {
        "part": name,
        "seconds": round(tally.took, 1),
        "answers": len(tally.seconds),
        "streamed": tally.streamed,
        "refused as they should be": tally.refused.total(),
        "busy (429)": tally.busy,
        "cut off": tally.interrupted,
        "wrong": len(tally.wrong),
        "p50 s": round(cuts[49], 3),
        "p90 s": round(cuts[89], 3),
        "p99 s": round(cuts[98], 3),
        "answers/s": round(len(tally.seconds) / tally.took, 1),
        "tokens/s": round(tally.tokens / tally.took, 1),
    }
    print(" · ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    for line in tally.wrong[:5]:
        print(f"  {line}", flush=True)
    return row


def study(folder: Path, seconds: float, clients: int, options: list[str]) -> dict[str, Any]:
    """Run all parts. "problems" of the result lists what went wrong."""
    problems: list[str] = []
    answers = offline(folder, max(LENGTHS))
    different = sum(len({tuple(answers[p, a]) for a in ALPHAS}) > 1 for p in PROMPTS)
    print(
        f"offline answers: {len(answers)}; {different} of {len(PROMPTS)} prompts answered differently",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as probe:
        temporary, log = Path(scratch) / "tmp", Path(scratch) / "server.log"
        temporary.mkdir()
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        server = Server(folder, port, temporary, log, options)
        with crowd(1, port, answers, bad=False) as alone:
            time.sleep(seconds * 0.1)
        with crowd(clients, port, answers, bad=True) as many:
            time.sleep(seconds * 0.5)
        # The clients keep asking while the server is killed; the second one takes the same port.
        with crowd(clients, port, answers, bad=True) as killed:
            time.sleep(seconds * 0.1)
            if server.end(signal.SIGKILL) != -signal.SIGKILL:
                problems.append("the server was not killed")
            problems += [f"process left by the killed server: {each}" for each in server.left()]
            server = Server(folder, port, temporary, log, options)
            time.sleep(seconds * 0.3)
        tallies = {"one client": alone, "crowd": many, "crowd, killed and restarted": killed}
        rows = [show(name, tally) for name, tally in tallies.items()]
        if alone.interrupted or many.interrupted:
            problems.append("connections were lost before the kill")
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        print("".join(f"  {line}\n" for line in metrics.splitlines() if not line.startswith("#")), end="")
        if httpx.get(f"http://127.0.0.1:{port}/health").status_code != 200:
            problems.append("the server is not healthy")
        if (status := server.end(signal.SIGTERM)) != 0:
            problems.append(f"SIGTERM ended the server with status {status}")
        problems += [line for t in tallies.values() for line in t.wrong]
        problems += ["nothing was answered"] if not all(t.seconds for t in tallies.values()) else []
        problems += [f"process left: {each}" for each in server.left()]
        files = list(temporary.iterdir())
        problems += [f"temporary files left: {files}"] if files else []
        with socket.socket() as again:
            if again.connect_ex(("127.0.0.1", port)) == 0:
                problems.append("the port is still in use")
        if "Traceback" in log.read_text():
            problems.append("the server's log has a traceback")
            print(log.read_text()[-3000:])
    return {"rows": rows, "problems": problems, "metrics": metrics}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", action="store_true", help="as `grmoe serve --alone`")
    given = parser.parse_args()
    result = study(given.folder, given.seconds, given.clients, ["--alone"] if given.alone else [])
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1))
    for problem in result["problems"][:20]:
        print(f"problem: {problem}")
    print("no problems" if not result["problems"] else f"{len(result['problems'])} problems")
    sys.exit(bool(result["problems"]))


if __name__ == "__main__":
    main()
