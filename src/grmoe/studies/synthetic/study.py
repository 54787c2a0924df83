"""The synthetic study from start to finish: every method on every setting.

Each (setting, method) pair is written to its own JSON file when it is done. An interrupted study continues where it
stopped when started again with the same configuration.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from grmoe.files import write_file
from grmoe.studies.synthetic.evaluation import SeedScore, frame_recovery, score, sweep_dial
from grmoe.studies.synthetic.methods import METHODS, Method
from grmoe.studies.synthetic.task import EASY, HARD, Setting, Task
from grmoe.studies.synthetic.training import Training, train
from grmoe.terminal import Progress, Steps, silent

SETTINGS = {s.name: s for s in (EASY, HARD)}
QUICK_METHODS = ["softmax_top1", "switch", "expert_choice", "soft_moe", "vmf", "grmoe", "supervised"]
_DIALED = ("grmoe", "softmax_top1")  # the figure shows their dials
ALPHAS = [2.0 ** (i / 2) for i in range(-6, 9)]  # 1/8 … 16


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole study. Results of another configuration are not reused."""

    seeds: int = 50
    """Independent tasks and trainings per method, computed as one batch."""
    num_experts: int = 8
    """N, experts and classes."""
    dim: int = 128
    """d, width of a token."""
    rank: int = 16
    """k, rank of a class's subspace and of a Grassmann router's frames."""
    out_dim: int = 16
    """Width of the targets."""
    eval_tokens: int = 4096
    """Fresh tokens per seed that methods are scored on."""
    dial_tokens: int = 1024
    """Tokens per seed of the dial's curves."""
    task_seed: int = 0
    """Seed of tasks, trainings and tokens."""
    training: Training = field(default_factory=Training)
    """How every method is trained."""
    device: str = "cpu"
    """Kind of device that draws tokens and trains, "cpu" or "cuda". Another one draws other tokens."""

    @classmethod
    def quick(cls) -> Config:
        """Small enough for a demo: under a minute on two cores for `QUICK_METHODS`."""
        return cls(seeds=6, eval_tokens=2048, training=Training(steps=600))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every method on every setting."""

    out: Path
    """Folder where each finished method is kept, SETTING/METHOD.json."""
    config: Config = field(default_factory=Config)
    settings: tuple[Setting, ...] = (EASY, HARD)
    methods: tuple[Method, ...] = METHODS


@dataclass(kw_only=True)
class MethodResult:
    """One method on one setting."""

    method: str
    title: str
    setting: str
    scores: list[SeedScore]
    oracle_accuracy: float
    seconds: float
    dial: dict[str, Any] | None = None
    """A `DialSweep`, for methods in `_DIALED`."""
    recovery: list[list[float]] | None = None
    """`frame_recovery`, for routers with frames."""


@dataclass(kw_only=True)
class SettingResult:
    """All methods on one setting. Overlap is the achieved one, over pairs of classes and seeds."""

    setting: Setting
    num_experts: int
    overlap_mean: float
    overlap_min: float
    overlap_max: float
    oracle_accuracy: float
    methods: list[MethodResult]


@dataclass(frozen=True)
class Result:
    config: Config
    settings: list[SettingResult]


def run(plan: Plan, progress: Progress = silent) -> Result:
    """Train and score every method on every setting. Finished methods are read back from `plan.out`."""
    steps = Steps(progress, len(plan.settings) * len(plan.methods) * plan.config.training.steps)
    return Result(plan.config, [_run_setting(setting, plan, steps) for setting in plan.settings])


def _run_setting(setting: Setting, plan: Plan, steps: Steps) -> SettingResult:
    config = plan.config
    task = Task(
        setting,
        config.seeds,
        num_experts=config.num_experts,
        dim=config.dim,
        rank=config.rank,
        out_dim=config.out_dim,
        seed=config.task_seed,
        device=config.device,
    )
    overlap = task.achieved_overlap()
    held_out = task.token_generator(config.task_seed + 1_000_003)
    x_SBD, label_SB = task.tokens(config.eval_tokens, held_out)
    oracle = float((task.oracle(x_SBD) == label_SB).double().mean())
    results = []
    for method in plan.methods:
        path = plan.out / setting.name / f"{method.key}.json"
        fingerprint = {"config": asdict(config), "setting": asdict(setting), "method": _plain(asdict(method))}
        result = _load(path, fingerprint)
        if result is None:
            result = _run_method(task, method, config, x_SBD, label_SB, oracle, steps)
            _save(path, {"fingerprint": fingerprint, "result": asdict(result)})
        else:
            steps(f"{setting.name}: {method.title}", config.training.steps)
        results.append(result)
    return SettingResult(
        setting=setting,
        num_experts=config.num_experts,
        overlap_mean=float(overlap.mean()),
        overlap_min=float(overlap.min()),
        overlap_max=float(overlap.max()),
        oracle_accuracy=oracle,
        methods=results,
    )


def _run_method(
    task: Task,
    method: Method,
    config: Config,
    x_SBD: torch.Tensor,
    label_SB: torch.Tensor,
    oracle: float,
    steps: Steps,
) -> MethodResult:
    training = config.training
    label = f"{task.setting.name}: {method.title}"
    started = time.perf_counter()
    # Every method sees the same training tokens.
    task.generator.manual_seed(config.task_seed + 17)
    trained = train(
        task,
        method.builder(config.dim, config.num_experts, config.rank, training.batch),
        training,
        seed=config.task_seed + 29,
        supervised=method.supervised,
        on_step=lambda: steps(label),
    )
    scores = score(task, trained, x_SBD, label_SB, group=training.batch)
    dial = None
    if method.key in _DIALED:
        dial = asdict(sweep_dial(trained.routers, x_SBD[:, : config.dial_tokens], ALPHAS))
    return MethodResult(
        method=method.key,
        title=method.title,
        setting=task.setting.name,
        scores=scores,
        oracle_accuracy=oracle,
        seconds=time.perf_counter() - started,
        dial=dial,
        recovery=frame_recovery(task, trained.routers),
    )


def _plain(value: Any) -> Any:
    """`value` as it reads back from JSON."""
    return json.loads(json.dumps(value))


def _load(path: Path, fingerprint: dict[str, Any]) -> MethodResult | None:
    try:
        saved = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); delete it to run that method again") from error
    if saved.get("fingerprint") != _plain(fingerprint):
        return None  # another configuration: run again and overwrite
    result = saved["result"]
    scores = [SeedScore(**s) for s in result.pop("scores")]
    return MethodResult(scores=scores, **result)


def _save(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(content).encode())
