"""One model, every budget: recipes of elastic training beside models trained for one budget only.

A job trains one model and then measures it with other numbers of experts per token, on held-out text and on other
texts. Jobs run side by side. What is measured is saved job by job, so an interrupted study continues.

Nothing here is tuned to agree with anything: a recipe that does worse than full budgets stays in the table.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from grmoe import checks
from grmoe.config import to_yaml
from grmoe.dial.setting import Setting, apply, current, mass, top_k
from grmoe.files import write_file
from grmoe.model import GrmoeConfig
from grmoe.probe.losses import measure
from grmoe.probe.windows import read_texts
from grmoe.runs.config import TrainConfig
from grmoe.runs.open import open_model
from grmoe.studies.intervals import out_of, plus_minus, student
from grmoe.studies.quality import StudyError
from grmoe.tables import Table
from grmoe.terminal import Progress, Steps, silent

TAUS = (0.3, 0.5, 0.7)  # of the mass rule at the trained α, between the top-k
LOG_LINES = 5  # of a failed training that are shown


@dataclass(frozen=True)
class Recipe:
    label: str
    """Name in the table."""
    settings: tuple[str, ...]
    """What it adds to the command `grmoe train`."""


def _elastic(unit: str, rule: str, *more: str) -> tuple[str, ...]:
    return f"elastic.unit={unit}", f"elastic.rule={rule}", *more


RECIPES = {
    "full": Recipe("full budget only", ("elastic.unit=off",)),
    "token_mass": Recipe("per token, mass", _elastic("token", "mass")),
    "token_count": Recipe("per token, count", _elastic("token", "count")),
    "sequence_count": Recipe("per sequence, count", _elastic("sequence", "count")),
    "layer_count": Recipe("per layer, count", _elastic("layer", "count")),
    "layer_count_full": Recipe(
        "per layer, count, 80 % full steps", _elastic("layer", "count", "elastic.full_share=0.8")
    ),
    "step_count": Recipe("per step, count", _elastic("step", "count")),
    "token_mass_full": Recipe(
        "per token, mass, half full steps", _elastic("token", "mass", "elastic.full_share=0.5")
    ),
    "token_mass_distill": Recipe(
        "per token, mass, distilled", _elastic("token", "mass", "elastic.distill=1.0")
    ),
    "token_mass_alpha": Recipe(
        "per token, mass, α sampled",
        _elastic("token", "mass", "alpha.schedule=sample", "alpha.low=0.7", "alpha.high=1.5"),
    ),
    "token_mass_computed": Recipe(
        "per token, mass, prior counts the computed",
        _elastic("token", "mass", "routing.prior_counts=computed"),
    ),
    "token_mass_both": Recipe(
        "per token, mass, prior counts both", _elastic("token", "mass", "routing.prior_counts=both")
    ),
    "one": Recipe("one expert only", ("model.num_experts_per_tok=1", "elastic.unit=off")),
    "two": Recipe("two experts only", ("model.num_experts_per_tok=2", "elastic.unit=off")),
    "four": Recipe("four experts only", ("model.num_experts_per_tok=4", "elastic.unit=off")),
}
DEFAULT = ("full", "token_mass", "one")


def find_recipe(text: str) -> tuple[str, Recipe]:
    """A recipe by its name, or one of your own: "NAME: key=value key=value …"."""
    name, colon, settings = (part.strip() for part in text.partition(":"))
    if colon:
        checks.require(
            name.replace("_", "").replace("-", "").isalnum() and name not in RECIPES,
            f"a recipe of your own must have a new name of letters, digits, - and _, got {name!r}",
        )
        return name, Recipe(name, tuple(settings.split()))
    return name, RECIPES[checks.one_of("recipe", name, tuple(RECIPES))]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every recipe with every seed."""

    base: TrainConfig
    """What all jobs share."""
    out: Path
    """Folder for the runs and what is measured of them."""
    recipes: tuple[str, ...] = DEFAULT
    """Keys of `RECIPES`, or recipes of your own (see `find_recipe`). The first is what others are compared with."""
    seeds: int = 3
    first_seed: int = 0
    texts: tuple[str, ...] = ()
    """Other texts to measure on, beside the validation split."""
    tokens: int | None = None
    """Of each text. Default: 8192, on a GPU 131072."""
    at_once: int = 1
    """Jobs that run at the same time."""

    def __post_init__(self) -> None:
        checks.require(bool(self.found), "recipes must name at least one")
        short = len(self.found) == len(set(self.recipes))
        checks.require(short, f"recipes must have different names, got {', '.join(self.recipes)}")

    @property
    def found(self) -> dict[str, Recipe]:
        """The recipes by name, in order."""
        return dict(find_recipe(text) for text in self.recipes)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model at one setting on one text."""

    recipe: str
    seed: int
    text: str
    """"validation", or the name of the file."""
    setting: str
    """"top-1", "top-2", "mass 0.5", …"""
    experts_per_token: float
    loss: float
    """Nats per token."""
    load_cv: float
    """Mean over MoE layers."""
    min_load: float
    """Smallest load over experts and layers, as a share of the fair load."""
    collapsed: bool


@dataclass(frozen=True)
class Result:
    plan: Plan
    rows: list[Row]


def run(plan: Plan, progress: Progress = silent) -> Result:
    """Train and measure every job that has no results yet. When one fails, the others finish first."""
    plan.out.mkdir(parents=True, exist_ok=True)
    _claim(plan)
    write_file(plan.out / "base.yaml", to_yaml(plan.base).encode())
    jobs = [(recipe, plan.first_seed + i) for i in range(plan.seeds) for recipe in plan.found]
    steps = Steps(progress, len(jobs))
    rows, failures = [], []
    with ThreadPoolExecutor(plan.at_once) as pool:
        progress("training", 0, len(jobs))
        for (recipe, seed), done in zip(jobs, pool.map(lambda job: _attempt(plan, *job), jobs), strict=True):
            steps(f"{recipe}, seed {seed}")
            if isinstance(done, str):
                failures.append(done)
            else:
                rows += done
    if failures:
        raise StudyError("\n".join(failures))
    return Result(plan, rows)


def _claim(plan: Plan) -> None:
    """Refuse a folder with jobs of another study: their numbers would be taken for this one's."""
    place = plan.out / "study.json"
    mine: dict[str, Any] = {
        "settings": to_yaml(plan.base),
        "texts": list(plan.texts),
        "tokens": plan.tokens,
        "recipes": {name: list(recipe.settings) for name, recipe in plan.found.items()},
    }
    if place.is_file():
        before = json.loads(place.read_text(encoding="utf-8"))
        both = before["recipes"].keys() & mine["recipes"].keys()
        same = all(before[key] == mine[key] for key in ("settings", "texts", "tokens")) and all(
            before["recipes"][name] == list(plan.found[name].settings) for name in both
        )
        checks.require(same, f"{plan.out} holds a study with other settings; give another folder (--out)")
        mine["recipes"] = before["recipes"] | mine["recipes"]
    write_file(place, json.dumps(mine, indent=1).encode())


def _attempt(plan: Plan, recipe: str, seed: int) -> list[Row] | str:
    """A job's rows, or what went wrong."""
    kept = plan.out / f"{recipe}-{seed}.json"
    if kept.is_file():
        return [Row(**row) for row in json.loads(kept.read_text(encoding="utf-8"))]
    folder, screen = plan.out / f"{recipe}-{seed}", plan.out / f"{recipe}-{seed}.txt"
    command = [
        sys.executable,
        "-m",
        "grmoe",
        "train",
        str(plan.out / "base.yaml"),
        f"out={folder}",
        f"seed={seed}",
    ]
    with screen.open("w") as file:
        done = subprocess.run(
            [*command, *plan.found[recipe].settings, "--resume"],
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        return _failure(recipe, seed, done.returncode, screen)
    # In a process of its own: CUDA does not fork, and memory must come back.
    worker = get_context("spawn").Process(target=measure_run, args=(plan, recipe, seed, kept))
    worker.start()
    worker.join()
    if worker.exitcode or not kept.is_file():
        return f"{recipe}, seed {seed}: measuring ended with status {worker.exitcode}; its error is above"
    return [Row(**row) for row in json.loads(kept.read_text(encoding="utf-8"))]


def _failure(recipe: str, seed: int, status: int, screen: Path) -> str:
    last = "\n".join(screen.read_text(encoding="utf-8").splitlines()[-LOG_LINES:])
    return f"{recipe}, seed {seed}: training ended with status {status}:\n{last}"


def settings_of(config: GrmoeConfig) -> dict[str, Setting]:
    """What a model is measured at: every top-k from one to the trained K (powers of two), and mass between them."""
    alphas, cap = current(config).alphas, config.num_experts_per_tok or 1
    counts = sorted({cap, *(2**i for i in range(cap.bit_length()) if 2**i <= cap)})
    found = {f"top-{k}": top_k(alphas, k) for k in counts}
    return found | ({f"mass {tau:g}": mass(alphas, tau, cap) for tau in TAUS} if cap > 1 else {})


def measure_run(plan: Plan, recipe: str, seed: int, out: Path) -> None:
    """Measure a trained run at every setting on every text, and write the rows."""
    loaded = open_model(plan.out / f"{recipe}-{seed}", "last", dtype="served")
    model = loaded.model
    texts = read_texts((None, *plan.texts), loaded, None, plan.tokens)
    rows = []
    for name, setting in settings_of(model.config).items():
        apply(model, setting)
        for text in texts:
            found = measure(model, text)
            rows.append(
                Row(
                    recipe=recipe, seed=seed, text=Path(text.name).name, setting=name, loss=found.loss,
                    experts_per_token=found.experts_per_token, load_cv=found.load_cv, min_load=found.min_load,
                    collapsed=found.collapsed,
                )
            )  # fmt: skip
    write_file(out, json.dumps([asdict(row) for row in rows], indent=1).encode())


def summary(rows: list[Row], text: str, against: str) -> list[dict[str, Any]]:
    """One entry per recipe and setting: means over seeds, and the difference to recipe `against` at its full budget,
    paired by seed."""
    here = [row for row in rows if row.text == text]
    full = {
        row.seed: row.loss for row in here if row.recipe == against and row.setting == _full(here, against)
    }
    found = []
    for recipe, setting in dict.fromkeys((row.recipe, row.setting) for row in here):
        chosen = [row for row in here if (row.recipe, row.setting) == (recipe, setting)]
        paired = [row.loss - full[row.seed] for row in chosen if row.seed in full]
        losses = [row.loss for row in chosen]
        found.append(
            {
                "recipe": recipe,
                "setting": setting,
                "seeds": len(chosen),
                "experts_per_token": statistics.mean(row.experts_per_token for row in chosen),
                "loss": statistics.mean(losses),
                "loss_interval": student(losses),
                "over": statistics.mean(paired) if paired else None,
                "over_interval": student(paired),
                "load_cv": statistics.mean(row.load_cv for row in chosen),
                "min_load": min(row.min_load for row in chosen),
                "collapsed": sum(row.collapsed for row in chosen),
            }
        )
    return found


def _full(rows: list[Row], recipe: str) -> str:
    """The top-k with the most experts that a recipe was measured at."""
    names = {row.setting for row in rows if row.recipe == recipe and row.setting.startswith("top-")}
    return max(names, key=lambda name: int(name.removeprefix("top-")), default="")


def table(rows: list[Row], text: str, labels: dict[str, str]) -> Table:
    """labels: of the recipes, by name. The first is what others are compared with."""
    against, *_ = labels
    found = summary(rows, text, against)
    title = f"{text}, {found[0]['seeds']} seeds; ±: 95 % interval; difference to {labels[against]}, by seed"
    shown = Table(
        title,
        ["trained", "computed", "experts", "loss", "difference", "load CV", "min load", "collapsed"],
        left=2,
    )
    last = None
    for row in found:
        if last not in (None, row["recipe"]):
            shown.end_section()
        last = row["recipe"]
        shown.add(
            labels[row["recipe"]],
            row["setting"],
            f"{row['experts_per_token']:.2f}",
            plus_minus(row["loss"], row["loss_interval"], 4),
            "–" if row["over"] is None else plus_minus(row["over"], row["over_interval"], 4, "+"),
            f"{row['load_cv']:.3f}",
            f"{row['min_load']:.2f}",
            out_of(row["collapsed"], row["seeds"]),
        )
    return shown


def _tables(result: Result) -> list[Table]:
    labels = {name: recipe.label for name, recipe in result.plan.found.items()}
    return [table(result.rows, text, labels) for text in dict.fromkeys(row.text for row in result.rows)]


def show(result: Result) -> Iterator[Table | str]:
    yield from _tables(result)


def save(result: Result, out: Path) -> dict[str, Path]:
    """results.json with every row, table.md with the means."""
    against, *_ = result.plan.found
    texts = dict.fromkeys(row.text for row in result.rows)
    content = {
        "config": to_yaml(result.plan.base),
        "recipes": {name: recipe.settings for name, recipe in result.plan.found.items()},
        "rows": [asdict(row) for row in result.rows],
        "means": {text: summary(result.rows, text, against) for text in texts},
    }
    written = {"Numbers": out / "results.json", "Table": out / "table.md"}
    write_file(written["Numbers"], json.dumps(content, indent=1).encode())
    write_file(
        written["Table"], "\n\n".join(f"{t.title}\n\n{t.markdown()}" for t in _tables(result)).encode()
    )
    return written
