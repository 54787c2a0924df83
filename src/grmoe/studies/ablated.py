"""Which settings are ablated, and the recipes that try them. To add a row, add a value to a group of `GROUPS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grmoe.studies.models.recipes import DEFAULT_RATE, PAPER_GATE, RECIPES, Recipe, best_rate
from grmoe.studies.scaling import recipe_of

REFERENCE = RECIPES["grmoe"]
_PAPER_UNIT = "routing.overlap_unit=absolute"


@dataclass(frozen=True)
class Ablation:
    """Values of one setting beside the default's."""

    name: str
    title: str
    default: str
    """The default's label in the table."""
    values: Mapping[str, tuple[str, ...] | Recipe]
    """What is added to the default, or a recipe that other studies have too, by a short name."""

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        return tuple(
            found
            if isinstance(found, Recipe)
            else REFERENCE.plus(f"{self.name}-{value}", f"{self.title}: {value}", *found)
            for value, found in self.values.items()
        )


def _each(key: str, *values: str) -> dict[str, tuple[str, ...] | Recipe]:
    return {value: (f"{key}={value}",) for value in values}


def _router(option: str, *values: str) -> dict[str, tuple[str, ...] | Recipe]:
    return _each(f"model.router_options.{option}", *values)


GROUPS = (
    Ablation(
        "overlap", "overlap penalty", "ρ₀ = 0.5 of random (default)",
        {
            "none": ("routing.overlap_weight=0",),
            **{f"paper-{rho:g}": (_PAPER_UNIT, f"routing.overlap_rho={rho:g}") for rho in (0.1, 0.3, 0.5, 0.8)},
            **{f"random-{rho:g}": (f"routing.overlap_rho={rho:g}",) for rho in (0.25, 1)},
        },
    ),
    Ablation("rank", "rank", "64 (default)", _each("model.router_rank", "8", "16", "32", "128")),
    Ablation("beta", "weight of the penalty", ".01 (default)", _each("routing.overlap_weight", "0.005", "0.02", "0.1")),
    Ablation("pairs", "pairs in the penalty", "all 28 (default)", _each("routing.overlap_pairs", "8", "16")),
    Ablation("init", "initial subspaces", "Haar (default)", _router("init", "identity", "pca")),
    Ablation("prior", "prior", "balanced (default)", _router("prior", "paper", "uniform")),
    Ablation("scaling", "scaling of the energy", "d/k (default)", _router("scaling", "unit", "rms", "raw")),
    Ablation(
        "amortiser", "amortiser", "none (default)",
        {"affinity": RECIPES["grmoe-amortised"], **_router("amortizer", "input", "matrix")},
    ),
    Ablation("weights", "weights", "as they are (default)", {"renormalised": ("model.norm_topk_prob=true",)}),
    Ablation("training", "budgets in training", "full", {"random": RECIPES["token-mass"]}),
    Ablation(
        "kappa", "rate of κ", "that of the weights (default)",
        {"fixed": ("optim.kappa_lr=0",), "5x": (f"optim.kappa_lr={5 * DEFAULT_RATE:g}",)},
    ),
    Ablation("start", "κ at the start", "√k/2 = 4 (default)", _each("model.router_kappa", "1.5", "8")),
    Ablation("frames", "rate of the subspaces", "0.29 (default)", _each("optim.frames_lr", "0", "0.024", "0.1", "0.6")),
    Ablation(
        "stream", "residual stream", "embeddings × 22.6, penalty 0.01 (default)",
        {
            "no-penalty": ("model.residual_loss_coef=0",),
            "plain": ("model.residual_loss_coef=0", "model.embedding_multiplier=1"),
        },
    ),
    Ablation(
        "optimiser", "optimiser of the subspaces", "GrassmannAdam (default)",
        # At the rate of the weights, because they step entry by entry.
        {
            method: (f"optim.frames_method={method}", f"optim.frames_lr={best_rate('two', 'grmoe'):g}")
            for method in ("projected", "qr")
        },
    ),
    Ablation(
        "gate", "form of the gate", "scalar κ (default)",
        {"diagonal": ("model.router_options.concentration=diagonal",), "linear": ("model.router_options.linear=true",)},
    ),
    Ablation(
        "paper", "all choices of the paper", "ours",
        {"gate": RECIPES["grmoe-paper"], "gate-free": (*PAPER_GATE, "routing.overlap_weight=0")},
    ),
)  # fmt: skip
BY_NAME = {group.name: group for group in GROUPS}
# More experts: M = 4N pairs, the default there, and all pairs.
SAMPLED = {count: recipe_of("grmoe", count) for count in (16, 32)}
ALL_PAIRS = {
    count: recipe.plus(f"{recipe.name}-all-pairs", f"{recipe.label}, all pairs", "routing.overlap_pairs=all")
    for count, recipe in SAMPLED.items()
}
ALL = (
    REFERENCE,
    *(recipe for group in GROUPS for recipe in group.recipes),
    *SAMPLED.values(),
    *ALL_PAIRS.values(),
)
# What the paper does: the recipe, and what ours changes.
DEPARTURES = {
    "prior-paper": "a prior that is balanced by the load",
    "overlap-paper-0.3": "a hinge that is active, at half the random overlap",
    "overlap-none": "the overlap penalty at all",
    "frames-0.024": "subspaces that learn as fast as weights, against 3 mrad per step",
    "kappa-5x": "κ that learns at the rate of the weights, against five times that",
    "kappa-fixed": "κ that learns, against one that stays",
    "start-1.5": "κ = √k/2 at the start, against 1.5",
    "stream-plain": "a residual stream of scale one (not a matter of the gate)",
    "scaling-unit": "energies scaled by d/k, against unit tokens",
    "scaling-rms": "energies scaled by d/k, against RMS-normed tokens",
    "scaling-raw": "energies scaled by d/k, against the paper's tokens as they are",
    "grmoe-paper": "prior, scaling and hinge together",
    "weights-renormalised": "weights as they are, against renormalised ones (which the paper does not have either)",
    "optimiser-projected": "subspaces trained on their manifold, against Adam and QR (the paper has the former)",
    "optimiser-qr": "subspaces trained on their manifold, against Adam on a matrix with its QR frame in the model",
    "token-mass": "full budgets in training, against random ones",
}
