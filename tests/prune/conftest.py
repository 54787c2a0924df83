"""A model of two MoE layers, trained for a second, and text it was not trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from counting import prepare_corpus
from twins import SIZES

from grmoe.config import from_dict
from grmoe.runs.config import TrainConfig
from grmoe.train.loop import train


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prune")


@pytest.fixture(scope="session")
def data(folder: Path) -> Path:
    return prepare_corpus(folder)


@pytest.fixture(scope="session")
def trained(folder: Path, data: Path) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def run(router: str) -> Path:
        if router not in made:
            tree = {
                "out": str(folder / router),
                "steps": 40,
                "device": "cpu",
                "model": {"preset": None, "tie_word_embeddings": True, "router": router, **SIZES},
                "data": {"path": str(data), "batch_size": 8},
                "optim": {"lr": 1e-2},
                "validation": {"every": 0, "tokens": 500},
                "checkpoint": {"every": 0},
            }
            train(from_dict(TrainConfig, tree))
            made[router] = folder / router
        return made[router]

    return run
