"""What a step, the set-up and validation call, with what, and in which order."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grmoe.optim import GrassmannAdam
from grmoe.parallel.world import World
from grmoe.runs.config import TrainConfig
from grmoe.train import setup as building
from grmoe.train import step as step_module
from grmoe.train import validate as validate_module
from grmoe.train.objective import forward_loss
from grmoe.train.setup import Trainer, build_optimizers, build_trainer
from grmoe.train.step import InFlightStep, NonFiniteError, _seed, resolve, train_step
from grmoe.train.validate import validate

Settings = Callable[..., TrainConfig]
CPU = torch.device("cpu")
ONE = World(0, 1, 0, CPU, None)


# ------------------------------------------------------------------------------------------------------ the step


class Spies:
    """Notes the calls of a step, and lets them through."""

    def __init__(self, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        for name in (
            "accumulate",
            "finish_gradients",
            "clip_gradients",
            "sync_routers",
            "resolve",
            "set_alpha",
        ):
            monkeypatch.setattr(step_module, name, self.through(name, getattr(step_module, name)))
        monkeypatch.setattr(torch, "manual_seed", self.through("seed", torch.manual_seed))
        for optimizer in trainer.optimizers:
            spy = self.through(type(optimizer).__name__, optimizer.step)
            monkeypatch.setattr(optimizer, "step", spy)
        monkeypatch.setattr(trainer, "zero_grad", self.through("zero_grad", trainer.zero_grad), raising=False)
        spy = self.through("update_priors", trainer.model.update_priors)
        monkeypatch.setattr(trainer.model, "update_priors", spy)

    def through(self, name: str, function: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            plain = [g for g in given if isinstance(g, int | float)]
            self.calls.append((name, *plain, *options.values()))
            return function(*given, **options)

        return call


@pytest.mark.parametrize("clip", [0.0, 0.25])
def test_the_order_of_a_step(settings: Settings, monkeypatch: pytest.MonkeyPatch, clip: float) -> None:
    config = settings(seed=7, data={"micro_batch_size": 2}, optim={"clip": clip})
    trainer = build_trainer(config, ONE)
    trainer.world = World(2, 3, 0, CPU, None)
    batch = next(trainer.data.batches(trainer.rows, trainer.length))
    spies = Spies(trainer, monkeypatch)
    in_flight = train_step(trainer, 3, batch)
    assert spies.calls == [
        ("seed", (7 * 10**9 + 3) * 10**5),  # the same for all processes
        ("seed", (7 * 10**9 + 3) * 10**5 + 3),  # this process's own: its rank is 2
        *(("accumulate", last) for last in (False, False, False, True)),
        ("finish_gradients",),
        ("clip_gradients", clip or math.inf),
        ("resolve", 3),  # before anything is updated
        ("AdamW",),
        ("GrassmannAdam",),
        ("zero_grad",),
        ("sync_routers",),
        ("update_priors", pytest.approx(0.05 * 4 / 6)),
    ]
    assert all(p.grad is None for p in trainer.model.parameters())
    assert in_flight.arrived is None
    assert in_flight.step == 3
    assert in_flight.batch_BS is batch
    assert all(optimizer.found_inf is None for optimizer in trainer.optimizers)  # type: ignore[attr-defined]


def test_alpha_is_set_only_where_it_has_a_schedule(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for schedule, calls in (("constant", 0), ("sample", 1)):
        trainer = build_trainer(settings(alpha={"schedule": schedule}), ONE)
        with monkeypatch.context() as patch:
            spies = Spies(trainer, patch)
            train_step(trainer, 0, next(trainer.data.batches(trainer.rows, trainer.length)))
        assert [c[0] for c in spies.calls].count("set_alpha") == calls


def test_seeds_are_those_of_earlier_runs() -> None:
    assert _seed(0, 0) == 0
    assert _seed(3, 4, 5) == 300_000_000_400_005
    assert _seed(20261116, 7, 3) == 6_193_123_928_804_798_051 < 2**63  # without the 64th bit


def test_a_bad_step_on_the_device_and_the_steps_behind_it_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_module, "find_nonfinite", lambda trainer, batch: "somewhere")
    frames = torch.nn.Parameter(torch.eye(4, 2)[None])
    weights = torch.nn.Parameter(torch.ones(2))
    adam, grassmann = torch.optim.AdamW([weights]), GrassmannAdam([frames])
    uncounted: list[int] = []
    monkeypatch.setattr(grassmann, "uncount_steps", uncounted.append)
    waited: list[bool] = []
    event: Any = SimpleNamespace(synchronize=lambda: waited.append(True))
    for guards, newest, counts in ((True, 6, [1]), (True, 8, [3]), (False, 8, [])):
        trainer: Any = SimpleNamespace(
            guards_on_device=guards, optimizers=[adam, grassmann], zero_grad=lambda: None
        )
        numbers = torch.tensor([math.nan, 0.0, 0.0, 1.0])
        with pytest.raises(NonFiniteError):
            resolve(trainer, InFlightStep(6, torch.zeros(1), numbers, event), newest)
        assert uncounted == counts
        uncounted.clear()
    assert waited == [True] * 3


def test_a_model_is_asked_for_its_loss_alone() -> None:
    given: dict[str, Any] = {}
    rows = torch.arange(12).view(2, 6)
    forward_loss(lambda **options: given.update(options), rows)
    assert torch.equal(given["input_ids"], rows[:, :5])
    assert torch.equal(given["labels"], rows[:, 1:])
    assert given["labels"] is given["shift_labels"]
    assert given["labels"].is_contiguous()
    assert (given["use_cache"], given["skip_logits"]) == (False, True)


# ---------------------------------------------------------------------------------------------------- the set-up


def test_every_parameter_is_trained_once_with_the_options_given(settings: Settings) -> None:
    config = settings(optim={"betas": [0.7, 0.8], "eps": 1e-5, "lr": 1e-3})
    model = build_trainer(config, ONE).model
    adam, frames = build_optimizers(model, config.optim)
    assert isinstance(frames, GrassmannAdam)
    trained = [id(p) for optimizer in (adam, frames) for g in optimizer.param_groups for p in g["params"]]
    assert sorted(trained) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert (adam.defaults["betas"], adam.defaults["eps"]) == ((0.7, 0.8), 1e-5)
    assert adam.defaults["fused"] is False
    assert [g["peak_lr"] for g in adam.param_groups] == [g["lr"] for g in adam.param_groups]
    (without,) = build_optimizers(torch.nn.Linear(2, 2), config.optim)
    assert len(without.param_groups) == 2


def test_autocast_is_for_one_process_in_bf16(settings: Settings) -> None:
    mesh: Any = "mesh"
    for precision, world, dtype in (
        ("bf16", ONE, torch.bfloat16),
        ("fp32", ONE, None),
        ("bf16", World(0, 2, 0, CPU, mesh), None),  # shards are cast when they are gathered
    ):
        own: Any = SimpleNamespace(config=SimpleNamespace(precision=precision), world=world)
        with Trainer.autocast(own):
            assert torch.is_autocast_enabled("cpu") is (dtype is not None)
            assert dtype is None or torch.get_autocast_dtype("cpu") == dtype


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_when_a_model_is_compiled_and_how(
    device: str, asked: bool | None, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[dict[str, Any]] = []
    seeded: list[int] = []
    model = SimpleNamespace(train=lambda: model)
    zeros = torch.zeros
    monkeypatch.setattr(building, "build_model", lambda config, world, bf16: model)
    monkeypatch.setattr(building, "build_optimizers", lambda model, config: [])
    monkeypatch.setattr(building, "peak_flops", lambda device: 1.0)
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append(options) or "compiled")
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: zeros(*shape))
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    for mesh, micro, mode in (
        (None, None, "reduce-overhead"), ("mesh", None, "default"), (None, 4, "default"),
    ):  # fmt: skip
        compiled.clear()
        world = World(0, 1, 0, torch.device(device), mesh)  # type: ignore[arg-type]
        trainer = build_trainer(settings(seed=11, compile=asked, data={"micro_batch_size": micro}), world)
        expected = device == "cuda" if asked is None else asked
        assert trainer.forward == ("compiled" if expected else model)
        assert compiled == (
            [{"dynamic": False, "mode": mode if device == "cuda" else "default"}] if expected else []
        )
        assert trainer.guards_on_device is (device == "cuda" and mesh is None)
    assert seeded == [11] * 3


def test_text_that_is_too_short_is_said_before_the_model_is_built(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object, **__: object) -> None:
        raise AssertionError("the model was built")

    monkeypatch.setattr(building, "build_model", build)
    with pytest.raises(ValueError, match="batch"):
        build_trainer(settings(data={"batch_size": 10**6}), ONE)


def test_two_tokens_are_the_least_validation_text(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = SimpleNamespace(data=SimpleNamespace(path="p"), model_config=lambda *_: 1 / 0)
    for tokens, error in ((1, ValueError), (2, ZeroDivisionError)):
        data = SimpleNamespace(tokens=tokens, vocab_size=9, end_of_text=0)
        monkeypatch.setattr(building, "TokenDataset", lambda path, split, data=data: data)
        with pytest.raises(error):
            build_trainer(config, ONE)


# ---------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_process_counts_its_own_batches_alone(
    rank: int, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes, four batches of one window in each of two domains: the first process has two of each."""
    synced: list[int] = []
    trainer = build_trainer(settings(validation={"tokens": 4 * 32, "batch_size": 1}), ONE)
    trainer.world = World(rank, 3, 0, CPU, None)
    monkeypatch.setattr(
        validate_module, "sync_metrics", lambda model, world: synced.append(model.routing_metrics()[0].tokens)
    )
    own = 2 if rank == 0 else 1
    found = validate(trainer)
    assert synced == [2 * own * 32]
    assert found.routing[0].tokens == 2 * own * 32
    losses = []
    for domain in ("ones", "threes"):
        windows = list(trainer.validation.windows(32, 1, domain))[:4]
        with torch.no_grad():
            each = [float(trainer.run(trainer.model.eval(), rows).loss) for rows in windows[rank::3]]
        assert found.domains[domain] == pytest.approx(sum(each) / own, rel=1e-6)
        losses += each
    assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
