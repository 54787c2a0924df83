"""README's path from one text file to a served model: its lines as printed, with less text and fewer steps."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from itertools import product
from pathlib import Path

import httpx
import pytest
from doc_pages import ROOT
from processes import SECONDS, Command
from typer.testing import CliRunner

from grmoe.cli import app

# What makes each command small. `serve` gets a free port.
SMALLER = {
    "prepare": ["--tokenizer", "bpe:300", "--sequence-length", "32"],
    "train": [
        "steps=14", "data.sequence_length=32", "data.batch_size=8", "log.every=4", "model.num_hidden_layers=2",
        "model.hidden_size=32", "model.intermediate_size=64", "model.moe_intermediate_size=32", "model.router_rank=4",
    ],
    "dial": ["--tokens", "256"],
    "report": ["--tokens", "256"],
}  # fmt: skip


def path_lines() -> list[list[str]]:
    """The commands of README's path, without comments."""
    block = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .partition("\n    grmoe prepare")[2]
        .partition("\n\n")[0]
    )
    return [shlex.split(line, comments=True)[1:] for line in f"    grmoe prepare{block}".splitlines()]


def test_the_path_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = " ".join(
        f"{a} {b} {c}." for a, b, c in product(("red", "blue"), ("fox", "dog", "cat"), ("runs", "eats"))
    )
    Path("input.txt").write_text("\n".join(f"{n} {words}" for n in range(180)), encoding="utf-8")
    *commands, serve = path_lines()
    assert [command[0] for command in (*commands, serve)] == ["prepare", "train", "dial", "report", "serve"]
    for command in commands:
        done = CliRunner().invoke(app, [*command, *SMALLER[command[0]]])
        assert done.exit_code == 0, done.output
        assert "Traceback" not in done.output
        # After its first steps, a CPU says how long it will take. On a busy machine that may be minutes.
        forecast = re.search(r" s per step, about [\d:]+ for the 10 steps left", done.output)
        assert (forecast is not None) == (command[0] == "train")
    page = next(Path("runs/first").rglob("*.html")).read_text(encoding="utf-8")
    chosen = json.loads(Path("runs/first/dial/model/config.json").read_text(encoding="utf-8"))
    assert chosen["budget"] is not None
    assert f"The dial found: {chosen['budget']:.2f} experts per token" in page
    said = tmp_path / "said"
    server = Command(said, "serve", str(tmp_path / serve[1]), "--port", "0")
    try:
        server.wait_for("/v1")
        [url] = re.findall(r"http://127\.0\.0\.1:\d+", said.read_text())[:1]
        fewest, most = (chosen["budget_curve"][i]["experts_per_token"] for i in (0, -1))
        computed = []
        for budget in (fewest, most):
            body = {"prompt": "red fox", "max_tokens": 4, "temperature": 0, "budget": budget}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 4
            computed.append(answer.json()["usage"]["experts_per_token"])
        assert computed[0] < computed[1]  # a model trained with the defaults has its dial
        assert server.process.pid is not None
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.wait() == 0
    finally:
        server.kill()
