"""α as a parameter: it trains like κ, and ends as the model's own α."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grmoe.model import GrmoeForCausalLM, preset
from grmoe.parallel.world import World
from grmoe.routing import GrassmannRouter, Router, SoftmaxRouter, SoftMoERouter, TopK, VMFRouter, routers
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import read_log
from grmoe.runs.open import open_model
from grmoe.train.loop import train
from grmoe.train.setup import build_trainer

Settings = Callable[..., TrainConfig]
MAKE: dict[str, Callable[..., Router]] = {
    "grassmann": lambda **o: GrassmannRouter(8, 4, 2, kappa=2.0, **o),
    "diagonal": lambda **o: GrassmannRouter(8, 4, 2, concentration="diagonal", **o),
    "softmax": lambda **o: SoftmaxRouter(8, 4, **o),
    "vmf": lambda **o: VMFRouter(8, 4, **o),
}


def make(name: str, alpha: float) -> Router:
    torch.manual_seed(0)
    router = MAKE[name](alpha=alpha, selection=TopK(2)).double()
    router.log_prior.copy_(torch.randn(4))
    return router


@pytest.mark.parametrize("name", MAKE)
def test_a_learned_alpha_is_the_dial_with_a_gradient(name: str) -> None:
    x = torch.randn(5, 8, dtype=torch.float64)
    fixed, learned = make(name, 1.7), make(name, 1.7)
    learned.learn_alpha()
    assert learned.alpha == pytest.approx(1.7)
    torch.testing.assert_close(learned(x).weights, fixed(x).weights)
    loss = lambda router: (router(x).weights ** 2).sum()  # noqa: E731
    assert learned.log_alpha is not None
    (slope,) = torch.autograd.grad(loss(learned), learned.log_alpha)
    around = [float(loss(make(name, 1.7 * (1 + d))).detach()) for d in (-1e-5, 1e-5)]
    assert float(slope) == pytest.approx((around[1] - around[0]) / 2e-5, rel=1e-3)
    learned.keep_alpha()
    assert learned.alpha == pytest.approx(1.7)
    assert learned.log_alpha is None
    torch.testing.assert_close(learned(x).weights, fixed(x).weights)


@pytest.mark.parametrize("name", ["grassmann", "diagonal", "softmax"])
def test_the_kernels_operands_carry_it(name: str) -> None:
    x = torch.randn(5, 8, dtype=torch.float64)
    router = make(name, 1.7)
    router.learn_alpha()
    operands = router._scaled_operands()
    assert operands is not None
    if operands.log_kappa is None:
        scores = x @ operands.matrix.T
    else:
        squares = torch.einsum("td,ndk->tnk", x, operands.matrix).square() / x.square().sum(-1)[:, None, None]
        kappa = operands.log_kappa.exp()
        scores = operands.energy_scale * (squares * (kappa if kappa.ndim == 2 else kappa[:, None])).sum(-1)
    torch.testing.assert_close(scores + operands.prior_N, router(x).logits)


def test_learning_again_starts_at_the_present_alpha() -> None:
    router = GrassmannRouter(8, 4, 2, alpha=3.0)
    router.learn_alpha()
    router.learn_alpha()
    assert router.alpha == pytest.approx(3.0)


def test_gates_without_such_an_alpha_are_refused() -> None:
    wrong: list[tuple[Router, str]] = [
        (SoftMoERouter(8, 4), "must multiply all of a gate; that of this SoftMoERouter does not"),
        (GrassmannRouter(8, 4, 2, dial="likelihood"), "must multiply all of a gate"),
        (GrassmannRouter(8, 4, 2, alpha=0.0), "must start above zero, got 0.0"),
    ]
    for router, message in wrong:
        with pytest.raises(ValueError, match=message):
            router.learn_alpha()
    apart = GrassmannRouter(8, 4, 2)
    apart.budget.set_weight_alpha(1.0)
    with pytest.raises(ValueError, match="weight_alpha must be None"):
        apart.learn_alpha()


def test_it_trains_like_kappa_and_is_saved_as_the_models_own(settings: Settings) -> None:
    options: dict[str, Any] = {
        "model": {"num_hidden_layers": 4, "alpha": [0.8, 1.5]},
        "optim": {"lr": 0.02, "kappa_lr": 0.1},
    }
    config = settings(steps=30, alpha={"schedule": "learned"}, **options)
    trainer = build_trainer(config, World(0, 1, 0, torch.device("cpu"), None))
    own = {r.log_alpha for r in routers(trainer.model)}
    (group,) = [g for g in trainer.optimizers[0].param_groups if g["kind"] == "kappa"]
    assert own <= set(group["params"])
    assert trainer.model.alpha == pytest.approx([0.8, 1.5])
    train(config)
    model = open_model(config.out).model
    assert all(abs(now - start) > 0.01 for now, start in zip(model.alpha, (0.8, 1.5), strict=True))
    assert model.config.alphas == pytest.approx(model.alpha)
    assert not any("log_alpha" in name for name in model.state_dict())
    logged = [line for line in read_log(Path(config.out)) if line["kind"] == "train"][-1]
    assert logged["alpha"] == pytest.approx(model.alpha)


def test_a_model_that_still_learns_it_is_saved_as_it_is(tmp_path: Path) -> None:
    """With its own α, which ends a budget. Saving changes nothing that the model computes, and loading says nothing."""
    curve = [
        {"experts_per_token": 1.0, "weight": 0.51, "alpha": 1.2, "cap": 2},
        {"experts_per_token": 2.0, "weight": 1e-6, "alpha": 1.2, "cap": 2},
    ]
    torch.manual_seed(0)
    model = GrmoeForCausalLM(preset("tiny", vocab_size=64, budget_curve=curve)).eval()
    model.set_budget(2.0)
    for router in routers(model):
        router.learn_alpha()
        assert router.log_alpha is not None
        router.log_alpha.data += 0.5
    now, ids = model.alpha, torch.arange(9)[None]
    expected = model(ids).logits
    for _ in range(2):
        model.save_pretrained(tmp_path)
        assert model.alpha == pytest.approx(now)
        assert model.budget is None
        torch.testing.assert_close(model(ids).logits, expected)
    loaded, report = GrmoeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report["unexpected_keys"])
    assert loaded.alpha == pytest.approx(now)
    torch.testing.assert_close(loaded(ids).logits, expected)
