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


def check_only(only: Sequence[str], studies: Sequence[Study]) -> None:
    """Refuse a part that none of the studies has."""
    known = tuple(dict.fromkeys(part for study in studies for part in study.parts))
    for name in only:
        checks.one_of("only", name, known)


def check_keep(keep: Sequence[str], studies: Sequence[Study]) -> None:
    """Refuse a recipe that none of the studies has: its models would be removed, and those that were meant too."""
    known = tuple(dict.fromkeys(part for study in studies for part in study.parts if "/" not in part))
    for name in keep:
        checks.one_of("keep", name, ("none", *known))
