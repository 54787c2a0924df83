"""All studies, in the order of the paper. Each is a module of this package with a `STUDY`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from grmoe import checks
from grmoe.studies.study import Study

# Names as in `grmoe reproduce NAME`; the module has `_` for `-`.
NAMES = (
    "synthetic", "alpha-sweep", "synthetic-map", "learning-rates", "language-model", "gates", "scaling", "dynamics",
    "post-hoc", "budgets", "promise", "ablations", "separation", "token-analysis", "depth",
    "overhead", "scale", "normalizer", "learned-normalizer", "downstream", "future",
)  # fmt: skip


def find_study(name: str) -> Study:
    checks.one_of("study", name, NAMES)
    study: Study = importlib.import_module(f"grmoe.studies.{name.replace('-', '_')}").STUDY
    return study


def find_studies(names: list[str]) -> list[Study]:
    """The named studies; "all" or no name: every one."""
    return [find_study(name) for name in (NAMES if not names or "all" in names else dict.fromkeys(names))]


def list_parts(studies: Sequence[Study]) -> dict[str, str]:
    """What `--only` takes: the parts of the studies, each with the studies that have it."""
    names: dict[str, list[str]] = {}
    for study in studies:
        for part in dict.fromkeys(study.parts):
            names.setdefault(part, []).append(study.name)
    return {part: ", ".join(found) for part, found in names.items()}


def list_kept(studies: Sequence[Study]) -> dict[str, str]:
    """What `--keep` takes: the recipes of the studies, without a base."""
    parts = {part: found for part, found in list_parts(studies).items() if "/" not in part}
    return {"none": "no model is kept"} | parts


def check_only(only: Sequence[str], studies: Sequence[Study]) -> None:
    """Refuse a part that none of the studies has."""
    known = tuple(list_parts(studies))
    for name in only:
        checks.one_of_many("part (--only)", name, known, "grmoe reproduce STUDY --only ?")


def check_keep(keep: Sequence[str], studies: Sequence[Study]) -> None:
    """Refuse a recipe that none of the studies has: its models would be removed, and those that were meant too."""
    known = tuple(list_kept(studies))
    for name in keep:
        checks.one_of_many("recipe (--keep)", name, known, "grmoe reproduce STUDY --keep ?")
