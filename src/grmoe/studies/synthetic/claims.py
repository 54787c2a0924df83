"""All that the paper says about its synthetic task, with verdicts from results."""

from __future__ import annotations

from grmoe.studies.page import Claim
from grmoe.studies.synthetic import accuracy_claims, load_claims
from grmoe.studies.synthetic.oracle import OracleRow
from grmoe.studies.synthetic.questions import Found


def claims(found: Found, oracle: list[OracleRow]) -> list[Claim]:
    questions = (*accuracy_claims.QUESTIONS, accuracy_claims.hard_numbers(oracle), *load_claims.QUESTIONS)
    return [question.answer(found) for question in questions]
