"""The normaliser at the concentrations that a model has learned: `grmoe normalizer --run RUN`.

An expert's density of a unit token is exp(cκ‖Uᵀx‖²)/Z, so the argument of Z is c·κ, with c the gate's scale (d/k under
"rank" scaling). The paper validates Z at κ itself, between 0.4 and 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grmoe.checks import require
from grmoe.model import GrmoeForCausalLM
from grmoe.routing import GrassmannRouter, routers
from grmoe.runs.open import open_model
from grmoe.studies.normalizer_table import KAPPAS, PRINTED, NormalizerRow, show, validate
from grmoe.tables import Table
from grmoe.terminal import Progress, Steps, silent


@dataclass(frozen=True, kw_only=True)
class Plan:
    model: Path
    """Folder of a run or of an exported model."""
    samples: int
    kappas: tuple[float, ...] = KAPPAS
    """Beside the learned ones, at the d and k of the model."""
    checkpoint: str = "best"


@dataclass(frozen=True, kw_only=True)
class LearnedRow(NormalizerRow):
    """All methods at the concentration of one expert. `kappa` is the argument of Z, c·κ."""

    layer: int
    """Place among all blocks of the model."""
    expert: int
    learned: float
    """κ."""


def run(plan: Plan, progress: Progress = silent) -> list[NormalizerRow]:
    """The list of κ first, then one row per expert of each layer."""
    model = open_model(plan.model, plan.checkpoint, device="cpu").model
    cases = learned(model)
    router = next(r for r in routers(model) if isinstance(r, GrassmannRouter))
    steps = Steps(progress, len(plan.kappas) + len(cases))
    rows: list[NormalizerRow] = []
    for kappa in plan.kappas:
        rows.append(validate(router.dim, router.rank, kappa, plan.samples))
        steps("fixed κ")
    for case in cases:
        rows.append(case.row(plan.samples))
        steps(f"layer {case.layer}")
    return rows


@dataclass(frozen=True)
class Learned:
    """The concentration of one expert, and what it means for the normaliser."""

    layer: int
    expert: int
    kappa: float
    scale: float
    """c."""
    dim: int
    rank: int

    def row(self, samples: int) -> LearnedRow:
        found = validate(self.dim, self.rank, self.scale * self.kappa, samples)
        return LearnedRow(layer=self.layer, expert=self.expert, learned=self.kappa, **asdict(found))


def learned(model: GrmoeForCausalLM) -> list[Learned]:
    """Every expert of every layer. Raises for a model without scalar concentrations."""
    found = []
    for layer, router in zip(model.config.moe_layers, routers(model), strict=True):
        require(
            isinstance(router, GrassmannRouter) and router.kappa.ndim == 1 and router.mu is None,
            "the normaliser needs a Grassmann router with one κ per expert and no linear term, got "
            f"{model.config.router!r} with {model.config.router_options}",
        )
        assert isinstance(router, GrassmannRouter)
        numbers = (router.energy_scale, router.dim, router.rank)
        found += [Learned(layer, e, k, *numbers) for e, k in enumerate(router.kappa.double().tolist())]
    return found


def show_learned(rows: Sequence[NormalizerRow], samples: int) -> Iterator[Table | str]:
    """The fixed list in full, then one line per layer with the largest errors of its experts."""
    yield from show([row for row in rows if not isinstance(row, LearnedRow)], samples)
    yield layer_table([row for row in rows if isinstance(row, LearnedRow)])
    yield PRINTED


def layer_table(rows: Sequence[LearnedRow]) -> Table:
    title = "At the learned κ: largest relative errors of Z over the experts of a layer, then of ∂log Z/∂κ"
    methods = ["series", "Kume–Wood 1", "Kume–Wood 3", "Monte Carlo", "K–W 1", "K–W 3", "appendix, log Z"]
    table = Table(title, ["layer", "experts", "κ", "c·κ", *methods])
    for layer in dict.fromkeys(row.layer for row in rows):
        of = [row for row in rows if row.layer == layer]
        errors = [
            ("series_error", ".0e"), ("kume_wood_1", ".1e"), ("kume_wood_3", ".1e"), ("monte_carlo", ".1e"),
            ("gradient_1", ".1e"), ("gradient_3", ".1e"),
        ]  # fmt: skip
        table.add(
            str(layer),
            str(len(of)),
            _span([row.learned for row in of]),
            _span([row.kappa for row in of]),
            *(f"{max(abs(getattr(row, name)) for row in of):{form}}" for name, form in errors),
            "; ".join(
                _span([getattr(row, name) for row in of], "+.0f") for name in ("printed_1", "printed_2")
            ),
        )
    return table


def _span(values: Sequence[float], form: str = ".2f") -> str:
    low, high = (f"{value:{form}}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
