"""What a run starts with: defaults by device, what a resumed run keeps, the weights of another model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from counting import prepare_corpus
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.config import ConfigError, from_dict, merge, read_tree, to_dict
from grmoe.runs import start
from grmoe.runs.config import TrainConfig
from grmoe.runs.export import export
from grmoe.runs.folder import saved_config
from grmoe.runs.open import open_model
from grmoe.runs.start import starting_config
from grmoe.train import setup
from grmoe.train.loop import train

Settings = Callable[..., TrainConfig]
DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


def started(*overrides: str) -> TrainConfig:
    return starting_config(read_tree(None, overrides))


# -- defaults by device ----------------------------------------------------------------------------------------


def test_a_cpu_uses_what_the_demo_uses() -> None:
    """A start without options once trained the GPU's preset on a CPU, for hours, at a rate that learns nothing."""
    demo, ours = yaml.safe_load(DEMO.read_text()), started("device=cpu", "steps=2000")
    assert ours.preset == demo["model"]["preset"] == "tiny"
    assert ours.data.sequence_length == demo["data"]["sequence_length"]
    assert ours.data.batch_size == demo["data"]["batch_size"]
    assert (ours.optim.lr, ours.optim.warmup) == (demo["optim"]["lr"], demo["optim"]["warmup"])
    assert started("device=cpu", "steps=50").optim.warmup == 15
    assert ours.model["selection"] == "mass"  # α changes the number of experts


def test_what_is_given_stays() -> None:
    found = started(
        "device=cpu", "optim.lr=1e-3", "data.batch_size=4", "model.selection=topk", "model.num_experts=4"
    )
    assert (found.optim.lr, found.data.batch_size, found.data.sequence_length) == (1e-3, 4, 128)
    assert found.model == {"preset": "tiny", "selection": "topk", "num_experts": 4}
    assert started("device=cpu", "model.max_position_embeddings=64").data.sequence_length == 64
    assert started("device=cpu", "model.preset=tiny").model == {"preset": "tiny"}
    assert "selection" not in started("device=cpu", "model.router=switch").model


@pytest.mark.parametrize("preset", ["small", "null"])
def test_another_model_has_the_common_defaults(preset: str) -> None:
    found = started("device=cpu", f"model.preset={preset}")
    assert to_dict(found) == to_dict(TrainConfig(device="cpu", model={"preset": found.preset}))


def test_a_gpu_keeps_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "find_device", lambda name: torch.device("cuda"))
    assert started() == TrainConfig()


def test_wrong_settings_are_refused_before_a_device_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"optim\.lr must be a number"):
        started("optim.lr=fast", "device=cuda:77")
    with pytest.raises(ValueError, match="device must exist"):
        started("device=cuda:77")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """The preset of a CPU with its defaults, trained for two steps on text that is large enough for them."""
    folder = tmp_path_factory.mktemp("tiny")
    config = started(
        "device=cpu", f"data.path={prepare_corpus(folder)}", f"out={folder / 'run'}", "steps=2", "data.batch_size=2",
        "validation.tokens=200",
    )  # fmt: skip
    train(config)
    return config


def test_defaults_are_saved_and_a_resumed_run_has_them_anywhere(
    tiny: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = saved_config(Path(tiny.out))
    assert (saved.optim.lr, saved.optim.warmup, saved.preset) == (4e-3, 0, "tiny")
    monkeypatch.setattr(start, "find_device", lambda name: torch.device("cuda"))
    resumed = starting_config(read_tree(None, [f"out={tiny.out}"]), resume=True)
    assert resumed == saved


def test_a_default_model_has_its_dial(tiny: TrainConfig) -> None:
    """With top-k every α computes the same number of experts, and `grmoe eval --alpha` showed nothing."""
    done = CliRunner().invoke(app, ["eval", tiny.out, "--tokens", "128", "--alpha", "0.5", "--alpha", "20"])
    assert done.exit_code == 0, done.output
    few, many = sorted(p["experts_per_token"] for p in _points(Path(tiny.out)))
    assert few < 1.5 < many <= 2


def _points(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "eval" / "results.json").read_text())["body"]["points"]
    return found


# -- what a resumed run keeps ----------------------------------------------------------------------------------


def test_a_resumed_run_keeps_what_is_left_out(settings: Settings, tmp_path: Path) -> None:
    """A file without the overrides of the first start was once refused: it stood for other settings."""
    config = settings(steps=2)
    file = tmp_path / "few.yaml"
    tree = to_dict(config)
    file.write_text(
        yaml.safe_dump({"out": config.out, "device": "cpu", "data": tree["data"], "model": tree["model"]})
    )
    first = starting_config(read_tree(file, ["optim.lr=2e-3", "steps=2"]))
    train(first)
    again = starting_config(read_tree(file, ["log.every=3"]), resume=True)
    assert (again.optim.lr, again.steps, again.log.every) == (2e-3, 2, 3)
    assert train(again, resume=True).validation is None  # it had ended


def test_a_folder_alone_is_not_resumed_as_a_new_run(tmp_path: Path) -> None:
    """A misspelt folder would start a run of defaults. The whole command of a job script starts one."""
    given = [f"out={tmp_path / 'nothing'}", "steps=9"]
    with pytest.raises(ValueError, match=r"nothing holds no run to resume; .*leave out --resume"):
        starting_config(read_tree(None, given), resume=True)
    assert starting_config(read_tree(None, [*given, "device=cpu"]), resume=True).steps == 9


@pytest.mark.parametrize("resume", [False, True])
def test_a_failed_start_leaves_nothing_behind(resume: bool, settings: Settings) -> None:
    config = settings(steps=1)
    for wrong in ("data.path=nowhere", "data.batch_size=100000", "log.wandb=x", "model.num_experts=10000000"):
        failing = from_dict(TrainConfig, merge(to_dict(config), read_tree(None, [wrong])))
        with pytest.raises(ValueError, match=r"missing|less than one batch|wandb|parameters"):
            train(failing, resume)
        assert not Path(config.out).exists()
    train(config, resume)


def test_a_start_that_fails_in_its_first_step_leaves_nothing_that_refuses_the_next(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(steps=2)

    def fails(*_: object) -> None:
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("grmoe.train.loop.train_step", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            train(config)
    assert not Path(config.out).exists()
    train(replace(config, seed=5), resume=True)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"- 1",
        b"steps: [",
        b"\xff\xfe",
        b"steps: ten",
        b"model: {hidden_size: x}",
        b"xyz: 3",
        b"a: !!x b",
    ],
)
def test_a_damaged_configuration_is_named(content: bytes, settings: Settings) -> None:
    config = settings(steps=1)
    file = Path(config.out) / "config.yaml"
    file.parent.mkdir()
    file.write_bytes(content)
    if content == b"":  # every key has a default
        starting_config({"out": config.out}, resume=True)
        return
    with pytest.raises(ValueError, match=r"run/config\.yaml") as refused:
        starting_config({"out": config.out}, resume=True)
    assert "\n" not in str(refused.value)


def test_a_failed_start_touches_nothing_that_was_there(settings: Settings) -> None:
    config = settings(steps=2, data={"path": "nowhere"})
    notes = Path(config.out) / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(ValueError, match="nowhere"):
        train(config)
    assert notes.read_text() == "mine"


# -- starting from other weights -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(
    make_settings: Callable[[Path], Settings], tmp_path_factory: pytest.TempPathFactory
) -> TrainConfig:
    """A run whose tensors all differ from a new model's."""
    folder = tmp_path_factory.mktemp("source")
    config = make_settings(folder)(steps=3, model={"selection": "mass", "alpha": 1.5, "vocab_size": 300})
    train(config)
    export(Path(config.out), folder / "model", dtype=torch.float32)
    return config


@pytest.fixture(params=["run", "model"])
def path(source: TrainConfig, request: pytest.FixtureRequest) -> Path:
    return Path(source.out).parent / str(request.param)


def given(path: Path, source: TrainConfig, tmp_path: Path, *more: str) -> list[str]:
    return [
        f"start_from={path}", f"data.path={source.data.path}", f"out={tmp_path / 'tuned'}", "device=cpu", "steps=2",
        "data.batch_size=8", *more,
    ]  # fmt: skip


def test_a_run_starts_from_other_weights(
    path: Path, source: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = started(*given(path, source, tmp_path, "seed=9", "model.selection=topk"))
    model = open_model(path).model
    assert config.model["selection"] == "topk"
    assert (config.model["alpha"], config.model["vocab_size"]) == (1.5, 300)
    assert config.data.sequence_length == 32
    built: list[setup.Trainer] = []
    load = setup.load_start

    def watched(trainer: setup.Trainer, source: str) -> None:
        load(trainer, source)
        built.append(trainer)
        for name, tensor in model.state_dict().items():
            assert torch.equal(trainer.model.state_dict()[name], tensor), name
        assert not any(o.state for o in trainer.optimizers)

    monkeypatch.setattr("grmoe.train.loop.load_start", watched)
    train(config)
    assert len(built) == 1
    trained = open_model(Path(config.out)).model.state_dict()
    assert not torch.equal(
        trained["model.embed_tokens.weight"], model.state_dict()["model.embed_tokens.weight"]
    )
    # More steps continue the tuned run, and the source may be gone.
    saved = saved_config(Path(config.out))
    assert saved.start_from == str(path)
    more = starting_config(read_tree(None, [f"out={config.out}", "steps=3"]), resume=True)
    train(more, resume=True)
    assert len(built) == 1
    with pytest.raises(ValueError, match=r"start_from: .* → 'elsewhere'"):
        train(replace(more, start_from="elsewhere"), resume=True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "model.hidden_size=64",
            r"model.hidden_size is 32 in .* and cannot change with --from, got 64: leave it out",
        ),
        ("model.preset=tiny", r"model.hidden_size is 32 .* got 128 \(model.preset=tiny\)"),
        ("model.router=softmax", "model.router is 'grassmann' .* got 'softmax'"),
        ("model.hiden_size=32", "unknown key 'model.hiden_size'; did you mean 'model.hidden_size'"),
        ("start_from=nowhere", "nowhere is neither a run of `grmoe train` nor an exported model"),
    ],
)
def test_contradictions_are_refused(more: str, message: str, source: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        started(*given(Path(source.out), source, tmp_path, more))


def test_agreeing_settings_are_accepted(source: TrainConfig, tmp_path: Path) -> None:
    found = started(*given(Path(source.out), source, tmp_path, "model.hidden_size=32", "model.preset=null"))
    assert found.model["hidden_size"] == 32


def test_a_job_script_repeats_its_whole_command(source: TrainConfig, tmp_path: Path) -> None:
    """A model that was named beside --from, and agrees with it, was once another one when the run was resumed."""
    run = Path(source.out)
    whole = [
        "model.router=grassmann",
        "model.hidden_act=silu",
        "model.router_rank=null",
        "model.selection=topk",
    ]
    settings = given(run, source, tmp_path, *whole, "model.alpha=2.0")
    train(started(*settings))
    longer = starting_config(read_tree(None, [*settings, "steps=3"]), resume=True)
    assert longer.model == saved_config(tmp_path / "tuned").model
    assert train(longer, resume=True).checkpoint.step == 3
    for other, message in (
        ("model.router=softmax", "model.router: None → 'softmax'"),
        ("model.preset=tiny", "model.preset: None → 'tiny'"),
        ("model.alpha=3.0", r"model.alpha: 2.0 → 3.0"),
    ):
        with pytest.raises(ValueError, match=message):
            train(starting_config(read_tree(None, [*settings, "steps=3", other]), resume=True), resume=True)


def test_what_training_adds_to_the_loss_may_change(source: TrainConfig, tmp_path: Path) -> None:
    found = started(*given(Path(source.out), source, tmp_path, "model.residual_loss_coef=0.02"))
    assert found.model["residual_loss_coef"] == 0.02


def test_a_curve_of_budgets_is_not_taken(source: TrainConfig, tmp_path: Path) -> None:
    """It was calibrated for the weights of the source."""
    model = open_model(Path(source.out).parent / "model").model
    point = {"experts_per_token": 1.0, "tau": 1.0, "alpha": 1.0, "cap": 1, "loss": 3.0}
    model.config.budget_curve = [point, {**point, "experts_per_token": 2.0, "cap": 2, "loss": 2.0}]
    model.set_budget(1.5)
    dialled = tmp_path / "dialled"
    shutil.copytree(Path(source.out).parent / "model", dialled)
    model.save_pretrained(dialled)
    found = started(*given(dialled, source, tmp_path))
    assert not {"budget", "budget_curve"} & set(found.model)
    train(found)


def test_another_tokenizer_is_refused(source: TrainConfig, tmp_path: Path) -> None:
    other = prepare_corpus(tmp_path, words=[f"w{i}" for i in range(10)])
    config = started(*given(Path(source.out), source, tmp_path, f"data.path={other}"))
    with pytest.raises(
        ValueError, match=r"data.path must be prepared with the tokenizer of .*--tokenizer .*/tokenizer"
    ):
        train(config)
    assert not Path(config.out).exists()


def test_the_option_of_the_command(source: TrainConfig, tmp_path: Path) -> None:
    settings = given(Path(source.out), source, tmp_path)[1:]
    shown = CliRunner().invoke(app, ["train", "--from", source.out, "--show", *settings])
    assert shown.exit_code == 0, shown.output
    assert yaml.safe_load(shown.stdout)["start_from"] == source.out
    wrong = CliRunner().invoke(app, ["train", "--from", "nowhere", *settings])
    assert wrong.exit_code == 2
    assert wrong.output.startswith("error: nowhere is neither a run")
