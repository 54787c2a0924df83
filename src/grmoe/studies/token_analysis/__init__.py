"""Specialists, entropy by token type, and κ against specialisation (`grmoe reproduce token-analysis`)."""

from grmoe.studies.token_analysis.study import STUDY, write

__all__ = ["STUDY", "write"]
