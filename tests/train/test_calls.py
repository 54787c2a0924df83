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
from grmoe.routing import FULL, Elastic, TopK, build_router, routers, step_key
from grmoe.runs.config import TrainConfig
from grmoe.train import passes as passes_module
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
        watched: tuple[tuple[Any, tuple[str, ...]], ...] = (
            (step_module, ("accumulate", "finish_gradients", "clip_gradients", "sync_routers", "resolve")),
            (passes_module, ("set_alpha", "set_draw")),
            (torch.Tensor, ("backward",)),
        )
        for owner, names in watched:
            for name in names:
                monkeypatch.setattr(owner, name, self.through(name, getattr(owner, name)))
        monkeypatch.setattr(trainer, "run", self.through_pass(trainer), raising=False)
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

    def through_pass(self, trainer: Trainer) -> Any:
        """A forward pass: its sequences, whether routers count it, and its options by name."""
        function = trainer.run

        def call(forward: Any, rows_BS: torch.Tensor, **options: Any) -> Any:
            (counts,) = {not router.counter.paused for router in routers(trainer.model)}
            self.calls.append(("pass", len(rows_BS), "counted" if counts else "uncounted", *options))
            return function(forward, rows_BS, **options)

        return call


def third_process(config: TrainConfig) -> Trainer:
    """The trainer of the last of three processes."""
    trainer = build_trainer(config, ONE)
    trainer.world = World(2, 3, 0, CPU, None)
    return trainer


@pytest.mark.parametrize("clip", [0.0, 0.25])
def test_the_order_of_a_step(settings: Settings, monkeypatch: pytest.MonkeyPatch, clip: float) -> None:
    config = settings(seed=7, data={"micro_batch_size": 2}, optim={"clip": clip})
    trainer = third_process(config)
    batch = next(trainer.data.batches(trainer.rows, trainer.length))
    spies = Spies(trainer, monkeypatch)
    in_flight = train_step(trainer, 3, batch)
    key = step_key(7, 3)
    assert key != FULL
    assert spies.calls == [
        ("seed", (7 * 10**9 + 3) * 10**5),  # the same for all processes
        ("seed", (7 * 10**9 + 3) * 10**5 + 3),  # this process's own: its rank is 2
        # Of the 24 sequences of a step, this process has those from 16 on.
        ("set_draw", key, 16), ("pass", 2, "counted"), ("accumulate", False), ("backward",),
        ("set_draw", key, 18), ("pass", 2, "counted"), ("accumulate", False), ("backward",),
        ("set_draw", key, 20), ("pass", 2, "counted"), ("accumulate", False), ("backward",),
        ("set_draw", key, 22), ("pass", 2, "counted"), ("accumulate", True), ("backward",),
        ("finish_gradients",),
        ("clip_gradients", clip or math.inf),
        ("resolve", 3),  # before anything is updated
        ("AdamW",),
        ("GrassmannAdam",),
        ("zero_grad",),
        ("sync_routers",),
        ("update_priors", pytest.approx(0.05 * 4 / 6)),
    ]  # fmt: skip
    assert all(p.grad is None for p in trainer.model.parameters())
    assert in_flight.arrived is None
    assert in_flight.step == 3
    assert in_flight.batch_BS is batch
    assert all(optimizer.found_inf is None for optimizer in trainer.optimizers)  # type: ignore[attr-defined]


def passes_of(trainer: Trainer, step: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of a step that make its forward and backward passes."""
    batch = next(trainer.data.batches(trainer.rows, trainer.length))
    with monkeypatch.context() as patch:
        spies = Spies(trainer, patch)
        train_step(trainer, step, batch)
    names = ("set_alpha", "set_draw", "pass", "accumulate", "backward")
    return [call for call in spies.calls if call[0] in names]


@pytest.mark.parametrize("elastic", ["off", "token"])
def test_alpha_is_set_only_where_it_has_a_schedule(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, elastic: str
) -> None:
    """Once per step, before its first pass."""
    for schedule, calls in (("constant", []), ("sample", [("set_alpha",)])):
        config = settings(
            alpha={"schedule": schedule}, data={"micro_batch_size": 4}, elastic={"unit": elastic}
        )
        found = passes_of(build_trainer(config, ONE), 0, monkeypatch)
        assert found[: len(calls)] == calls
        assert found.count(("set_alpha",)) == len(calls)


@pytest.mark.parametrize("distill", [0.0, 0.5])  # ignored where budgets are full
def test_without_random_budgets_nothing_is_drawn(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, distill: float
) -> None:
    config = settings(data={"micro_batch_size": 4}, elastic={"unit": "off", "distill": distill})
    assert passes_of(third_process(config), 3, monkeypatch) == [
        ("pass", 4, "counted"), ("accumulate", False), ("backward",),
        ("pass", 4, "counted"), ("accumulate", True), ("backward",),
    ]  # fmt: skip


def test_distillation_computes_the_full_budget_first_and_does_not_count_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both passes of a micro-batch draw for the same sequences. Gradients travel after the last pass only."""
    config = settings(seed=7, data={"micro_batch_size": 4}, elastic={"distill": 0.5, "rule": "count"})
    key = step_key(7, 3)
    assert key != FULL
    full, drawn = ("pass", 4, "uncounted", "return_hidden"), ("pass", 4, "counted", "teacher")
    trainer = third_process(config)
    assert passes_of(trainer, 3, monkeypatch) == [
        ("set_draw", FULL, 16), full, ("accumulate", False), ("backward",),
        ("set_draw", key, 16), drawn, ("accumulate", False), ("backward",),
        ("set_draw", FULL, 20), full, ("accumulate", False), ("backward",),
        ("set_draw", key, 20), drawn, ("accumulate", True), ("backward",),
    ]  # fmt: skip
    assert not any(router.counter.paused for router in routers(trainer.model))


@pytest.mark.parametrize("distill", [0.0, 0.5])
def test_a_full_step_is_drawn_as_full_and_not_distilled(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, distill: float
) -> None:
    """The key is set here too: routers still hold that of the step before."""
    elastic = {"full_share": 0.5, "distill": distill}
    trainer = third_process(settings(seed=7, data={"micro_batch_size": 4}, elastic=elastic))
    keys = [step_key(7, step, 0.5) for step in range(20)]
    drawn, full = next(i for i, key in enumerate(keys) if key != FULL), keys.index(FULL)
    passes_of(trainer, drawn, monkeypatch)
    assert {int(router.budget.key) for router in routers(trainer.model)} == {keys[drawn]}
    assert passes_of(trainer, full, monkeypatch) == [
        ("set_draw", FULL, 16), ("pass", 4, "counted"), ("accumulate", False), ("backward",),
        ("set_draw", FULL, 20), ("pass", 4, "counted"), ("accumulate", True), ("backward",),
    ]  # fmt: skip
    assert {int(router.budget.key) for router in routers(trainer.model)} == {FULL}


def test_seeds_are_those_of_earlier_runs() -> None:
    assert _seed(0, 0) == 0
    assert _seed(3, 4, 5) == 300_000_000_400_005
    assert _seed(20261116, 7, 3) == 6_193_123_928_804_798_051 < 2**63  # without the 64th bit


def test_a_bad_step_on_the_device_and_the_steps_behind_it_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[Any] = []
    monkeypatch.setattr(
        step_module, "find_nonfinite", lambda trainer, *given: searched.append(given) or "somewhere"
    )
    batch = torch.zeros(1)
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
        for loss, norm in ((math.nan, 1.0), (1.0, math.inf)):
            numbers = torch.tensor([loss, 0.0, 0.0, 0.0, norm])
            message = f"loss {loss:g}, gradient norm {norm:g} at step 7: somewhere"
            with pytest.raises(NonFiniteError, match=message) as caught:
                resolve(trainer, InFlightStep(6, batch, numbers, event), newest)
            assert caught.value.step == 6
            assert uncounted == counts
            uncounted.clear()
    assert waited == [True] * 6
    assert [step for step, _ in searched] == [6] * 6  # the bad step itself, not the newest
    assert all(rows is batch for _, rows in searched)


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
    off, plain, distilled = {"unit": "off"}, {"unit": "sequence", "rule": "count"}, {"distill": 1.0}
    cases: list[tuple[Any, int | None, dict[str, Any], str]] = [
        (None, None, off, "reduce-overhead"),
        (None, None, plain, "reduce-overhead"),
        ("mesh", None, plain, "default"),
        (None, 4, plain, "default"),
        (None, None, distilled, "default"),  # two passes per step, as with micro-batches
        (None, None, off | {"distill": 1.0}, "reduce-overhead"),  # nothing to distill
    ]
    models = [build_router("grassmann", 8, 4, rank=2, selection=TopK(2)) for _ in cases]
    zeros = torch.zeros
    monkeypatch.setattr(building, "build_optimizers", lambda model, config: [])
    monkeypatch.setattr(building, "peak_flops", lambda device: 1.0)
    monkeypatch.setattr(
        building, "check_size", lambda config, world, replicate: None
    )  # there is no GPU to ask
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append(options) or "compiled")
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: zeros(*shape))
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    for model, (mesh, micro, elastic, mode) in zip(models, cases, strict=True):
        monkeypatch.setattr(building, "build_model", lambda config, world, bf16, model=model: model)
        compiled.clear()
        world = World(0, 1, 0, torch.device(device), mesh)
        config = settings(seed=11, compile=asked, data={"micro_batch_size": micro}, elastic=elastic)
        trainer = build_trainer(config, world)
        assert trainer.config == config.resolved()
        # Routers know before the first pass how budgets are drawn, and what the prior counts.
        draws = {"off": None, "sequence": Elastic("sequence", "count"), "token": Elastic("token", "mass")}
        assert model.budget.elastic == draws[trainer.config.elastic.unit]
        assert model.budget.balances == ("computed" if trainer.config.elastic.unit == "off" else "candidates")
        expected = device == "cuda" if asked is None else asked
        assert trainer.forward == ("compiled" if expected else model)
        assert compiled == (
            [{"dynamic": False, "mode": mode if device == "cuda" else "default"}] if expected else []
        )
        assert trainer.guards_on_device is (device == "cuda" and mesh is None)
    assert seeded == [11] * len(cases)


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
    resolved = SimpleNamespace(data=SimpleNamespace(path="p"), model_config=lambda *_: 1 / 0)
    config: Any = SimpleNamespace(resolved=lambda: resolved)
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
