"""The paper's main comparison at an affordable size: routers on the same text, with the same tokens and experts per
token.

Every run is its own `grmoe train`, several at a time. An interrupted one continues when the study is started again.
Intervals are Student's over seeds; those of counts are Wilson's.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from grmoe.config import to_yaml
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import read_log
from grmoe.studies.synthetic.evaluation import wilson


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
    experts: float
    """Experts per token."""
    tokens: int
    """Tokens trained on."""


def study(
    base: TrainConfig,
    methods: list[str],
    seeds: int,
    out: Path,
    at_once: int,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Run]:
    """Train every method with every seed. When a run fails, raise with its last lines and start no other."""
    failed = threading.Event()
    out.mkdir(parents=True, exist_ok=True)
    plan = [(method, seed) for seed in range(seeds) for method in dict.fromkeys(methods)]

    def one(job: tuple[str, int]) -> Run:
        method, seed = job
        if failed.is_set():  # a thread may take its next job before the pool learns of a failure
            raise RuntimeError("another run failed")
        folder = out / f"{method}-{seed}"
        model = base.model | METHODS[method].model
        config = replace(base, model=model, seed=base.seed + seed, out=str(folder))
        settings = out / f"{method}-{seed}.yaml"
        settings.write_text(to_yaml(config))
        command = [sys.executable, "-m", "grmoe", "train", str(settings), "--resume"]
        with (out / f"{method}-{seed}.txt").open("w") as screen:
            status = subprocess.run(command, stdout=screen, stderr=subprocess.STDOUT, check=False).returncode
        if status:
            failed.set()
            said = (out / f"{method}-{seed}.txt").read_text().splitlines()[-5:]
            raise RuntimeError(f"{' '.join(command)} ended with status {status}:\n" + "\n".join(said))
        run = read_run(folder, method, base.seed + seed)
        tell(f"{METHODS[method].label}, seed {run.seed}: perplexity {run.perplexity:.2f}")
        return run

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, plan))


def read_run(folder: Path, method: str, seed: int) -> Run:
    lines = read_log(folder)
    trained, held_out = ([line for line in lines if line["kind"] == kind] for kind in ("train", "validation"))
    if not trained or not held_out:
        raise RuntimeError(f"{folder} has lost its log; remove it, and the study trains it again")
    last = held_out[-1]
    if "collapsed_layers_paper" not in last:
        raise RuntimeError(
            f"{folder} was logged by an older version; remove it, and the study trains it again"
        )
    return Run(
        method=method,
        seed=seed,
        loss=last["loss"],
        perplexity=last["perplexity"],
        load_cv=last["load_cv"],
        min_load=last["min_load"],
        collapsed=last["collapsed_layers"] > 0,
        collapsed_paper=last["collapsed_layers_paper"] > 0,
        entropy=last["entropy"],
        experts=last["experts_per_token"],
        tokens=trained[-1]["tokens"],
    )


def interval(values: list[float], level: float = 0.95) -> float | None:
    """Half the width of Student's interval of the mean; None for a single value."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    return float(t.ppf((1 + level) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)))


def rows(runs: list[Run]) -> list[dict[str, Any]]:
    """One row per method: means over seeds, and the difference to GrMoE seed by seed."""
    found = []
    ours = {r.seed: r.loss for r in runs if r.method == "grmoe"}
    for method in dict.fromkeys(r.method for r in runs):
        mine = [r for r in runs if r.method == method]
        paired = [r.loss - ours[r.seed] for r in mine if r.seed in ours]
        losses = [r.loss for r in mine]
        found.append(
            {
                "method": method,
                "label": METHODS[method].label,
                "seeds": len(mine),
                "loss": statistics.mean(losses),
                "loss_interval": interval(losses),
                "perplexity": statistics.mean(r.perplexity for r in mine),
                "perplexity_interval": interval([r.perplexity for r in mine]),
                "over_grmoe": statistics.mean(paired) if paired else None,
                "over_grmoe_interval": interval(paired) if paired else None,
                "load_cv": statistics.mean(r.load_cv for r in mine),
                "load_cv_interval": interval([r.load_cv for r in mine]),
                "min_load": min(r.min_load for r in mine),
                "collapsed": sum(r.collapsed for r in mine),
                "collapsed_paper": sum(r.collapsed_paper for r in mine),
                "entropy": statistics.mean(r.entropy for r in mine),
                "experts": statistics.mean(r.experts for r in mine),
                "tokens": mine[0].tokens,
            }
        )
    return found


HEADINGS = (
    "router", "perplexity", "loss", "loss over GrMoE's", "load CV", "min load", "collapsed (95 %)", "< 1 %", "H",
    "experts",
)  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    def plus_minus(name: str, digits: int, sign: str = "") -> str:
        if row[name] is None or (name == "over_grmoe" and row["method"] == "grmoe"):
            return "–"
        half = row[f"{name}_interval"]
        return f"{row[name]:{sign}.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")

    low, high = wilson(row["collapsed"], row["seeds"])
    return [
        row["label"],
        plus_minus("perplexity", 2),
        plus_minus("loss", 4),
        plus_minus("over_grmoe", 4, "+"),
        plus_minus("load_cv", 3),
        f"{row['min_load']:.3f}",
        f"{row['collapsed']}/{row['seeds']} ({100 * low:.0f}–{100 * high:.0f} %)",
        f"{row['collapsed_paper']}/{row['seeds']}",
        f"{row['entropy']:.2f}",
        f"{row['experts']:.2f}",
    ]


def rich_table(found: list[dict[str, Any]]) -> Table:
    first = found[0]
    table = Table(title=_title(first), title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "router" else "right")
    for row in found:
        table.add_row(*cells(row))
    return table


def write_results(runs: list[Run], base: TrainConfig, out: Path) -> Path:
    """results.json with every run, table.md with the means."""
    found = rows(runs)
    numbers = out / "results.json"
    config = to_yaml(base)
    numbers.write_text(
        json.dumps({"config": config, "rows": found, "runs": [asdict(r) for r in runs]}, indent=1)
    )
    lines = [_title(found[0]), "", f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    lines += [f"| {' | '.join(cells(row))} |" for row in found]
    (out / "table.md").write_text("\n".join(lines) + "\n")
    return numbers


def _title(row: dict[str, Any]) -> str:
    return f"{row['tokens'] / 1e6:.1f} M tokens, {row['seeds']} seeds; ±: 95 % interval of the mean"
