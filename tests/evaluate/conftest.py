"""A model trained for a few steps, exported, and task files in the rows of the real ones."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from grmoe.config import from_dict
from grmoe.data import prepare
from grmoe.runs.config import TrainConfig
from grmoe.runs.export import export
from grmoe.train.loop import train

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
MODEL = {
    "preset": None, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_experts": 4, "router_rank": 8, "max_position_embeddings": 64, "tie_word_embeddings": True,
    # Mass selection: the experts per token follow α.
    "selection": "mass", "selection_tau": 0.7,
}  # fmt: skip


def counting(start: int, step: int, count: int) -> str:
    return " ".join(WORDS[(start + step * i) % 10] for i in range(count))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    openers = {".gz": gzip.open, ".xz": lzma.open}
    with openers.get(path.suffix, open)(path, "wb") as file:  # type: ignore[operator]
        file.write(text)
    return path


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twenty steps on sequences of 32 tokens, shorter than its model could take."""
    folder = tmp_path_factory.mktemp("evaluate")
    rows = [
        {"text": counting(i, 1 + 2 * (i % 2), 20 + 7 * i % 90), "domain": ["ones", "threes"][i % 2]}
        for i in range(200)
    ]
    corpus = write_rows(folder / "corpus.jsonl", rows)
    prepare([str(corpus)], folder / "data", tokenizer="bpe:280", validation=0.1, workers=1)
    tree = {
        "out": str(folder / "run"), "steps": 20, "device": "cpu", "model": MODEL,
        "data": {"path": str(folder / "data"), "batch_size": 8, "sequence_length": 32},
        "optim": {"lr": 3e-3}, "validation": {"every": 0, "tokens": 100_000}, "checkpoint": {"every": 0},
    }  # fmt: skip
    train(from_dict(TrainConfig, tree))
    return folder / "run"


@pytest.fixture(scope="session")
def exported(run: Path) -> Path:
    folder = run.parent / "model"
    export(run, folder)
    return folder


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve rows of each task, compressed in each way."""
    folder = tmp_path_factory.mktemp("tasks")
    texts = [counting(i, 1 + i % 4, 8) for i in range(12)]
    endings = [[counting(i + j, 1, 3) for j in range(4)] for i in range(12)]
    write_rows(
        folder / "hellaswag_val.jsonl.xz",
        [
            {"ind": i, "activity_label": "Counting", "ctx_a": f"{t}.", "ctx_b": "then", "ctx": f"{t}. then",
             "endings": endings[i], "source_id": f"s{i}", "split": "val", "split_type": "indomain", "label": str(i % 4)}
            for i, t in enumerate(texts)
        ],
    )  # fmt: skip
    write_rows(
        folder / "arc_easy_test.jsonl.gz",
        [
            {"id": f"q{i}", "question": f"What follows {t}?", "answerKey": "ABCD"[i % 4],
             "choices": {"text": endings[i], "label": ["A", "B", "C", "D"]}}
            for i, t in enumerate(texts)
        ],
    )  # fmt: skip
    write_rows(
        folder / "piqa_val.jsonl",
        [
            {"goal": t, "sol1": endings[i][0], "sol2": endings[i][1], "label": i % 2}
            for i, t in enumerate(texts)
        ],
    )
    write_rows(folder / "lambada_openai_test.jsonl.xz", [{"text": t} for t in texts])
    (folder / "README.md").write_text("not a task")
    return folder
