"""How good a model is (`grmoe eval`): perplexity of texts and lm-evaluation-harness tasks, at any α.

`texts` reads, `perplexity` measures, `harness` runs tasks, `run` goes through them, `results` and `report` show and
save what they found.
"""

from grmoe.evaluate.results import Result
from grmoe.evaluate.run import Plan, run
from grmoe.evaluate.tables import save, show

__all__ = ["Plan", "Result", "run", "save", "show"]
