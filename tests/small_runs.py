"""Prepared text and a configuration small enough to train in a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from counting import prepare_corpus

from grmoe.config import from_dict
from grmoe.runs.config import TrainConfig

MODEL = {
    "preset": None, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_experts": 4, "router_rank": 8, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    return prepare_corpus(folder, validation=0.1)


@pytest.fixture(scope="session")
def make_settings(prepared: Path) -> Callable[[Path], Callable[..., TrainConfig]]:
    def at(folder: Path) -> Callable[..., TrainConfig]:
        def make(name: str = "run", **changes: Any) -> TrainConfig:
            tree: dict[str, Any] = {
                "out": str(folder / name),
                "steps": 20,
                "device": "cpu",
                "model": dict(MODEL),
                "data": {"path": str(prepared), "batch_size": 8},
                "optim": {"lr": 3e-3},
                "validation": {"every": 0, "tokens": 2000},
                "checkpoint": {"every": 0},
            }
            for key, value in changes.items():
                tree[key] = tree.get(key, {}) | value if isinstance(value, dict) else value
            return from_dict(TrainConfig, tree)

        return make

    return at


@pytest.fixture
def settings(
    make_settings: Callable[[Path], Callable[..., TrainConfig]], tmp_path: Path
) -> Callable[..., TrainConfig]:
    """`settings(steps=20, optim={"lr": 1e-3})`: the small configuration with changes, groups merged."""
    return make_settings(tmp_path)
