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
    UNTESTABLE = "not testable here"
    OPEN = "not measured yet"
    """What would decide it has no results."""


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, and what came out."""

    where: str
    """Section, table or figure of the paper."""
    text: str
    """What the paper says, with its number."""
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
