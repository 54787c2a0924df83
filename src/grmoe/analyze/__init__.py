"""What each expert does (`grmoe analyze`): the paper's token-level study, for any router.

`study` routes a text, `tally` counts, `statistics` and `layers` turn counts into figures, `results` holds them,
`figures` and `report` show and save them.
"""

from grmoe.analyze.results import Analysis, Result
from grmoe.analyze.study import Plan, analyze, run
from grmoe.analyze.tables import save, show

__all__ = ["Analysis", "Plan", "Result", "analyze", "run", "save", "show"]
