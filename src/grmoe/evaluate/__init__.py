"""How good a model is (`grmoe eval`): perplexity of texts and lm-evaluation-harness tasks, at any α.

`texts` reads, `perplexity` measures, `harness` runs tasks, `run` goes through them, `results` and `report` show and
save what they found.
"""

from grmoe.evaluate.report import save, show
from grmoe.evaluate.results import Result
from grmoe.evaluate.run import Plan, run

__all__ = ["Plan", "Result", "run", "save", "show"]
