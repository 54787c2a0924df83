"""Many comparisons at once: of twenty intervals at 95 %, one excludes zero by chance. Which stand all the same?"""

from __future__ import annotations

from collections.abc import Mapping

from grmoe.studies.intervals import chance, holm
from grmoe.studies.judging import MIN_SEEDS
from grmoe.studies.models.summary import Mean
from grmoe.tables import Table

LEVEL = 0.05  # the chance that any of a family is kept by mistake

Family = Mapping[str, Mean | None]
"""Differences by what is compared. None: not measured."""


def kept(family: Family) -> tuple[int, list[str], list[str]]:
    """(comparisons with enough seeds, those whose interval excludes zero, those that Holm's rule keeps)."""
    known = {
        name: gap
        for name, gap in family.items()
        if gap is not None and gap.half is not None and gap.seeds >= MIN_SEEDS
    }
    levels = holm([chance(gap.value, gap.half or 0.0, gap.seeds) for gap in known.values()])
    apart = [name for name, gap in known.items() if not gap.low <= 0 <= gap.high]
    return len(known), apart, [name for name, level in zip(known, levels, strict=True) if level < LEVEL]


def table(title: str, families: Mapping[str, Family]) -> Table:
    found = Table(
        title,
        ["differences", "how many", "intervals without zero", "left by Holm's rule", "which are left"],
        notes=True,
    )
    for name, family in families.items():
        count, apart, left = kept(family)
        which = "all" if left and len(left) == count else "; ".join(left) or "–"
        found.add(name, str(count), str(len(apart)), str(len(left)), which)
    return found
