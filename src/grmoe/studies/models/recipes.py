"""The one place where methods and ways to train are named, each with its settings of `grmoe train`.

A base is what all models of a comparison share. A recipe adds the router, or the way to train. A setting says how many
experts a token gets. Every method has its own best learning rate in each setting (`RATES`) and its better form of
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grmoe import checks

POINTS = 20  # of a validation curve


@dataclass(frozen=True)
class Base:
    """What all models of a comparison share."""

    name: str
    """Folder of their results: results/models/NAME."""
    settings: tuple[str, ...]
    """Settings of `grmoe train`."""

    def with_steps(self, steps: int | None) -> Base:
        """The same for another number of steps. Its results go to a folder of their own."""
        if steps is None:
            return self
        changed = (f"steps={steps}", f"validation.every={max(1, steps // POINTS)}")
        return Base(f"{self.name}-for-{steps}", (*self.settings, *changed))


@dataclass(frozen=True)
class Recipe:
    name: str
    """File of its results: results/models/BASE/NAME.json."""
    label: str
    """Name in tables."""
    settings: tuple[str, ...]
    """What it adds to the base."""

    def __post_init__(self) -> None:
        plain = self.name.replace("_", "").replace("-", "").replace(".", "")
        checks.require(
            plain.isalnum(),
            f"the name of a recipe must have letters, digits, '.', '-' and '_' only, got {self.name!r}",
        )

    def plus(self, name: str, label: str, *settings: str) -> Recipe:
        """This recipe with more settings, under another name."""
        return Recipe(name, label, (*self.settings, *settings))

    def without_rate(self) -> Recipe:
        """This recipe at the base's learning rate, for models of another size."""
        kept = tuple(s for s in self.settings if not s.startswith("optim.lr="))
        return Recipe(self.name, self.label, kept)

    def with_rate(self, rate: float) -> Recipe:
        """This recipe at another learning rate."""
        return Recipe(self.name, self.label, (f"optim.lr={rate:g}", *self.without_rate().settings))


def small(steps: int, preset: str = "small") -> Base:
    """A preset for `steps` steps of 32 × 512 tokens. The curve of its validation has 20 points."""
    return Base(
        f"{preset}-{steps}",
        (
            f"model.preset={preset}",
            f"steps={steps}",
            "data.sequence_length=512",
            "data.batch_size=32",
            f"validation.every={max(1, steps // POINTS)}",
            "validation.tokens=20000",
            "log.every=25",
            "checkpoint.every=0",
            "checkpoint.keep_last=1",
            "checkpoint.keep_best=false",
        ),
    )


Setting = Literal["two", "one", "fine"]
SETTINGS: dict[Setting, str] = {
    "two": "two of eight experts per token",
    "one": "one of eight experts per token",
    "fine": "eight of 32 narrow experts per token",
}
# Best learning rate of each method in each setting, from `grmoe reproduce learning-rates`. Those that are not here have
# DEFAULT_RATE: no other rate was better by more than the noise between seeds, and better at full length too.
DEFAULT_RATE = 1.6e-3
RATES: dict[tuple[Setting, str], float] = {}


def best_rate(setting: Setting, method: str) -> float:
    return RATES.get((setting, method), DEFAULT_RATE)


FULL = "elastic.unit=off"
ONE = "model.num_experts_per_tok=1"
_SOFTMAX = ("model.router=softmax",)
_BIAS = "model.router_options.balance=true"
_NOT_CAUSAL = "model.allow_noncausal_router=true"
# As the paper writes them: tokens as they are, a prior that cancels the normaliser, and the overlap in its unit.
PAPER_GATE = (
    "model.router_options.prior=paper", "model.router_options.scaling=raw", "routing.overlap_unit=absolute",
    "routing.overlap_rho=0.3",
)  # fmt: skip


def _method(name: str, label: str, *settings: str) -> Recipe:
    """A method with two of eight experts per token and full budgets, at its best learning rate."""
    return Recipe(name, label, settings).with_rate(best_rate("two", name))


METHODS = (
    _method("grmoe", "GrMoE", FULL),
    _method("grmoe-amortised", "GrMoE + amortiser", FULL, "model.router_options.amortizer=affinity"),
    _method("grmoe-paper", "GrMoE with the paper's gate, prior and penalty", FULL, *PAPER_GATE),
    _method("softmax", "Softmax without balancing", *_SOFTMAX, FULL),
    _method("softmax-bias", "Softmax + bias", *_SOFTMAX, _BIAS, FULL),
    _method("softmax-load", "Softmax + Switch loss", *_SOFTMAX, "model.router_options.load_loss=0.01", FULL),
    _method("softmax-z", "Softmax + bias + z-loss 0.01", *_SOFTMAX, _BIAS, "model.router_options.z_loss=0.01", FULL),
    _method("switch", "Switch at capacity 1.25", "model.router=switch"),
    _method(
        "expert-choice", "Expert Choice at capacity 2", "model.router=expert_choice", _NOT_CAUSAL,
        "model.router_options.capacity_factor=2",
    ),
    _method("hash", "Hash", "model.router=hash"),
    _method("soft-moe", "Soft MoE with T/N slots", "model.router=soft_moe", _NOT_CAUSAL),
    _method("vmf-plain", "vMF without balancing", "model.router=vmf", FULL),
    _method("vmf", "vMF + bias", "model.router=vmf", _BIAS, FULL),
)  # fmt: skip


_BY_NAME = {recipe.name: recipe for recipe in METHODS}
# Nearer to the paper, at the rates of their relatives above. One sums all experts, as Algorithm 1 does. One has unit
# tokens, where the Bingham distribution lives. One has an amortiser that reads the token.
NEARER = (
    _BY_NAME["grmoe-paper"].plus(
        "grmoe-paper-dense", "GrMoE with the paper's gate, prior, penalty and dense sum", "model.selection=dense"
    ),
    Recipe(
        "grmoe-paper-unit", "GrMoE with the paper's gate on unit tokens, its prior and penalty",
        (FULL, *PAPER_GATE, "model.router_options.scaling=unit"),
    ).with_rate(best_rate("two", "grmoe-paper")),
    Recipe(
        "grmoe-amortised-input", "GrMoE + amortiser on the token", (FULL, "model.router_options.amortizer=input")
    ).with_rate(best_rate("two", "grmoe-amortised")),
)  # fmt: skip
# Methods that are compared at equal experts per token.
EQUAL = ("grmoe", "softmax-bias", "softmax-load", "softmax-z", "vmf")


def _one(method: str) -> Recipe:
    """The method with one expert per token."""
    known = _BY_NAME[method]
    name = "softmax-one" if method == "softmax-bias" else f"{method}-one"
    return known.plus(name, f"{known.label}, top-1", ONE).with_rate(best_rate("one", method))


def on_fine(recipe: Recipe, method: str) -> Recipe:
    """A recipe at the best rate of this method with 32 narrow experts."""
    return recipe.with_rate(best_rate("fine", method))


# Recipes by setting and method. Those of "fine" have the names of "two": their base is another.
GATES: dict[Setting, dict[str, Recipe]] = {
    "two": {method: _BY_NAME[method] for method in EQUAL},
    "one": {method: _one(method) for method in EQUAL},
    "fine": {method: on_fine(_BY_NAME[method], method) for method in EQUAL},
}


def base_of(setting: Setting, steps: int) -> Base:
    return small(steps, "small-fine" if setting == "fine" else "small")


def _budget(name: str, label: str, *settings: str) -> Recipe:
    return Recipe(name, label, settings).with_rate(best_rate("two", "grmoe"))


def _elastic(unit: str, rule: str, *more: str) -> tuple[str, ...]:
    return f"elastic.unit={unit}", f"elastic.rule={rule}", *more


# Random budgets.
_TOKEN_MASS = _elastic("token", "mass")
BUDGETS = (
    _budget("token-mass", "per token, mass (default)", *_TOKEN_MASS),
    _budget("token-count", "per token, count", *_elastic("token", "count")),
    _budget("sequence-mass", "per sequence, mass", *_elastic("sequence", "mass")),
    _budget("layer-count", "per layer, count", *_elastic("layer", "count")),
    _budget(
        "layer-count-full", "per layer, count, 80 % full steps",
        *_elastic("layer", "count", "elastic.full_share=0.8"),
    ),
    _budget("step-count", "per step, count", *_elastic("step", "count")),
    _budget("token-mass-full", "per token, mass, half full steps", *_TOKEN_MASS, "elastic.full_share=0.5"),
    _budget("token-mass-distill", "per token, mass, distilled", *_TOKEN_MASS, "elastic.distill=1.0"),
    _budget(
        "token-mass-alpha", "per token, mass, α sampled",
        *_TOKEN_MASS, "alpha.schedule=sample", "alpha.low=0.7", "alpha.high=1.5",
    ),
    _budget(
        "token-mass-computed", "per token, mass, prior counts the computed",
        *_TOKEN_MASS, "routing.prior_counts=computed",
    ),
    _budget("token-mass-unled", "per token, mass, no leading term", *_TOKEN_MASS, "routing.leading_weight=0"),
    _budget("token-mass-led-0.03", "per token, mass, leading term 0.03", *_TOKEN_MASS, "routing.leading_weight=0.03"),
)  # fmt: skip
SOFTMAX_BUDGET = Recipe(
    "softmax-token-mass", "softmax, per token, mass", (*_SOFTMAX, _BIAS, *_TOKEN_MASS)
).with_rate(best_rate("two", "softmax-bias"))

RECIPES = {
    recipe.name: recipe for recipe in (*METHODS, *NEARER, *GATES["one"].values(), *BUDGETS, SOFTMAX_BUDGET)
}


def find_recipe(text: str) -> Recipe:
    """A recipe by its name, or one of your own: "NAME: key=value key=value …"."""
    name, colon, settings = (part.strip() for part in text.partition(":"))
    if not colon:
        return RECIPES[checks.one_of_many("recipe", name, tuple(RECIPES), "grmoe compare --recipe ?")]
    checks.require(name not in RECIPES, f"a recipe of your own must have a new name, got {name!r}")
    return Recipe(name, name, tuple(settings.split()))


def vary(recipe: Recipe, text: str) -> list[Recipe]:
    """`key=a,b,c`: the recipe once per value, named RECIPE-KEY-VALUE. A key may be short: its last part is the name."""
    key, sign, values = text.partition("=")
    given = [value.strip() for value in values.split(",")]
    checks.require(
        bool(sign and key.strip() and all(given)), f"--vary must look like key=a,b,c, got {text!r}"
    )
    short = key.strip().rpartition(".")[2]
    return [
        recipe.plus(
            f"{recipe.name}-{short}-{value}", f"{recipe.label}, {short} {value}", f"{key.strip()}={value}"
        )
        for value in given
    ]
