"""A model of two MoE layers, trained for a second, and text it was not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from counting import prepare_corpus

from grmoe.config import from_dict
from grmoe.dial import calibration
from grmoe.dial.gates import Gates
from grmoe.dial.meter import Meter
from grmoe.dial.search import Sensitivity, search
from grmoe.probe.windows import Text, read_windows
from grmoe.runs.config import TrainConfig
from grmoe.runs.open import LoadedModel, open_model
from grmoe.train.loop import train

MODEL = {
    "preset": None, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "moe_every": 1, "num_experts": 4, "router_rank": 8, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def few_rounds() -> Iterator[None]:
    """Speeds are measured here, but no test is about their precision."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "ROUNDS", 2)
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dial")


@pytest.fixture(scope="session")
def data(folder: Path) -> Path:
    return prepare_corpus(folder)


def train_run(out: Path, data: Path, **model: object) -> Path:
    tree = {
        "out": str(out),
        "steps": 40,
        "device": "cpu",
        "model": MODEL | model,
        "data": {"path": str(data), "batch_size": 8},
        # Slow subspaces: gates stay flat, so that the dial has something to choose from after 40 steps.
        "optim": {"lr": 1e-2, "frames_lr": 0.0085, "kappa_lr": 5e-2},
        # Uneven at one expert per token, so that there is something to even out.
        "routing": {"leading_weight": 0.0},
        "validation": {"every": 0, "tokens": 500},
        "checkpoint": {"every": 0},
    }
    train(from_dict(TrainConfig, tree))
    return out


@pytest.fixture(scope="session")
def run(folder: Path, data: Path) -> Path:
    return train_run(folder / "run", data, router_kappa=1.5)


@pytest.fixture(scope="session")
def softmax_run(folder: Path, data: Path) -> Path:
    return train_run(folder / "softmax", data, router="softmax")


@pytest.fixture(scope="session")
def identity_run(folder: Path, data: Path) -> Path:
    """Three of four choices compute nothing, and τ cuts."""
    return train_run(folder / "identity", data, identity_experts=12, norm_topk_prob=True)


@pytest.fixture
def loaded(run: Path) -> LoadedModel:
    return open_model(run)


@pytest.fixture
def text(loaded: LoadedModel) -> Text:
    return read_windows(None, loaded, 32, 1024)


@pytest.fixture(scope="session")
def searched(run: Path) -> tuple[Meter, list[Sensitivity]]:
    loaded = open_model(run)
    meter = Meter(loaded.model, read_windows(None, loaded, 32, 1024))
    return meter, search(meter, Gates(meter.model, meter.text, 2), 2)
