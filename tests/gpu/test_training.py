"""Training on a GPU: bf16, compiled into CUDA graphs, the loss read one step later."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch

from grmoe.config import from_dict
from grmoe.data import prepare
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import read_log
from grmoe.runs.open import open_model
from grmoe.train import loop, step
from grmoe.train.loop import TrainingStopped, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    texts = [" ".join(words[(draw.randrange(10) + i) % 10] for i in range(200)) for _ in range(300)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([str(folder / "corpus.jsonl")], folder / "data", tokenizer="bpe:280", validation=0.1, workers=1)
    return folder / "data"


def settings(prepared: Path, out: Path, **changes: object) -> TrainConfig:
    model = {
        "preset": None, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_experts": 4,
        "router_rank": 32, "max_position_embeddings": 64,
    }  # fmt: skip
    tree = {
        "out": str(out), "steps": 40, "model": model, "data": {"path": str(prepared), "batch_size": 16},
        "optim": {"lr": 3e-3}, "validation": {"every": 0, "tokens": 4000}, "checkpoint": {"every": 0},
        "log": {"every": 40},
    }  # fmt: skip
    return from_dict(TrainConfig, tree | changes)


def test_compiled_and_eager_learn_the_same(prepared: Path, tmp_path: Path) -> None:
    """bf16 in another order of roundings; forty steps keep the losses within a few percent."""
    losses = []
    for name, compiled in (("graphs", None), ("eager", False)):
        config = settings(prepared, tmp_path / name, compile=compiled)
        train(config)
        losses.append([line["loss"] for line in read_log(tmp_path / name)])
    assert losses[0][-1] < 0.8 * math.log(280)
    assert losses[0] == pytest.approx(losses[1], rel=0.03)


def test_a_nan_found_late_leaves_the_last_good_step(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(prepared, tmp_path / "run", compile=False)
    good: dict[str, torch.Tensor] = {}

    def train_step(trainer: step.Trainer, number: int, batch: torch.Tensor) -> step.InFlightStep:
        hook = None
        if number == 6:
            good.update({name: t.detach().clone().cpu() for name, t in trainer.model.state_dict().items()})
            attention = trainer.model.model.layers[1].self_attn
            hook = attention.register_forward_hook(lambda m, i, o: (o[0] * math.nan, *o[1:]))
        pending = step.train_step(trainer, number, batch)
        if hook is not None:
            hook.remove()
        return pending

    monkeypatch.setattr(loop, "train_step", train_step)
    with pytest.raises(TrainingStopped, match="at step 7"):
        train(config)
    saved = open_model(tmp_path / "run", "last", device="cpu")
    assert saved.step == 6
    assert all(torch.equal(good[name], t) for name, t in saved.model.state_dict().items())
