"""The paper's main comparison at an affordable size: routers on the same text, with the same tokens and experts per
token.

Every run is its own `grmoe train`, several at a time. An interrupted run continues when the study is started again.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grmoe import checks
from grmoe.config import to_yaml
from grmoe.files import write_file
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import read_log
from grmoe.studies.intervals import out_of, plus_minus, student
from grmoe.tables import Table
from grmoe.terminal import Progress, Steps, silent
from grmoe.train.curves import draw_curves


class StudyError(RuntimeError):
    """A run of the study failed, or left nothing to read. The message says what to do."""


@dataclass(frozen=True)
class Method:
    label: str
    """Name in the table."""
    model: dict[str, Any]
    """Model options that replace the configuration's."""


METHODS = {
    "grmoe": Method("GrMoE", {"router": "grassmann"}),
    "grmoe_linear": Method(
        "GrMoE with linear term", {"router": "grassmann", "router_options": {"linear": True}}
    ),
    "softmax_switch": Method(
        "Softmax, Switch loss", {"router": "softmax", "router_options": {"load_loss": 0.01}}
    ),
    "softmax_bias": Method(
        "Softmax, bias balancing", {"router": "softmax", "router_options": {"balance": True}}
    ),
    "softmax": Method("Softmax, no balancing", {"router": "softmax"}),
    "vmf": Method("vMF gate, bias balancing", {"router": "vmf", "router_options": {"balance": True}}),
}
DEFAULT = ("grmoe", "grmoe_linear", "softmax_switch", "softmax_bias")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every method with every seed."""

    base: TrainConfig
    """What all runs share. Each method fills in the router, each run its seed and folder."""
    out: Path
    """Folder for the runs."""
    methods: tuple[str, ...] = DEFAULT
    """Keys of `METHODS`."""
    seeds: int = 3
    """Runs per method."""
    at_once: int = 1
    """Runs to train at the same time."""

    def __post_init__(self) -> None:
        for method in self.methods:
            checks.one_of("method", method, tuple(METHODS))

    def folder(self, method: str, seed: int) -> Path:
        return self.out / f"{method}-{seed}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's last validation. Load is of the tokens an expert receives (`RoutingMetrics`)."""

    method: str
    seed: int
    loss: float
    """Nats per token."""
    perplexity: float
    load_cv: float
    """Mean over MoE layers."""
    min_load: float
    """Smallest over MoE layers."""
    collapsed: bool
    """In some layer an expert receives less than a tenth of its fair share."""
    collapsed_paper: bool
    """In some layer an expert receives less than 1 % of the tokens."""
    entropy: float
    """Mean entropy of the gate, in nats."""
    experts_per_token: float
    tokens: int
    """Tokens trained on."""


@dataclass(frozen=True)
class Result:
    plan: Plan
    runs: list[Run]


def run(plan: Plan, progress: Progress = silent) -> Result:
    """Train every method with every seed. When a run fails, raise with its last lines and start no other."""
    failed = threading.Event()
    plan.out.mkdir(parents=True, exist_ok=True)
    jobs = [(method, seed) for seed in range(plan.seeds) for method in dict.fromkeys(plan.methods)]

    def one(job: tuple[str, int]) -> Run:
        if failed.is_set():  # a thread may take its next job before the pool learns of a failure
            raise StudyError("another run failed")
        try:
            return _train(plan, *job)
        except StudyError:
            failed.set()
            raise

    steps = Steps(progress, len(jobs))
    runs = []
    with ThreadPoolExecutor(plan.at_once) as pool:
        progress("training", 0, len(jobs))
        for done in pool.map(one, jobs):
            steps(f"{METHODS[done.method].label}, seed {done.seed}: perplexity {done.perplexity:.2f}")
            runs.append(done)
    return Result(plan, runs)


def _train(plan: Plan, method: str, seed: int) -> Run:
    """One run in its own process. Its screen goes to a text file next to its folder."""
    folder, base = plan.folder(method, seed), plan.base
    config = replace(base, model=base.model | METHODS[method].model, seed=base.seed + seed, out=str(folder))
    settings, screen = folder.with_name(f"{folder.name}.yaml"), folder.with_name(f"{folder.name}.txt")
    settings.write_text(to_yaml(config))
    command = [sys.executable, "-m", "grmoe", "train", str(settings), "--resume"]
    with screen.open("w") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if status:
        last = "\n".join(screen.read_text().splitlines()[-5:])
        raise StudyError(f"{' '.join(command)} ended with status {status}:\n{last}")
    return read_run(folder, method, config.seed)


def read_run(folder: Path, method: str, seed: int) -> Run:
    lines = read_log(folder)
    trained, held_out = ([line for line in lines if line["kind"] == kind] for kind in ("train", "validation"))
    if not trained or not held_out:
        raise StudyError(f"{folder} has lost its log; remove it, and the study trains it again")
    last = held_out[-1]
    if "collapsed_layers_paper" not in last:
        raise StudyError(f"{folder} was logged by an older version; remove it, and the study trains it again")
    same = ("loss", "perplexity", "load_cv", "min_load", "entropy", "experts_per_token")
    return Run(
        method=method,
        seed=seed,
        collapsed=last["collapsed_layers"] > 0,
        collapsed_paper=last["collapsed_layers_paper"] > 0,
        tokens=trained[-1]["tokens"],
        **{name: last[name] for name in same},
    )


def rows(runs: list[Run]) -> list[dict[str, Any]]:
    """One row per method: means over seeds, and the difference to GrMoE seed by seed."""
    found = []
    ours = {r.seed: r.loss for r in runs if r.method == "grmoe"}
    for method in dict.fromkeys(r.method for r in runs):
        method_runs = [r for r in runs if r.method == method]
        paired = [r.loss - ours[r.seed] for r in method_runs if r.seed in ours]
        row: dict[str, Any] = {"method": method, "label": METHODS[method].label, "seeds": len(method_runs)}
        for name in ("loss", "perplexity", "load_cv"):
            values = [getattr(r, name) for r in method_runs]
            row |= {name: statistics.mean(values), f"{name}_interval": student(values)}
        row["over_grmoe"] = statistics.mean(paired) if paired else None
        row["over_grmoe_interval"] = student(paired)
        row["min_load"] = min(r.min_load for r in method_runs)
        row["collapsed"] = sum(r.collapsed for r in method_runs)
        row["collapsed_paper"] = sum(r.collapsed_paper for r in method_runs)
        row["entropy"] = statistics.mean(r.entropy for r in method_runs)
        row["experts_per_token"] = statistics.mean(r.experts_per_token for r in method_runs)
        row["tokens"] = method_runs[0].tokens
        found.append(row)
    return found


HEADINGS = (
    "router", "perplexity", "loss", "loss over GrMoE's", "load CV", "min load", "collapsed (95 %)", "< 1 %", "H",
    "experts",
)  # fmt: skip


def table(runs: list[Run]) -> Table:
    found = rows(runs)
    tokens, seeds = found[0]["tokens"] / 1e6, found[0]["seeds"]
    shown = Table(f"{tokens:.1f} M tokens, {seeds} seeds; ±: 95 % interval of the mean", HEADINGS)
    for row in found:
        difference = None if row["method"] == "grmoe" else row["over_grmoe"]
        shown.add(
            row["label"],
            plus_minus(row["perplexity"], row["perplexity_interval"], 2),
            plus_minus(row["loss"], row["loss_interval"], 4),
            "–" if difference is None else plus_minus(difference, row["over_grmoe_interval"], 4, "+"),
            plus_minus(row["load_cv"], row["load_cv_interval"], 3),
            f"{row['min_load']:.3f}",
            out_of(row["collapsed"], row["seeds"]),
            f"{row['collapsed_paper']}/{row['seeds']}",
            f"{row['entropy']:.2f}",
            f"{row['experts_per_token']:.2f}",
        )
    return shown


def show(result: Result) -> Iterator[Table | str]:
    yield table(result.runs)
    yield "The figure shows the first seed."


def save(result: Result, out: Path) -> dict[str, Path]:
    """results.json with every run, table.md with the means, curves.png with the first seed of each method."""
    plan, shown = result.plan, table(result.runs)
    runs = [asdict(r) for r in result.runs]
    content = {"config": to_yaml(plan.base), "rows": rows(result.runs), "runs": runs}
    out.mkdir(parents=True, exist_ok=True)
    written = {"Numbers": out / "results.json", "Table": out / "table.md"}
    write_file(written["Numbers"], json.dumps(content, indent=1).encode())
    write_file(written["Table"], f"{shown.title}\n\n{shown.markdown()}\n".encode())
    first = [plan.folder(method, 0) for method in dict.fromkeys(plan.methods)]
    return {**written, "Figure": draw_curves(first, out / "curves.png")}
