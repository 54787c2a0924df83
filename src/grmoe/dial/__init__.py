"""Choose the experts per token of a trained model: the cheapest setting that meets a target, with certificates.

    from grmoe.dial import Plan, Target, run, save, show

    result = run(Plan(model="runs/first", target=Target("perplexity", 0.01)))
    save(result, Path("runs/first/dial"), write=True)

`apply(model, mass((1.8, 5.0), tau=0.45, cap=2))` sets a model by hand.
"""

from grmoe.dial.calibration import Plan, run
from grmoe.dial.results import Result
from grmoe.dial.saving import save
from grmoe.dial.setting import Setting, apply, at_least, current, mass, top_k
from grmoe.dial.tables import show
from grmoe.dial.target import Target

__all__ = [
    "Plan", "Result", "Setting", "Target", "apply", "at_least", "current", "mass", "run", "save", "show", "top_k",
]  # fmt: skip
