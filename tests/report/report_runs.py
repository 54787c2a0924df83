"""Train a run in a second, make its page, and read the page's data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from grmoe.analyze import analyze
from grmoe.cli import app
from grmoe.config import from_dict
from grmoe.report import Content, Plan
from grmoe.report import collect as collect_content
from grmoe.runs.config import TrainConfig
from grmoe.terminal import Progress, silent
from grmoe.train.loop import train

MODEL = {
    "preset": None, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "moe_every": 1, "num_experts": 4, "router_rank": 8, "max_position_embeddings": 32, "tie_word_embeddings": True,
    "alpha": [1.5, 1.0],
}  # fmt: skip


def train_run(out: Path, data: Path, steps: int = 40, **model: object) -> Path:
    tree = {
        "out": str(out),
        "steps": steps,
        "device": "cpu",
        "model": MODEL | model,
        "data": {"path": str(data), "batch_size": 8},
        "optim": {"lr": 1e-2},
        "validation": {"every": steps // 2, "tokens": 500},
        "checkpoint": {"every": 0},
    }
    train(from_dict(TrainConfig, tree))
    return out


def collect(folder: Path, *, tokens: int = 500, progress: Progress = silent, **plan: Any) -> Content:
    """What a page of one model would show."""
    return collect_content(
        folder, "run", Plan(models=[folder], analyse=analyze, tokens=tokens, new_tokens=2, **plan), progress
    )


def report(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["report", *map(str, arguments)])
    return done.exit_code, done.output


def data_of(page: Path) -> Any:
    """The data in a page."""
    text = page.read_text(encoding="utf-8")
    start = text.index('id="data">') + len('id="data">')
    return json.loads(text[start : text.index("</script>", start)])
