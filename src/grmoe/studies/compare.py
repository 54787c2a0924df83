"""Recipes side by side on your own text: same tokens, several seeds, differences by seed.

It uses the store of trained models in a folder of its own: finished models are skipped, interrupted ones continue.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grmoe import checks
from grmoe.files import write_file
from grmoe.runs.folder import read_log
from grmoe.studies.models import Base, Job, Recipe, Run, Store, run_folder, run_jobs
from grmoe.studies.models.summary import model_table, short_name, texts_of
from grmoe.studies.study import Place
from grmoe.tables import Table
from grmoe.terminal import Progress, silent
from grmoe.train.curves import draw_curves

DEFAULT = ("grmoe", "grmoe-amortised", "softmax-load", "softmax-bias")
_NAME = "compare"  # folder of the models inside `out`


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every recipe with every seed."""

    tree: Mapping[str, Any]
    """Settings that all models share, as `grmoe.config.read_tree` gives them."""
    recipes: tuple[Recipe, ...]
    """The first is what others are compared with."""
    out: Path
    seeds: int = 3
    first_seed: int = 0
    texts: tuple[Path, ...] = ()
    """Other texts to measure on, beside the validation split."""
    tokens: int | None = None
    """Of each text. Default: 8192, on a GPU 131072."""
    at_once: int = 1

    def __post_init__(self) -> None:
        checks.require(bool(self.recipes), "recipes must name at least one")
        names = [recipe.name for recipe in self.recipes]
        checks.require(
            len(set(names)) == len(names), f"recipes must have different names, got {', '.join(names)}"
        )
        for key, option in (("seed", "--first-seed and --seeds"), ("out", "--out")):
            checks.require(key not in self.tree, f"{key} is not a setting of a comparison: give {option}")

    @property
    def base(self) -> Base:
        return Base(_NAME, tuple(_words(self.tree)))

    @property
    def jobs(self) -> list[Job]:
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        return [Job(self.base, recipe, seed) for seed in seeds for recipe in self.recipes]

    @property
    def place(self) -> Place:
        data = self.tree.get("data", {}).get("path", "runs/data")
        return Place(
            results=self.out, work=self.out, data=Path(data), texts=self.texts, tokens=self.tokens,
            device=self.tree.get("device", "auto"), at_once=self.at_once,
        )  # fmt: skip


@dataclass(frozen=True)
class Result:
    plan: Plan
    models: dict[str, list[Run]]
    """By the name of their recipe."""


def run(plan: Plan, progress: Progress = silent) -> Result:
    """Train and measure every model that has no results yet. When one fails, the others finish first."""
    store, wanted = Store(plan.out), {job.seed for job in plan.jobs}
    _check_texts(plan, store)
    run_jobs(plan.jobs, plan.place, progress)
    found = {r.name: [m for m in store.runs(plan.base, r) if m.seed in wanted] for r in plan.recipes}
    return Result(plan, found)


def _check_texts(plan: Plan, store: Store) -> None:
    """Raise if a finished model was measured on other text: losses of different texts cannot be compared."""
    texts = {text.name for text in plan.texts}
    for job in plan.jobs:
        for found in store.runs(plan.base, job.recipe):
            if found.seed != job.seed:
                continue
            has = {row.text for row in found.rows} - {"validation"}
            checks.require(
                has == texts,
                f"{store.path(plan.base, job.recipe)} was measured on texts {sorted(has)}: give the same --text, or "
                "another --out",
            )


def show(result: Result) -> Iterator[Table | str]:
    """One table per text. Every model is shown as it was trained and with fewer experts."""
    first, *_ = result.plan.recipes
    every = [run for runs in result.models.values() for run in runs]
    for text in texts_of(every):
        lines: list[tuple[str, list[Run], str | None]] = []
        for recipe in result.plan.recipes:
            runs = result.models[recipe.name]
            names = dict.fromkeys(row.setting for model in runs for row in model.rows)
            trained = runs[0].trained
            lines += [
                (
                    recipe.label if name == trained else f"{recipe.label}: {name}",
                    runs,
                    _setting(name, trained),
                )
                for name in names
            ]
        title = f"{short_name(text)}; ±: 95 % interval over seeds; difference to {first.label}, by seed"
        yield model_table(title, lines, (result.models[first.name], None), text, "trained as: computed at")


def _setting(name: str, trained: str) -> str | None:
    return None if name == trained else name


def save(result: Result, out: Path) -> dict[str, Path]:
    """table.md, curves.png with the first seed of each recipe, and every number in models/.

    A model whose folder was removed, to save room, has numbers and no curve.
    """
    written = {"Numbers": out / "models" / _NAME, "Table": out / "table.md"}
    tables = [part for part in show(result) if isinstance(part, Table)]
    write_file(written["Table"], "\n\n".join(f"{t.title}\n\n{t.markdown()}\n" for t in tables).encode())
    plan = result.plan
    first = [run_folder(out, Job(plan.base, recipe, plan.first_seed)) for recipe in plan.recipes]
    drawn = [folder for folder in first if read_log(folder)]
    return {**written, "Figure": draw_curves(drawn, out / "curves.png")} if drawn else written


def _words(tree: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Settings as `key=value`. A value is written as JSON, which YAML reads."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _words(value, f"{where}{name}.")
        else:
            yield f"{where}{name}={json.dumps(value, ensure_ascii=False)}"
