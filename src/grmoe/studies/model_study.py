"""A study that is made of trained models: which ones it needs, and the page that their numbers make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grmoe.studies.models.recipes import Base, Recipe
from grmoe.studies.models.runner import Job, has_results
from grmoe.studies.models.store import Run, Store, describe_data
from grmoe.studies.page import Page
from grmoe.studies.queue import Needs, QueueStudy
from grmoe.studies.study import Place, State
from grmoe.tables import Table


@dataclass(frozen=True)
class Group:
    """Recipes on one base, each with the same seeds."""

    base: Base
    recipes: tuple[Recipe, ...]
    seeds: int
    """How many."""
    first: int = 0
    """The first seed; the others follow it."""


def list_jobs(groups: Sequence[Group], place: Place | None = None) -> list[Job]:
    """All seeds of a recipe are spread, so that an interrupted study has the first seeds of every recipe."""
    seeds, steps = (None, None) if place is None else (place.seeds, place.steps)
    found = [
        (seed, Job(group.base.with_steps(steps), recipe, seed))
        for group in groups
        for recipe in group.recipes
        if place is None or place.wants(recipe.name) or place.wants(on_base(group.base, recipe))
        for seed in range(group.first, group.first + (seeds or group.seeds))
    ]
    return [job for _, job in sorted(found, key=lambda pair: pair[0])]


def on_base(base: Base, recipe: Recipe) -> str:
    """A recipe on one base, as `--only` names it: small-2500/grmoe."""
    return f"{base.name}/{recipe.name}"


@dataclass(frozen=True, kw_only=True)
class ModelStudy(QueueStudy):
    """A `Study` with jobs that train models."""

    name: str
    title: str
    where: str
    groups: tuple[Group, ...]
    write: Callable[[Store], Page]
    """The page, from the store alone."""

    def jobs(self, place: Place | None = None) -> list[Job]:
        return list_jobs(self.groups, place)

    @property
    def parts(self) -> list[str]:
        """Recipes, and where a name stands on several bases, each of them too."""
        names = list(dict.fromkeys(recipe.name for group in self.groups for recipe in group.recipes))
        pairs = {on_base(g.base, r): r.name for g in self.groups for r in g.recipes}
        bases = Counter(pairs.values())
        return [*names, *(pair for pair, name in pairs.items() if bases[name] > 1)]

    def state(self, results: Path) -> State:
        store, jobs = Store(results), self.jobs()
        return State(sum(has_results(store, job) for job in jobs), len(jobs))

    def needs(self, place: Place) -> Needs:
        return Needs(jobs=self.jobs(place))

    def page(self, results: Path) -> Page:
        store = Store(results)
        page = self.write(store)
        texts, origins = self._sources(store)
        if not texts:
            return page
        return replace(
            page,
            tables=[*page.tables, origins],
            notes=[*page.notes, f"Text: {'; '.join(texts)}. Raw numbers: `results/models`."],
        )

    def _sources(self, store: Store) -> tuple[list[str], Table]:
        """The text, and a table of where the models come from: revision and machine."""
        found: Counter[tuple[str, str, str]] = Counter()
        texts: dict[str, None] = {}
        for group in self.groups:
            for recipe in group.recipes:
                trained = store.read(group.base, recipe)
                for run in [] if trained is None else trained.runs:
                    found[run.revision, run.machine, run.source or "–"] += 1
                if trained is not None:
                    texts[describe_data(trained.data)] = None
        table = Table("Where the models come from", ["revision", "machine", "taken from", "models"], left=3)
        for origin, count in sorted(found.items()):
            table.add(*origin, str(count))
        return list(texts), table


def runs_of(store: Store, base: Base, *recipes: Recipe) -> dict[str, list[Run]]:
    """Models by the name of their recipe."""
    return {recipe.name: store.runs(base, recipe) for recipe in recipes}
