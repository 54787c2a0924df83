"""The loop: learns, resumes to the bit, stops when told and when it must."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grmoe.data import TokenDataset, unigram_perplexity
from grmoe.geometry import orthonormality_error
from grmoe.model import GrmoeForCausalLM
from grmoe.parallel.world import ParallelConfig, start
from grmoe.routing import routers
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import checkpoints_of, open_folder, read_log
from grmoe.runs.open import open_model
from grmoe.runs.state import gather
from grmoe.train import loop, step
from grmoe.train.curves import summary
from grmoe.train.interrupt import Signals
from grmoe.train.loop import TrainingStopped, train
from grmoe.train.setup import Trainer, build_trainer
from grmoe.train.step import NonFiniteError

Settings = Callable[..., TrainConfig]


def weights(config: TrainConfig, which: str = "last") -> dict[str, Tensor]:
    return open_model(Path(config.out), which).model.state_dict()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def losses(config: TrainConfig) -> dict[int, float]:
    return {t["step"]: t["loss"] for t in read_log(Path(config.out)) if t["kind"] == "train"}


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[GrmoeForCausalLM], None]) -> None:
    """Do something to the model before a step."""
    at_step_of_trainer(monkeypatch, number, lambda trainer: action(trainer.model))


def at_step_of_trainer(
    monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[Trainer], None]
) -> None:
    """Do something to the trainer before a step."""

    def train_step(trainer: Trainer, step_number: int, batch: Tensor) -> Any:
        if step_number == number:
            action(trainer)
        return step.train_step(trainer, step_number, batch)

    monkeypatch.setattr(loop, "train_step", train_step)


def test_learns_more_than_word_counts(settings: Settings, prepared: Path) -> None:
    config = settings(steps=120, optim={"lr": 1e-2}, validation={"every": 60})
    outcome = train(config)
    assert outcome.validation is not None
    assert outcome.validation.perplexity < 0.4 * unigram_perplexity(TokenDataset(prepared, "validation"))
    lines = read_log(Path(config.out))
    held_out = [v for v in lines if v["kind"] == "validation"]
    assert [v["step"] for v in held_out] == [60, 120]
    assert held_out[1]["loss"] < held_out[0]["loss"]
    assert set(held_out[1]["domains"]) == {"ones", "threes"}
    last = [t for t in lines if t["kind"] == "train"][-1]
    assert 1.2 < last["experts_per_token"] < 1.9  # random budgets
    assert held_out[1]["experts_per_token"] == 2  # the full one
    assert last["tokens"] == 120 * 8 * 32
    model = open_model(Path(config.out)).model
    for router in routers(model):
        assert float(orthonormality_error(router.frames.detach()).max()) < 1e-5
        assert float(router.log_prior.abs().max()) > 0  # the balanced prior moves


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"alpha": {"schedule": "sample"}, "elastic": {"unit": "layer", "full_share": 0.3, "distill": 1.0}},
        {"model": {"attention_dropout": 0.1}, "elastic": {"unit": "off"}, "alpha": {"schedule": "learned"}},
    ],
)
def test_stopped_and_resumed_is_straight_to_the_bit(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    straight, broken = settings("straight", **how), settings("broken", **how)
    train(straight)
    with monkeypatch.context() as patch:
        at_step(patch, 9, lambda model: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(TrainingStopped, match="SIGTERM: stopped after step 10") as stopped:
            train(broken)
    assert stopped.value.status == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    train(broken, resume=True)
    assert same(weights(straight), weights(broken))
    assert losses(straight)[20] == losses(broken)[20]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_closed_terminal_and_a_pre_empted_job_save_a_checkpoint(
    number: signal.Signals, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both once ended the process without one. They may come twice, and SIGTERM may follow."""
    config = settings(steps=4)

    def send(model: GrmoeForCausalLM) -> None:
        for each in (number, number, signal.SIGTERM):
            os.kill(os.getpid(), each)

    at_step(monkeypatch, 1, send)
    with pytest.raises(TrainingStopped, match=f"{number.name}: stopped after step 2, saved as") as stopped:
        train(config)
    assert stopped.value.status == 128 + number
    assert signal.getsignal(number) == signal.SIG_DFL
    assert open_model(Path(config.out)).step == 2


def test_signals_that_were_ignored_stay_ignored_and_a_second_ctrl_c_interrupts() -> None:
    """`nohup` ignores SIGHUP: closing the terminal must not end such a run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.caught is None
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.caught == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_damaged_lines_of_the_log_are_left_out(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of these once ended `--resume`, `curves` or the summary in a traceback."""
    config = settings(steps=2, log={"every": 1})
    train(config)
    log, environment = (Path(config.out) / name for name in ("log.jsonl", "environment.json"))
    good = log.read_bytes().splitlines(keepends=True)
    whole = read_log(Path(config.out))
    line = whole[0]
    damaged: list[Any] = [
        None, 3, [], {}, {"kind": "train"}, line | {"step": "1"}, line | {"step": None}, line | {"loss": None},
        line | {"kind": 3}, line | {"layers": []}, line | {"layers": [3]}, line | {"layers": [{"load": "x"}]},
        line | {"entropy": "x"}, whole[2] | {"domains": 3}, whole[2] | {"domains": {"a": None}},
        whole[2] | {"perplexity": "x"}, line | {"step": True},
    ]  # fmt: skip
    bad = [json.dumps(each).encode() + b"\n" for each in damaged]
    bad += [b"\xff\xfe\x00\n", b"{\n", b"\n", b"[" * 100_000 + b"\n", b'{"kind": "train", "st\n']
    log.write_bytes(b"".join([good[0], *bad, *good[1:]]))
    assert read_log(Path(config.out)) == whole
    assert summary([Path(config.out)]).rows[0][2] == "2"
    capsys.readouterr()
    latest, data = checkpoints_of(Path(config.out), config).latest(), TokenDataset(config.data.path)
    for content in (
        b"{",
        b"3",
        b"[]",
        b"{}",
        b'{"started": 3}',
        b'{"started": "x", "resumed_from": 7}',
        b"\xff",
    ):
        environment.write_bytes(content)
        open_folder(config.resolved(), latest, data)
        assert "started" in json.loads(environment.read_text())
    assert f"{log}: {len(bad)} damaged lines are left out" in capsys.readouterr().err
    assert log.read_bytes() == b"".join(good)


def test_lines_the_checkpoint_has_not_seen_are_dropped(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(checkpoint={"every": 8}, log={"every": 1})

    class Killed(BaseException):
        pass

    def die(model: GrmoeForCausalLM) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        at_step(patch, 11, die)
        with pytest.raises(Killed):
            train(config)
    assert max(losses(config)) == 11
    with (Path(config.out) / "log.jsonl").open("a") as log:
        log.write('{"kind": "train", "st')  # cut off in the middle
    before = losses(config)
    train(config, resume=True)
    assert list(losses(config)) == list(range(1, 21))
    assert {k: v for k, v in losses(config).items() if k <= 11} == before  # the same again, to the bit


def test_small_batches_add_up_to_the_large_one(settings: Settings) -> None:
    """Gradients of micro-batches are summed in another order: equal but for rounding, which 3 steps hardly amplify."""
    whole, parts = settings("whole", steps=3), settings("parts", steps=3, data={"micro_batch_size": 2})
    train(whole)
    train(parts)
    assert math.isclose(losses(whole)[3], losses(parts)[3], rel_tol=1e-4)
    for name, value in weights(whole).items():
        torch.testing.assert_close(value, weights(parts)[name], rtol=1e-2, atol=2e-4)


def test_activation_checkpointing_changes_nothing(settings: Settings) -> None:
    plain, saving = settings("plain", steps=5), settings("saving", steps=5, activation_checkpointing=True)
    train(plain)
    train(saving)
    assert same(weights(plain), weights(saving))


def test_a_seed_is_a_run(settings: Settings) -> None:
    first, again, other = settings("a", steps=4), settings("b", steps=4), settings("c", steps=4, seed=1)
    for config in (first, again, other):
        train(config)
    assert same(weights(first), weights(again))
    assert not same(weights(first), weights(other))


@pytest.mark.parametrize("part", ["weights", "moments"])
def test_nan_in_the_state_is_named_and_never_saved(
    part: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "The last good step is saved" once saved the NaN weights themselves, as the newest checkpoint."""
    config = settings(checkpoint={"every": 4})

    def poison(trainer: Trainer) -> None:
        weight = trainer.model.model.layers[1].mlp.experts.down_proj
        with torch.no_grad():
            (weight if part == "weights" else trainer.optimizers[0].state[weight]["exp_avg"])[2, 0, 0] = (
                math.nan
            )

    at_step_of_trainer(monkeypatch, 6, poison)
    with pytest.raises(TrainingStopped, match=r"layers\.1\.mlp\.experts\.down_proj") as stopped:
        train(config)
    assert stopped.value.status == 1
    assert "nothing is saved. The last good checkpoint is " in str(stopped.value)
    assert [p.name for p in (Path(config.out) / "checkpoints").iterdir()] == ["step-00000004"]
    assert all(torch.isfinite(w).all() for w in weights(config).values())


def test_nan_weights_before_the_first_checkpoint_leave_no_run(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update of the last step makes them: its loss and its gradient are finite."""
    config = settings(steps=3)
    resolve = loop.resolve

    def poison(trainer: Trainer, in_flight: Any, newest: int) -> Any:
        with torch.no_grad():
            trainer.model.model.embed_tokens.weight[0, 0] = math.inf
        return resolve(trainer, in_flight, newest)

    monkeypatch.setattr(loop, "resolve", poison)
    with pytest.raises(TrainingStopped, match="There is no earlier checkpoint: start again"):
        train(config)
    assert not (Path(config.out) / "checkpoints").exists()


def test_nan_on_the_way_names_the_layer(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings()

    def poison(model: GrmoeForCausalLM) -> None:
        attention = model.model.layers[1].self_attn
        attention.register_forward_hook(lambda m, i, o: (o[0] * math.inf, *o[1:]))

    before: dict[str, Tensor] = {}
    at_step(
        monkeypatch,
        6,
        lambda model: (before.update({k: v.clone() for k, v in model.state_dict().items()}), poison(model))[
            1
        ],
    )
    with pytest.raises(TrainingStopped, match=r"output of model\.layers\.1\.self_attn holds NaN or Inf"):
        train(config)
    assert same(before, weights(config))
    monkeypatch.undo()
    train(config, resume=True)  # and goes on from there
    straight = settings("straight")
    train(straight)
    assert same(weights(config), weights(straight))


def test_nan_in_a_gradient_alone_is_found(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings()

    def poison(model: GrmoeForCausalLM) -> None:
        model.model.layers[0].mlp.up_proj.weight.register_hook(lambda g: g * math.nan)

    at_step(monkeypatch, 3, poison)
    with pytest.raises(
        TrainingStopped, match=r"forward pass is finite, the gradient of .*layers\.0\.mlp\.up_proj"
    ):
        train(config)


def test_runs_do_not_mix(settings: Settings, prepared: Path) -> None:
    config = settings(steps=2)
    train(config)
    with pytest.raises(ValueError, match=r"holds a run at step 2.*--resume"):
        train(config)
    with pytest.raises(
        ValueError, match=r"model\.router: None → 'softmax'; optim\.lr: 0\.003 → 0\.001"
    ) as refused:
        train(settings(steps=2, optim={"lr": 1e-3}, model={"router": "softmax"}), resume=True)
    assert "log.every" not in str(refused.value)
    finished = train(settings(steps=2, log={"every": 1}), resume=True)  # this may change
    assert finished.validation is None  # it had ended


def test_a_run_does_not_lie_in_the_folder_of_its_text(settings: Settings, prepared: Path) -> None:
    """`grmoe info` would then know the run and no longer the text."""
    before = sorted(prepared.iterdir())
    with pytest.raises(ValueError, match=r"out must be a folder for the run, but .* holds prepared text"):
        train(settings(steps=2, out=str(prepared)))
    assert sorted(prepared.iterdir()) == before


def test_other_data_is_refused(settings: Settings, prepared: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    config = settings(steps=2, data={"path": str(copy)})
    train(config)
    index = copy / "index.json"
    index.write_text(index.read_text() + "\n")
    with pytest.raises(ValueError, match="must be the data that"):
        train(config, resume=True)


def test_data_may_move(settings: Settings, prepared: Path, tmp_path: Path) -> None:
    import shutil

    train(settings(steps=2))
    shutil.copytree(prepared, tmp_path / "moved")
    finished = train(settings(steps=2, data={"path": str(tmp_path / "moved")}), resume=True)
    assert finished.validation is None  # it had ended, with the same data


def test_a_date_is_a_seed(settings: Settings) -> None:
    train(settings(steps=1, seed=20261115))


def test_the_best_checkpoint_is_kept(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(steps=40, validation={"every": 10}, checkpoint={"every": 10, "keep_last": 1})

    def forget(model: GrmoeForCausalLM) -> None:
        with torch.no_grad():
            model.model.embed_tokens.weight.normal_(generator=torch.Generator().manual_seed(0))

    at_step(monkeypatch, 20, forget)
    train(config)
    held_out = {v["step"]: v["loss"] for v in read_log(Path(config.out)) if v["kind"] == "validation"}
    assert min(held_out, key=lambda s: held_out[s]) == 20
    kept = sorted(int(p.name.removeprefix("step-")) for p in (Path(config.out) / "checkpoints").iterdir())
    assert kept == [20, 40]
    assert open_model(Path(config.out), "best").step == 20


def test_a_bad_step_after_resuming_leaves_the_best_checkpoint_what_it_is(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state was saved again, without its validation loss. A worse checkpoint was then the best."""
    times: dict[str, Any] = {"validation": {"every": 2}, "checkpoint": {"every": 2, "keep_last": 9}}
    config = settings(steps=4, **times)
    train(config)
    before = checkpoints_of(Path(config.out), config).best()
    assert before is not None

    def fail(trainer: Trainer, step: int, batch_BS: Any) -> Any:
        raise NonFiniteError("loss nan", step)

    monkeypatch.setattr(loop, "train_step", fail)
    with pytest.raises(TrainingStopped):
        train(settings(steps=6, **times), resume=True)
    after = checkpoints_of(Path(config.out), config).best()
    assert after is not None
    assert (after.step, after.metric) == (before.step, before.metric)
    assert after.step == 4


def test_with_another_part_of_the_validation_text_the_best_is_chosen_anew(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter([1.0, 3.0, 2.0])
    real = loop.validate
    monkeypatch.setattr(loop, "validate", lambda trainer: replace(real(trainer), loss=next(losses)))
    checkpoint = {"every": 2, "keep_last": 1}
    config = settings(steps=2, validation={"every": 2, "tokens": 64}, checkpoint=checkpoint)
    train(config)
    capsys.readouterr()
    train(settings(steps=6, validation={"every": 2, "tokens": 96}, checkpoint=checkpoint), resume=True)
    assert (
        "validation.tokens was 64 and is 96 now: losses before and after do not compare"
        in capsys.readouterr().err
    )
    found = checkpoints_of(Path(config.out), config)
    best = found.best()
    assert best is not None
    assert (best.step, best.metric) == (6, 2.0)


def test_a_start_that_cannot_write_its_folder_leaves_none(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings()

    def full(*args: Any) -> None:
        open_folder(*args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop, "open_folder", full)
    with pytest.raises(OSError, match="No space"):
        train(config)
    assert not Path(config.out).exists()


def test_on_a_gpu_a_bad_step_and_those_queued_behind_it_change_nothing(settings: Settings) -> None:
    """The device's guard, here on the CPU, whose fused AdamW has it too: weights, moments, counts and priors."""
    trainer = build_trainer(settings(), start(ParallelConfig(), "cpu"))
    trainer.guards_on_device = True
    for group in trainer.optimizers[0].param_groups:
        group["fused"], group["foreach"] = True, False
    batches = trainer.data.batches(trainer.rows, trainer.length)
    for number in range(3):
        step.resolve(trainer, step.train_step(trainer, number, next(batches)), number)
    good = copy.deepcopy(gather(trainer.model, trainer.optimizers))
    norm = trainer.model.model.norm
    hook = norm.register_forward_hook(lambda module, inputs, output: output * math.nan)
    bad = step.train_step(trainer, 3, next(batches))
    hook.remove()
    behind = step.train_step(trainer, 4, next(batches))
    with pytest.raises(NonFiniteError, match="at step 4") as found:
        step.resolve(trainer, bad, 4)
    assert found.value.step == 3
    assert math.isfinite(float(behind.numbers_5.sum()))  # good in itself, and still nothing
    now = gather(trainer.model, trainer.optimizers)
    for part in ("model", "moments"):
        flat = torch.utils._pytree.tree_leaves(good[part])
        assert all(map(torch.equal, flat, torch.utils._pytree.tree_leaves(now[part])))


def test_one_token_with_nan_stops_its_step_and_spoils_no_later_one(settings: Settings) -> None:
    """Its routers' losses are NaN. Weights, moments, priors and shares stay, and the next good step finds them so."""
    model = {"router": "softmax", "router_options": {"balance": True, "z_loss": 0.01, "load_loss": 0.01}}
    routing = {"leading_weight": 0.1, "entropy_weight": 0.01, "entropy_target": 0.5}
    trainer = build_trainer(settings(model=model, routing=routing), start(ParallelConfig(), "cpu"))
    batches = trainer.data.batches(trainer.rows, trainer.length)
    step.train_step(trainer, 0, next(batches))
    good = copy.deepcopy(gather(trainer.model, trainer.optimizers))

    def spoil(module: Any, inputs: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[0, 3] = math.nan
        return output

    hook = trainer.model.model.embed_tokens.register_forward_hook(spoil)
    with pytest.raises(
        NonFiniteError, match=r"at step 2: the output of model\.embed_tokens holds NaN or Inf"
    ):
        step.train_step(trainer, 1, next(batches))
    hook.remove()
    now = gather(trainer.model, trainer.optimizers)
    for part in ("model", "moments", "leading"):
        flat = torch.utils._pytree.tree_leaves(good[part])
        assert all(map(torch.equal, flat, torch.utils._pytree.tree_leaves(now[part]))), part
    for number in (2, 3):
        in_flight = step.train_step(trainer, number, next(batches))
        assert math.isfinite(sum(in_flight.numbers_5.tolist()))
    for router in routers(trainer.model):
        assert all(bool(torch.isfinite(buffer).all()) for buffer in router.buffers())
        assert router.log_prior.any()
    assert all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())


def test_a_lost_process_is_one_message(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a traceback of hundreds of lines that named no checkpoint."""
    config = settings(steps=2, checkpoint={"every": 1})
    train(config)
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")

    def fail(*args: Any) -> None:
        raise lost

    monkeypatch.setattr(loop, "_train", fail)
    with pytest.raises(RuntimeError) as alone:
        train(config, resume=True)
    assert alone.value is lost  # one process has no other to lose
    world = loop.start(config.parallel, config.device)
    monkeypatch.setattr(loop, "start", lambda *args: replace(world, mesh=object()))
    monkeypatch.setattr(loop, "lock_folder", lambda *args: nullcontext())
    with pytest.raises(loop.LostProcessError, match=r"The last checkpoint is .*step-00000002") as told:
        train(config, resume=True)
    assert f"grmoe train --resume out={config.out}" in str(told.value)
