"""What a study found, as a page: claims of the paper with verdicts, tables and figures. Made from results alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from grmoe.tables import Table


class Verdict(StrEnum):
    HOLDS = "holds"
    CHANGED = "holds with a change"
    """The claim holds after a change that the reason names."""
    FAILS = "does not hold"
    UNDECIDED = "not decided"
    """It was measured, and the interval allows both."""
    UNTESTABLE = "not testable here"
    OPEN = "not measured yet"
    """What would decide it has no results."""


OWN = "not in the paper"  # the place of a question that the paper does not ask


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, or a question of our own, and what came out."""

    where: str
    """Section, table or figure of the paper, or `OWN`."""
    text: str
    """What the paper says, with its number. Of a question of our own: what would be good to hear."""
    ours: str
    """What was measured, with its interval. Empty if nothing was."""
    verdict: Verdict
    reason: str
    """Why, in one or two sentences. For `CHANGED`: which change."""


@dataclass(frozen=True)
class Figure:
    name: str
    """File name without a suffix."""
    caption: str
    draw: Callable[[Path], None]
    """Writes the picture to this path."""


@dataclass(frozen=True)
class Page:
    claims: list[Claim]
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Paragraphs: what was run, what departs from the paper, what is left."""
