"""Fewer experts in every MoE layer of a trained model, by merging or dropping them.

from grmoe.prune import Plan, run, save, show

result = run(Plan(model="runs/first", experts=6))
save(result, Path("runs/first/prune"), write=True)
"""

from grmoe.prune.results import Result
from grmoe.prune.saving import save
from grmoe.prune.surgery import Plan, run
from grmoe.prune.tables import show

__all__ = ["Plan", "Result", "run", "save", "show"]
