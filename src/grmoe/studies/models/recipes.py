"""The one place where methods and ways to train are named, each with its settings of `grmoe train`.

A base is what all models of a comparison share. A recipe adds the router, or the way to train. Every method has its own
best learning rate (`RATES`) and its better form of weights.
"""

from __future__ import annotations

from dataclasses import dataclass

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
            "checkpoint.every=0",
            "checkpoint.keep_last=1",
            "checkpoint.keep_best=false",
        ),
    )


# Best learning rate of each method, from `grmoe reproduce learning-rates`. A method that is not here has DEFAULT_RATE,
# the best of four for GrMoE, softmax, Switch loss and vMF (results/learning-rates-small.json).
DEFAULT_RATE = 1.6e-3
RATES: dict[str, float] = {}

FULL = "elastic.unit=off"
ONE = "model.num_experts_per_tok=1"
_SOFTMAX = ("model.router=softmax",)
_BIAS = "model.router_options.balance=true"
_NOT_CAUSAL = "model.allow_noncausal_router=true"
_KAPPA_1X = f"optim.kappa_lr={DEFAULT_RATE:g}"


def _method(name: str, label: str, *settings: str) -> Recipe:
    """A method of a comparison at full budgets, at its best learning rate."""
    return Recipe(name, label, (f"optim.lr={RATES.get(name, DEFAULT_RATE):g}", *settings))


METHODS = (
    _method("grmoe", "GrMoE", FULL),
    _method("grmoe-amortised", "GrMoE + amortiser", FULL, "model.router_options.amortizer=affinity"),
    _method(
        "grmoe-fast", "GrMoE, rank 64, fast subspaces", FULL,
        "model.router_rank=64", "optim.frames_lr=0.15", _KAPPA_1X,
    ),
    _method("grmoe-one", "GrMoE, top-1", FULL, ONE),
    _method("softmax", "Softmax, no balancing", *_SOFTMAX, FULL),
    _method("softmax-bias", "Softmax, bias", *_SOFTMAX, _BIAS, FULL),
    _method("softmax-load", "Softmax, Switch loss", *_SOFTMAX, "model.router_options.load_loss=0.01", FULL),
    _method("softmax-z", "Softmax, bias, z-loss 0.01", *_SOFTMAX, _BIAS, "model.router_options.z_loss=0.01", FULL),
    _method("softmax-one", "Softmax, bias, top-1", *_SOFTMAX, _BIAS, FULL, ONE),
    _method("switch", "Switch, capacity 1.25", "model.router=switch"),
    _method(
        "expert-choice", "Expert Choice, capacity 2", "model.router=expert_choice", _NOT_CAUSAL,
        "model.router_options.capacity_factor=2",
    ),
    _method("hash", "Hash", "model.router=hash"),
    _method("soft-moe", "Soft MoE, T/N slots", "model.router=soft_moe", _NOT_CAUSAL),
    _method("vmf", "vMF, bias", "model.router=vmf", _BIAS, FULL),
)  # fmt: skip


def _budget(name: str, label: str, *settings: str) -> Recipe:
    return Recipe(name, label, (f"optim.lr={RATES.get('grmoe', DEFAULT_RATE):g}", *settings))


def _elastic(unit: str, rule: str, *more: str) -> tuple[str, ...]:
    return f"elastic.unit={unit}", f"elastic.rule={rule}", *more


# Random budgets of GrMoE.
_TOKEN_MASS = _elastic("token", "mass")
BUDGETS = (
    _budget("token-mass", "per token, mass (default)", *_TOKEN_MASS),
    _budget("token-count", "per token, count", *_elastic("token", "count")),
    _budget("sequence-count", "per sequence, count", *_elastic("sequence", "count")),
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
    _budget("token-mass-both", "per token, mass, prior counts both", *_TOKEN_MASS, "routing.prior_counts=both"),
    Recipe(
        "softmax-token-mass", "softmax, per token, mass",
        (f"optim.lr={DEFAULT_RATE:g}", *_SOFTMAX, _BIAS, *_TOKEN_MASS),
    ),
)  # fmt: skip

RECIPES = {recipe.name: recipe for recipe in (*METHODS, *BUDGETS)}


def find_recipe(text: str) -> Recipe:
    """A recipe by its name, or one of your own: "NAME: key=value key=value …"."""
    name, colon, settings = (part.strip() for part in text.partition(":"))
    if not colon:
        return RECIPES[checks.one_of("recipe", name, tuple(RECIPES))]
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
