"""The small parts of training, each on its own: log, clock, seeds, batches, schedules, the search for NaN."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from grmoe.data import prepare
from grmoe.optim import ProjectedAdam, QRAdam
from grmoe.parallel.world import World
from grmoe.runs.config import TrainConfig
from grmoe.train import interrupt, log, nonfinite
from grmoe.train.interrupt import Clock, Signals
from grmoe.train.nonfinite import find_nonfinite
from grmoe.train.objective import loss_parts, model_loss, overlap_term
from grmoe.train.passes import forward_passes
from grmoe.train.schedule import alphas_at, prior_rate, rate_factors
from grmoe.train.setup import Trainer, _divide_batch, build_optimizers, build_trainer, uses_bf16
from grmoe.train.step import InFlightStep, NonFiniteError, _seed, resolve
from grmoe.train.validate import Validation, _batches, _own_share

Settings = Callable[..., TrainConfig]
ONE = World(0, 1, 0, torch.device("cpu"), None)


# ------------------------------------------------------------------------------------------------------ the log


def test_tensorboard_forgets_what_a_resumed_run_repeats(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[tuple[str, int]] = []
    told: list[tuple[str, float, int]] = []
    closed: list[bool] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            opened.append((folder, purge_step))

        def add_scalar(self, *given: Any) -> None:
            told.append(given)

        def close(self) -> None:
            closed.append(True)

    stub = ModuleType("torch.utils.tensorboard")
    vars(stub)["SummaryWriter"] = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    sink = log.TensorBoard(tmp_path, 40)
    sink.write({"kind": "train", "step": 41, "loss": 2.0, "layers": [{"entropy": 0.5}]})
    assert opened == [(str(tmp_path), 41)]  # the step that comes next
    assert told == [("train/loss", 2.0, 41), ("train/layers/0/entropy", 0.5, 41)]
    assert closed == []
    sink.close()
    assert closed == [True]


def test_loggers_are_opened_as_asked(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("tensorboard", "wandb"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    made: list[Any] = []
    monkeypatch.setattr(
        log, "TensorBoard", lambda folder, first: made.append((folder.name, first)) or "board"
    )
    monkeypatch.setattr(log, "WandB", lambda config: made.append(config.log.wandb) or "wandb")
    monkeypatch.setattr(log, "Screen", lambda steps, first, begins: (steps, first, begins))
    monkeypatch.setattr(log, "describe_start", lambda trainer, first: f"from {first}")
    for asked, kinds in (({}, []), ({"tensorboard": True}, ["board"]), ({"wandb": "p"}, ["wandb"])):
        config = settings(log=asked)
        Path(config.out).mkdir(exist_ok=True)
        logger = log.open_logger(SimpleNamespace(config=config), 7)  # type: ignore[arg-type]
        lines, screen, *others = logger.sinks
        assert isinstance(lines, log.JsonLines)
        assert screen == (20, 7, "from 7")
        assert others == kinds
        lines.close()
    assert made == [("tensorboard", 7), "p"]


def test_json_lines_are_appended_flushed_and_closed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 0}\n')
    sink = log.JsonLines(path)
    sink.write({"step": 1})
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'  # before it is closed
    logger = log.Logger([sink, sink])
    logger.write({"step": 2})
    assert path.read_text().count('{"step": 2}\n') == 2
    logger.close()
    assert sink.file.closed
    if Path("/dev/full").exists():
        full = log.JsonLines(Path("/dev/full"))
        with pytest.raises(OSError, match="cannot write /dev/full: No space left"):
            full.write({"step": 1})
        full.close()


# ---------------------------------------------------------------------------------------------------- the clock


def test_the_clock_leaves_out_pauses_and_a_lap_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(interrupt.time, "perf_counter", lambda: now[0])
    clock = Clock()
    clock.count(300)
    now[0] += 2
    with clock.paused():
        now[0] += 10
    clock.count(100)
    with clock.paused():
        now[0] += 5
    now[0] += 2
    assert clock.rate() == pytest.approx(400 / 4)
    clock.lap()
    clock.count(50)
    now[0] += 5
    assert clock.rate() == pytest.approx(10.0)
    clock.lap()
    clock.count(1)
    assert clock.rate() == pytest.approx(1e9)  # no time has passed: no division by zero


def test_the_first_signal_is_noted_and_the_second_interrupts() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Signals() as signals:
        assert signals.caught is None
        assert signals.describe() == ("SIGTERM", 128 + 15)  # another process caught it
        signal.raise_signal(signal.SIGINT)
        assert signals.caught == signal.SIGINT
        assert signals.describe() == ("SIGINT", 130)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    with ThreadPoolExecutor() as pool, Signals() as outer:  # signals reach the main thread alone
        inner = pool.submit(Signals().__enter__).result()
        assert inner.before == {}
        assert set(outer.before) == {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}


# ------------------------------------------------------------------------------------------------ seeds and steps


def test_each_seed_step_and_stream_has_its_own_number() -> None:
    seeds, steps, streams = (0, 1, 2), (0, 1, 2, 10**9 - 2, 10**9 - 1), (0, 1, 2, 10**5 - 2, 10**5 - 1)
    found = [_seed(a, b, c) for a in seeds for b in steps for c in streams]
    assert found == sorted(set(found))  # in the order of (seed, step, stream), so that no two ranges meet
    assert _seed(3, 4) == _seed(3, 4, 0)
    for number in (*found, _seed(2**62, 10**9 - 1, 10**5 - 1)):
        assert 0 <= number < 2**63
        torch.Generator().manual_seed(number)


def test_an_error_keeps_its_message_and_its_step(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    error = NonFiniteError("loss nan", 6)
    assert (str(error), error.step) == ("loss nan", 6)
    import grmoe.train.step as step_module

    monkeypatch.setattr(step_module, "find_nonfinite", lambda trainer, step, batch: "somewhere")
    cleared: list[bool] = []
    trainer: Any = SimpleNamespace(guards_on_device=False, zero_grad=lambda: cleared.append(True))

    def numbers(loss: float, norm: float) -> InFlightStep:
        return InFlightStep(6, torch.zeros(1), torch.tensor([loss, 0.5, 0.125, 0.25, norm]), None)

    good = resolve(trainer, numbers(2.0, 3.0), 6)
    assert tuple(vars(good).values()) == (2.0, 0.5, 0.125, 0.25, 3.0)
    assert (good.router_loss, good.divergence, good.overlap) == (0.5, 0.125, 0.25)
    assert cleared == []
    for loss, norm in ((math.nan, 1.0), (1.0, math.inf)):
        with pytest.raises(
            NonFiniteError, match=f"loss {loss:g}, gradient norm {norm:g} at step 7: somewhere"
        ):
            resolve(trainer, numbers(loss, norm), 6)
    assert cleared == [True, True]


def test_micro_batches_add_up() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    whole, logged = torch.zeros(()), torch.zeros(3)
    for number in range(4):
        output = SimpleNamespace(
            loss=weight * (number + 1),
            cross_entropy=torch.tensor(1.0),
            router_loss=torch.tensor(2.0),
            divergence=None,
        )
        whole, logged = (
            whole + model_loss(output.loss, output, 0.0) / 4,
            logged + torch.stack(loss_parts(output, 4)),
        )
    assert whole.item() == pytest.approx(2.0 * (1 + 2 + 3 + 4) / 4)
    assert logged.tolist() == pytest.approx([1.0, 2.0, 0.0])
    compared = SimpleNamespace(**{**vars(output), "divergence": 0.5 * weight})
    assert model_loss(compared.loss, compared, 0.3).item() == pytest.approx(8.0 / 2 + 0.3 * 1.0)
    assert [p.item() for p in loss_parts(compared, 2)] == [0.5, 1.0, 0.5]
    assert not loss_parts(compared, 2).divergence.requires_grad
    off: Any = SimpleNamespace(overlap_weight=0.0)
    model: Any = SimpleNamespace(device=torch.device("cpu"))
    assert overlap_term(model, off).item() == 0.0


# ---------------------------------------------------------------------------------------------------- the set-up


def test_activation_checkpointing_is_on_where_it_is_asked_for(settings: Settings) -> None:
    for asked in (False, True):
        trainer = build_trainer(settings(activation_checkpointing=asked), ONE)
        assert trainer.model.is_gradient_checkpointing is asked
        assert trainer.model.training
        assert trainer.forward is trainer.model
        assert not trainer.guards_on_device
        assert trainer.found_inf.item() == 0.0
        assert (trainer.rows, trainer.micro_rows, trainer.length, trainer.tokens_per_step) == (8, 8, 32, 256)


def test_data_without_validation_text_is_refused(settings: Settings, prepared: Path, tmp_path: Path) -> None:
    corpus = prepared.parent / "corpus.jsonl"
    prepare([str(corpus)], tmp_path / "data", tokenizer="bpe:280", validation=0.0, workers=1)
    with pytest.raises(ValueError, match=r"data\.path must hold validation text, got .*--validation 1%"):
        build_trainer(settings(data={"path": str(tmp_path / "data")}), ONE)
    with pytest.raises(ValueError, match=r"data\.sequence_length must be at most the model's 32, got 33"):
        build_trainer(settings(data={"sequence_length": 33}), ONE)


def test_a_batch_is_divided_among_processes_and_micro_batches(settings: Settings) -> None:
    def divide(micro: int | None, size: int = 1, total: int = 12) -> tuple[int, int]:
        config = settings(data={"batch_size": total, "micro_batch_size": micro})
        return _divide_batch(config, World(0, size, 0, torch.device("cpu"), None))

    assert divide(None) == (12, 12)
    assert divide(4) == (12, 4)
    assert divide(None, size=3) == (4, 4)
    assert divide(2, size=3) == (4, 2)
    assert divide(100, size=3) == (4, 4)  # never more than there are
    with pytest.raises(ValueError, match=r"data\.batch_size must be a multiple of the 5 processes, got 12"):
        divide(None, size=5)
    with pytest.raises(
        ValueError, match=r"data\.micro_batch_size must divide a process's 12 sequences, got 5"
    ):
        divide(5)


def test_precision_follows_the_device_unless_it_is_given() -> None:
    cuda = World(0, 1, 0, torch.device("cuda"), None)
    for precision, on_cpu, on_gpu in (("auto", False, True), ("bf16", True, True), ("fp32", False, False)):
        config: Any = SimpleNamespace(precision=precision)
        assert (uses_bf16(config, ONE), uses_bf16(config, cuda)) == (on_cpu, on_gpu)


def test_parameters_have_the_rates_and_the_decay_of_their_kind(settings: Settings) -> None:
    config = settings(optim={"lr": 1e-3, "weight_decay": 0.1})
    model = build_trainer(config, ONE).model
    adam, frames = build_optimizers(model, config.optim)
    groups = {(g["kind"], g["weight_decay"]): g for g in adam.param_groups}
    assert set(groups) == {("weights", 0.1), ("weights", 0.0), ("kappa", 0.0)}
    assert all(p.ndim > 1 for p in groups["weights", 0.1]["params"])
    assert all(p.ndim <= 1 for p in groups["weights", 0.0]["params"])
    assert [g["lr"] for g in groups.values()] == pytest.approx([1e-3, 1e-3, 1e-3])
    assert frames.param_groups[0]["lr"] == pytest.approx(1e-3 * math.sqrt(32 * 8))  # width 32, rank 8
    assert frames.param_groups[0]["kind"] == "frames"
    given = settings(optim={"lr": 1e-3, "kappa_lr": 0.0, "frames_lr": 0.25})
    adam, frames = build_optimizers(model, given.optim)
    assert {g["lr"] for g in adam.param_groups if g["kind"] == "kappa"} == {0.0}
    assert frames.param_groups[0]["lr"] == 0.25
    for method, kind in (("projected", ProjectedAdam), ("qr", QRAdam)):
        other = settings(optim={"lr": 1e-3, "frames_method": method})
        _, frames = build_optimizers(model, other.optim)
        assert isinstance(frames, kind)
        assert frames.param_groups[0]["lr"] == 1e-3


# ----------------------------------------------------------------------------------------------------- schedules


def test_alpha_over_the_steps(settings: Settings) -> None:
    anneal = settings(steps=11, alpha={"schedule": "anneal", "low": 0.25})
    assert alphas_at(anneal, [4.0, 1.0], 0) == pytest.approx([0.25, 0.25])
    assert alphas_at(anneal, [4.0, 1.0], 5) == pytest.approx([1.0, 0.5])
    assert alphas_at(anneal, [4.0, 1.0], 10) == pytest.approx([4.0, 1.0])
    assert alphas_at(settings(steps=1, alpha={"schedule": "anneal"}), [4.0], 0) == pytest.approx([0.5])
    short = settings(steps=2, alpha={"schedule": "anneal", "low": 0.25})
    assert [alphas_at(short, [4.0], step) for step in (0, 1)] == [[0.25], [4.0]]
    sample = settings(alpha={"schedule": "sample", "low": 0.5, "high": 8.0})
    drawn = [alphas_at(sample, [1.0, 1.0], step) for step in range(2000)]
    assert all(a == b and 0.5 <= a <= 8.0 for a, b in drawn)  # the same for every layer
    logs = torch.tensor([math.log(a) for a, _ in drawn])
    # Uniform between log ½ and log 8: mean log 2, deviation log 16 / √12.
    assert float(logs.mean()) == pytest.approx(math.log(2), abs=0.08)
    assert float(logs.std()) == pytest.approx(math.log(16) / math.sqrt(12), rel=0.05)
    assert drawn == [alphas_at(sample, [1.0, 1.0], step) for step in range(2000)]
    other = settings(seed=1, alpha={"schedule": "sample", "low": 0.5, "high": 8.0})
    assert alphas_at(other, [1.0], 0) != drawn[0][:1]
    assert alphas_at(settings(), [3.0, 2.0], 7) == [3.0, 2.0]


def test_the_prior_follows_the_weights(settings: Settings) -> None:
    config = settings(
        steps=20, optim={"warmup": 4, "frames_warmup": 0, "kappa_warmup": 9}, routing={"prior_rate": 0.2}
    )
    assert prior_rate(config, 1) == pytest.approx(0.2 * 2 / 4)
    assert prior_rate(config, 12) == 0.2 * rate_factors(config, 12)["weights"]


# ---------------------------------------------------------------------------------------------------- validation


def test_batches_of_a_domain_go_round_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    import grmoe.train.validate as module

    monkeypatch.setattr(module, "_batches", lambda trainer, domain: iter(range(5)))

    def share(rank: int, size: int) -> list[tuple[int, bool]]:
        trainer: Any = SimpleNamespace(world=World(rank, size, 0, torch.device("cpu"), None))
        found: Any = list(_own_share(trainer, "d"))
        return list(found)

    assert share(0, 1) == [(i, True) for i in range(5)]
    assert share(0, 3) == [(0, True), (3, True)]
    assert share(1, 3) == [(1, True), (4, True)]
    assert share(2, 3) == [(2, True), (4, False)]  # repeats another's, uncounted


def test_at_least_one_window_and_no_more_than_asked() -> None:
    def windows(length: int, batch: int, domain: str) -> Iterator[torch.Tensor]:
        for i in range(0, 10, batch):
            yield torch.arange(i, min(i + batch, 10))[:, None].expand(-1, length + 1)

    def rows(tokens: int, batch_size: int | None) -> list[list[int]]:
        config = SimpleNamespace(validation=SimpleNamespace(tokens=tokens, batch_size=batch_size))
        data = SimpleNamespace(windows=windows)
        trainer: Any = SimpleNamespace(config=config, length=8, micro_rows=3, validation=data)
        return [batch[:, 0].tolist() for batch in _batches(trainer, "d")]

    assert rows(5, 4) == [[0]]
    assert rows(8 * 5 + 7, 4) == [[0, 1, 2, 3], [4]]
    assert rows(8 * 6, None) == [[0, 1, 2], [3, 4, 5]]
    assert rows(10**6, 6) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]


def test_a_huge_loss_has_a_finite_perplexity() -> None:
    assert Validation(2.0, {}, []).perplexity == math.exp(2)
    assert 1e300 < Validation(1e6, {}, []).perplexity < math.inf


# ------------------------------------------------------------------------------------------- the search for NaN


def test_where_nan_first_appears(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Trainer = build_trainer(settings(data={"micro_batch_size": 4}), ONE)
    batch = torch.randint(0, 200, (8, 33), generator=torch.Generator().manual_seed(0))
    model = trainer.model
    assert find_nonfinite(trainer, 0, batch) is None

    def with_hook(module: Any, change: Callable[[Any], Any]) -> str | None:
        hook = module.register_forward_hook(lambda m, i, o: change(o))
        found = find_nonfinite(trainer, 0, batch)
        hook.remove()
        return found

    # The first of two in the order of the forward pass, which is not the order of the names.
    late = model.model.norm.register_forward_hook(lambda m, i, o: o * math.inf)
    assert with_hook(model.model.embed_tokens, lambda o: o * math.nan) == (
        "the output of model.embed_tokens holds NaN or Inf"
    )
    assert find_nonfinite(trainer, 0, batch) == "the output of model.norm holds NaN or Inf"
    late.remove()
    # A layer that is bad for the second micro-batch alone.
    calls: list[int] = []

    def second_only(output: Any) -> Any:
        calls.append(1)
        return (output[0] * (math.nan if len(calls) > 1 else 1.0), *output[1:])

    assert with_hook(model.model.layers[1].self_attn, second_only) == (
        "the output of model.layers.1.self_attn holds NaN or Inf"
    )
    assert len(calls) == 2
    assert not any(module._forward_hooks for module in model.modules())
    # The loss alone, and the norm of finite gradients alone.
    monkeypatch.setattr(
        nonfinite,
        "forward_passes",
        lambda *a: ((loss * math.inf, *rest) for loss, *rest in forward_passes(*a)),
    )
    assert find_nonfinite(trainer, 0, batch) == "every layer is finite: the loss overflowed"
    monkeypatch.undo()
    large = model.model.norm.weight.register_hook(lambda g: torch.full_like(g, 1e30))
    assert find_nonfinite(trainer, 0, batch) == "every gradient is finite: their norm overflowed"
    large.remove()
    # Gradients: from the loss backwards, so the last parameter that is bad.
    names = dict(model.named_parameters())
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        names[name].register_hook(lambda g: g * math.nan)
    said = "the forward pass is finite, the gradient of model.layers.1.self_attn.q_proj.weight is not"
    assert find_nonfinite(trainer, 0, batch) == said
    with torch.no_grad():
        names["model.norm.weight"][0] = math.inf
    assert find_nonfinite(trainer, 0, batch) == "the weights model.norm.weight hold NaN or Inf"
