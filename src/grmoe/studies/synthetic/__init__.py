"""The paper's synthetic routing study (`grmoe synthetic`).

from grmoe.studies.synthetic import Config, Plan, run, save, show

result = run(Plan(out=Path("runs/synthetic"), config=Config.quick()))
save(result, Path("runs/synthetic"))
"""

from grmoe.studies.synthetic.page import STUDY
from grmoe.studies.synthetic.results import Config
from grmoe.studies.synthetic.saving import save
from grmoe.studies.synthetic.study import Plan, Result, run
from grmoe.studies.synthetic.tables import show

__all__ = ["STUDY", "Config", "Plan", "Result", "run", "save", "show"]
