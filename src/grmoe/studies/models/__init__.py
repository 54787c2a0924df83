"""The store of trained models: a job trains one recipe with one seed, measures it, and keeps the numbers.

Studies name the jobs they need. A model that several studies need is trained once.
"""

from grmoe.studies.models.recipes import Base, Recipe, find_recipe, small, vary
from grmoe.studies.models.runner import Job, run_folder, run_jobs
from grmoe.studies.models.store import Point, Row, Run, Store, Trained
from grmoe.studies.tasks import StudyError

__all__ = [
    "Base", "Job", "Point", "Recipe", "Row", "Run", "Store", "StudyError", "Trained", "find_recipe", "run_folder",
    "run_jobs", "small", "vary",
]  # fmt: skip
