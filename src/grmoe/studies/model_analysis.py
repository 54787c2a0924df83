"""What the studies of trained models read: `grmoe analyze` of a run, its normalisers, and its loss at α by depth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grmoe.analyze import Analysis, Plan, run
from grmoe.dial.setting import apply, current, mass
from grmoe.probe.losses import measure
from grmoe.probe.windows import read_texts
from grmoe.runs.open import LoadedModel
from grmoe.runs.results import plain
from grmoe.studies.language_model import BASE, SEEDS
from grmoe.studies.learned_kappa import learned
from grmoe.studies.measuring import Kind
from grmoe.studies.model_study import Group
from grmoe.studies.models.recipes import RECIPES
from grmoe.studies.study import Place
from grmoe.terminal import Progress

GRMOE, AMORTISED = RECIPES["grmoe"], RECIPES["grmoe-amortised"]
GROUP = Group(BASE, (GRMOE, AMORTISED), SEEDS)
TOKENS = 50_000
SAMPLES = 1_000_000  # of Monte Carlo, as in the paper
# α of the paper's proposal for early and late layers, the same exchanged, and equal ones to compare with.
EARLY, LATE = 0.8, 1.5
UNIFORM = (0.5, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0)
BY_DEPTH, EXCHANGED = "early .8, late 1.5", "early 1.5, late .8"
TAU = 0.7  # of the mass rule: with top-k, α would not change the experts computed
_LAYER = (
    "layer", "alpha", "entropy", "kappa", "load", "gate_load", "type_entropy", "of_type", "expert_tokens",
    "expert_type_entropy", "kappa_correlation", "separation", "top_mass", "amortized",
)  # fmt: skip


def measure_run(folder: Path, place: Place, progress: Progress) -> Mapping[str, Any]:
    """An analysis without what no study reads, and the rest of this module."""
    found = run(Plan(model=folder, checkpoint="last", tokens=TOKENS), progress)
    return {
        **kept(found.analysis),
        "normalizer": normalizers(found.loaded),
        "settings": losses(found.loaded, place.tokens),
    }


def kept(analysis: Analysis) -> dict[str, Any]:
    tree = plain(analysis)
    names = (
        "tokens", "experts", "types", "type_tokens", "least_tokens", "kappa_correlation", "kappa_correlation_within",
    )  # fmt: skip
    layers = [{name: layer[name] for name in _LAYER} for layer in tree["layers"]]
    return {name: tree[name] for name in names} | {"layers": layers}


def normalizers(loaded: LoadedModel, samples: int = SAMPLES) -> list[dict[str, Any]]:
    """All methods for Z at the smallest and the largest κ of each layer."""
    cases = learned(loaded.model)
    rows = []
    for layer in dict.fromkeys(case.layer for case in cases):
        of = sorted((case for case in cases if case.layer == layer), key=lambda case: case.kappa)
        rows += [plain(case.row(samples)) for case in (of[0], of[-1])]
    return rows


def losses(loaded: LoadedModel, tokens: int | None) -> list[dict[str, Any]]:
    """Loss and experts per token under the mass rule, at equal α and at α by depth. The model's setting is kept."""
    model = loaded.model
    (text,) = read_texts((None,), loaded, None, tokens)
    before = current(model.config)
    layers = len(before.alphas)
    early = layers // 2
    settings = {f"α {alpha:g}": (alpha,) * layers for alpha in UNIFORM}
    settings[BY_DEPTH] = (EARLY,) * early + (LATE,) * (layers - early)
    settings[EXCHANGED] = (LATE,) * early + (EARLY,) * (layers - early)
    rows = []
    try:
        for name, alphas in settings.items():
            apply(model, mass(alphas, TAU, before.cap))
            found = measure(model, text)
            rows.append({"name": name, "experts_per_token": found.experts_per_token, "loss": found.loss})
    finally:
        apply(model, before)
    return rows


KIND = Kind("analysis", measure_run)
