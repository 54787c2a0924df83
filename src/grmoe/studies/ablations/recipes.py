"""Which settings are ablated, the recipes that try them, and their seeds.

To add a row, add a value to a group of `GROUPS`, and to `_SHOWN` if no claim and no choice needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grmoe.studies.models.recipes import DEFAULT_RATE, PAPER_GATE, RECIPES, Recipe, best_rate
from grmoe.studies.scaling import recipe_of

REFERENCE = RECIPES["grmoe"]
_PAPER_UNIT = "routing.overlap_unit=absolute"


@dataclass(frozen=True)
class Value:
    """One value of a setting."""

    label: str
    """Name of its row."""
    change: tuple[str, ...] | Recipe
    """What is added to the default, or a recipe that other studies have too."""


@dataclass(frozen=True)
class Ablation:
    """Values of one setting beside the default's."""

    name: str
    title: str
    default: str
    """Name of the default's row."""
    values: Mapping[str, Value]
    """By a short name: that of a recipe is NAME-VALUE."""

    @property
    def rows(self) -> list[tuple[str, Recipe]]:
        """(name of the row, recipe) of each value."""
        return [(value.label, self._recipe(name, value)) for name, value in self.values.items()]

    def _recipe(self, name: str, value: Value) -> Recipe:
        if isinstance(value.change, Recipe):
            return value.change
        return REFERENCE.plus(f"{self.name}-{name}", f"{self.title}: {value.label}", *value.change)


def _each(key: str, *values: str) -> dict[str, Value]:
    return {value: Value(value, (f"{key}={value}",)) for value in values}


def _router(option: str, **labels: str) -> dict[str, Value]:
    """Values of an option of the router, with the names of their rows."""
    return {
        value: Value(label, (f"model.router_options.{option}={value}",)) for value, label in labels.items()
    }


GROUPS = (
    Ablation(
        "overlap", "overlap penalty", "ρ₀ = 0.5 of random (default)",
        {
            "none": Value("none", ("routing.overlap_weight=0",)),
            **{
                f"paper-{rho:g}": Value(
                    f"ρ₀ = {rho:g} of the rank (the paper's unit)", (_PAPER_UNIT, f"routing.overlap_rho={rho:g}")
                )
                for rho in (0.1, 0.3, 0.5, 0.8)
            },
            **{
                f"random-{rho:g}": Value(f"ρ₀ = {rho:g} of random", (f"routing.overlap_rho={rho:g}",))
                for rho in (0.25, 1)
            },
        },
    ),
    Ablation("rank", "rank", "64 (default)", _each("model.router_rank", "1", "8", "16", "32", "128")),
    Ablation("beta", "weight of the penalty", ".01 (default)", _each("routing.overlap_weight", "0.005", "0.02", "0.1")),
    Ablation("pairs", "pairs in the penalty", "all 28 (default)", _each("routing.overlap_pairs", "8", "16")),
    Ablation(
        "init", "initial subspaces", "Haar (default)", _router("init", identity="columns of the identity", pca="PCA")
    ),
    Ablation("prior", "prior", "balanced (default)", _router("prior", paper="the paper's", uniform="uniform")),
    Ablation(
        "scaling", "scaling of the energy", "d/k (default)",
        _router("scaling", unit="unit tokens", rms="RMS-normed tokens", raw="tokens as they are (the paper's)"),
    ),
    Ablation(
        "amortiser", "amortiser", "none (default)",
        {
            "affinity": Value("reads the energies", RECIPES["grmoe-amortised"]),
            **_router("amortizer", input="reads the token (the paper's)", matrix="an N × N matrix per token"),
        },
    ),
    Ablation(
        "weights", "weights", "as they are (default)",
        {"renormalised": Value("renormalised", ("model.norm_topk_prob=true",))},
    ),
    Ablation(
        "training", "budgets in training", "full (as in this study)",
        {"random": Value("random, per token (the default of `grmoe train`)", RECIPES["token-mass"])},
    ),
    Ablation(
        "kappa", "rate of κ", "that of the weights (default)",
        {
            "fixed": Value("0: κ stays", ("optim.kappa_lr=0",)),
            "5x": Value("five times that", (f"optim.kappa_lr={5 * DEFAULT_RATE:g}",)),
        },
    ),
    Ablation("start", "start of κ", "√k/2 = 4 (default)", _each("model.router_kappa", "1.5", "8")),
    Ablation("frames", "rate of the subspaces", "0.29 (default)", _each("optim.frames_lr", "0", "0.024", "0.1", "0.6")),
    Ablation(
        "stream", "residual stream", "embeddings × 22.6, penalty 0.01 (default)",
        {
            "no-penalty": Value("embeddings × 22.6, no penalty", ("model.residual_loss_coef=0",)),
            "plain": Value(
                "embeddings × 1, no penalty", ("model.residual_loss_coef=0", "model.embedding_multiplier=1")
            ),
        },
    ),
    Ablation(
        "optimiser", "optimiser of the subspaces", "GrassmannAdam (default)",
        # At the rate of the weights, because they step entry by entry.
        {
            method: Value(label, (f"optim.frames_method={method}", f"optim.frames_lr={best_rate('two', 'grmoe'):g}"))
            for method, label in (("projected", "Adam, then QR"), ("qr", "Adam on a matrix, whose QR frame is used"))
        },
    ),
    Ablation(
        "gate", "form of the gate", "scalar κ (default)",
        {
            "diagonal": Value("one κ per column", ("model.router_options.concentration=diagonal",)),
            "linear": Value("with a linear term", ("model.router_options.linear=true",)),
        },
    ),
    Ablation(
        "paper", "all choices of the paper", "ours",
        {
            "gate": Value("the paper's prior, scaling and hinge", RECIPES["grmoe-paper"]),
            "gate-free": Value("the same without the penalty", (*PAPER_GATE, "routing.overlap_weight=0")),
        },
    ),
)  # fmt: skip
# More experts: M = 4N pairs, the default there, and all pairs.
SAMPLED = {count: recipe_of("grmoe", count) for count in (16, 32)}
ALL_PAIRS = {
    count: recipe.plus(f"{recipe.name}-all-pairs", f"{recipe.label}, all pairs", "routing.overlap_pairs=all")
    for count, recipe in SAMPLED.items()
}
# The paper's second size, without the penalty.
FREE_16 = SAMPLED[16].plus(
    f"{SAMPLED[16].name}-overlap-none", f"{SAMPLED[16].label}, no overlap penalty", "routing.overlap_weight=0"
)
ALL = (
    REFERENCE,
    *(recipe for group in GROUPS for _, recipe in group.rows),
    *SAMPLED.values(),
    *ALL_PAIRS.values(),
    FREE_16,
)
# Without a penalty, or with a hinge of at least the paper's: one training, if no overlap reaches the lowest of them.
PAPER_HINGE = 0.3  # of the rank
NO_PENALTY = "overlap-none"
UNHINGED = (NO_PENALTY, "overlap-paper-0.3", "overlap-paper-0.5", "overlap-paper-0.8")
# The paper's gate with its penalty and without: another such training.
PAPER_FORM = ("grmoe-paper", "paper-gate-free")


# -- seeds ---------------------------------------------------------------------------------------------------------

SEEDS = 3
# "It makes no difference" needs an interval within a fifth of the CV and 0.011 nats. In the first results of this base
# two recipes differ by seed with a standard deviation of .087 of the CV and .0047 nats. So three seeds have half-widths
# of .22 and .012, and would hardly ever decide such a claim; five have .11 and .006. The CV along the curve of a
# training is not steadier.
SAME_SEEDS = 5
_SAME = (
    REFERENCE.name, "beta-0.005", "beta-0.02", "pairs-8", "pairs-16", "init-identity", "init-pca",
    *(recipe.name for recipe in (*SAMPLED.values(), *ALL_PAIRS.values())),
)  # fmt: skip
# The training of another row again: one seed shows that. See `measures.never_acts`.
_COPIES = (*UNHINGED[1:], PAPER_FORM[1])
# In no claim and no choice. One model of each, when the others are done.
_SHOWN = (
    "beta-0.1", "rank-128", "prior-uniform", "amortiser-input", "start-8", "frames-0", "frames-0.1", "frames-0.6",
    "stream-no-penalty", "gate-diagonal", "gate-linear",
)  # fmt: skip


def _named(names: tuple[str, ...]) -> tuple[Recipe, ...]:
    return tuple(recipe for recipe in ALL if recipe.name in names)


SAME, COPIES, SHOWN = map(_named, (_SAME, _COPIES, _SHOWN))
DECIDING = tuple(recipe for recipe in ALL if recipe not in (*SAME, *COPIES, *SHOWN))


# -- choices -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Something that we do, and the recipe that does without it."""

    text: str
    without: str
    has: str = REFERENCE.name


CHOICES = (
    Choice("a prior that is balanced by the load, against the paper's", "prior-paper"),
    Choice(
        "a hinge that is active, at half the random overlap, against the paper's ρ₀ = 0.3",
        "overlap-paper-0.3",
    ),
    Choice("a hinge at half the random overlap, against one at a quarter", "overlap-random-0.25"),
    Choice("a hinge at half the random overlap, against one at all of it", "overlap-random-1"),
    Choice("energies scaled by d/k, against the paper's tokens as they are", "scaling-raw"),
    Choice("prior, scaling and hinge together, against the paper's", "grmoe-paper"),
    Choice("an overlap penalty", NO_PENALTY),
    Choice("subspaces that learn as fast as weights, against 3 mrad per step", "frames-0.024"),
    Choice("subspaces trained on their manifold, against Adam and QR", "optimiser-projected"),
    Choice("subspaces trained on their manifold, against Adam on a matrix with its QR frame", "optimiser-qr"),
    Choice("κ that learns at the rate of the weights, against five times that", "kappa-5x"),
    Choice("κ that learns, against one that stays", "kappa-fixed"),
    Choice("κ = √k/2 at the start, against 1.5", "start-1.5"),
    Choice("energies scaled by d/k, against unit tokens", "scaling-unit"),
    Choice("energies scaled by d/k, against RMS-normed tokens", "scaling-rms"),
    Choice("weights as they are, against renormalised ones", "weights-renormalised"),
    Choice("a residual stream of scale one (not a matter of the gate)", "stream-plain"),
    Choice("random budgets in training, the default of `grmoe train`", REFERENCE.name, "token-mass"),
)
