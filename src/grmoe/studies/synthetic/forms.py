"""Claims on GrMoE, tried in two forms: as in the paper, and ours, with a balanced prior and d/k scaling."""

from __future__ import annotations

from collections.abc import Callable

from grmoe.studies.judging import with_change
from grmoe.studies.page import Verdict
from grmoe.studies.synthetic.questions import Found
from grmoe.studies.synthetic.results import MethodResult

PAPER_FORM, OUR_FORM = FORMS = ("grmoe_paper", "grmoe")


def by_form(judge: Callable[[str], Verdict]) -> Verdict:
    """The verdict for the paper's form, or with a change for ours. `judge` gets the key of a method."""
    return with_change(*map(judge, FORMS))


def both(found: Found, setting: str, show: Callable[[MethodResult], str]) -> str:
    """Two numbers side by side."""
    paper, ours = (show(found(setting, key)) for key in FORMS)
    return f"as in the paper {paper}; ours {ours}"


def why(verdict: Verdict, reason: str) -> str:
    """The reason, after the change that it needed."""
    return f"With our prior and scaling. {reason}" if verdict is Verdict.CHANGED else reason
