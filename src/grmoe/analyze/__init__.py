"""What each expert does: the paper's token-level study for any router (`grmoe analyze`)."""

from grmoe.analyze.results import Analysis
from grmoe.analyze.study import analyze
from grmoe.probe.token_types import token_types

__all__ = ["Analysis", "analyze", "token_types"]
