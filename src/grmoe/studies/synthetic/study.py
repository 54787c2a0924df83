"""The synthetic study from start to finish: every method on every setting, results kept as they come.

Each (setting, method) pair is written to its own JSON file when it is done. A run that was interrupted goes on
where it stopped, as long as it is asked for with the same configuration.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from grmoe.studies.synthetic.evaluation import SeedScore, frame_recovery, score, sweep_dial
from grmoe.studies.synthetic.methods import Method
from grmoe.studies.synthetic.task import EASY, HARD, Setting, Task
from grmoe.studies.synthetic.training import Training, train

SETTINGS = {s.name: s for s in (EASY, HARD)}
QUICK_METHODS = ["softmax_top1", "switch", "expert_choice", "soft_moe", "vmf", "grmoe", "supervised"]
DIALED = ("grmoe", "softmax_top1")  # whose dial the figure shows
ALPHAS = [2.0 ** (i / 2) for i in range(-6, 9)]  # 1/8 … 16


@dataclass(frozen=True)
class Config:
    seeds: int = 50
    num_experts: int = 8
    dim: int = 128
    rank: int = 16
    out_dim: int = 16
    eval_tokens: int = 4096
    dial_tokens: int = 1024
    task_seed: int = 0
    training: Training = field(default_factory=Training)

    @classmethod
    def quick(cls) -> Config:
        """Small enough for a demo: under a minute on two cores for `QUICK_METHODS`."""
        return cls(seeds=6, eval_tokens=2048, training=Training(steps=600))


@dataclass
class MethodResult:
    method: str
    title: str
    setting: str
    scores: list[SeedScore]
    oracle_accuracy: float
    seconds: float
    dial: dict[str, Any] | None = None
    recovery: list[list[float]] | None = None


@dataclass
class SettingResult:
    setting: Setting
    num_experts: int
    overlap_mean: float
    overlap_min: float
    overlap_max: float
    oracle_accuracy: float
    methods: list[MethodResult]


Progress = Callable[[str, int, int], None]  # (what, step, steps)


def run_setting(
    setting: Setting, methods: list[Method], config: Config, out: Path, progress: Progress | None = None
) -> SettingResult:
    """Train and score `methods` on one setting; finished methods are read back from `out`."""
    task = Task(
        setting,
        config.seeds,
        num_experts=config.num_experts,
        dim=config.dim,
        rank=config.rank,
        out_dim=config.out_dim,
        seed=config.task_seed,
    )
    overlap = task.achieved_overlap()
    held_out = torch.Generator().manual_seed(config.task_seed + 1_000_003)
    x_SBD, label_SB = task.tokens(config.eval_tokens, held_out)
    oracle = float((task.oracle(x_SBD) == label_SB).double().mean())
    results = []
    for method in methods:
        path = out / setting.name / f"{method.key}.json"
        fingerprint = {"config": asdict(config), "setting": asdict(setting), "method": _plain(asdict(method))}
        result = _load(path, fingerprint)
        if result is None:
            result = _run_method(task, method, config, x_SBD, label_SB, oracle, progress)
            _save(path, {"fingerprint": fingerprint, "result": asdict(result)})
        elif progress is not None:
            progress(f"{setting.name}: {method.title}", config.training.steps, config.training.steps)
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
    progress: Progress | None,
) -> MethodResult:
    training = method.configure(config.training)
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
        on_step=None if progress is None else lambda step: progress(label, step + 1, training.steps),
    )
    scores = score(task, trained, x_SBD, label_SB, group=training.batch)
    dial = None
    if method.key in DIALED:
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
    """As it reads back from JSON."""
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
    """Whole or not at all: an interrupted write leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    os.replace(partial, path)
