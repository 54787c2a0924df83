"""The paper's "Bingham Normalizer Validation": all methods for log Z side by side.

The exact value is the contour integral; the same table checks it against the power series. Errors are relative, of Z
and of ∂log Z/∂κ. The paper reports 1.5 % and 0.3 % for its saddlepoint at κ between 0.4 and 4.2. The formula that its
appendix prints is off by many orders of magnitude; its column has the error of log Z.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from grmoe.bingham import kume_wood, log_kummer, log_kummer_reference, mean_energy, monte_carlo, printed
from grmoe.files import write_file
from grmoe.tables import Table
from grmoe.terminal import Progress, Steps, silent

KAPPAS = (0.4, 1.0, 4.2, 10.0, 100.0, 1000.0)
SHAPES = ((128, 16), (768, 48), (2048, 64))
PRINTED = (
    "Last column: error of log Z by the formula that the paper's appendix prints, (2π)^(d/2) |Λ⋆|^(−1/2) "
    "exp(tr ΛΛ⋆⁻¹). It leaves Λ⋆ open. Two readings: Λ⋆ = ŝI − Λ, then 2(ŝI − Λ), with ŝ the saddle."
)


@dataclass(frozen=True)
class Plan:
    """Every (d, k) of `shapes` at every κ."""

    samples: int
    shapes: tuple[tuple[int, int], ...] = SHAPES
    kappas: tuple[float, ...] = KAPPAS


@dataclass(frozen=True, kw_only=True)
class NormalizerRow:
    """All methods at one (d, k, κ). Errors of Z are relative to the contour integral."""

    dim: int
    rank: int
    kappa: float
    log_z: float
    """By the contour integral, the exact value."""
    series_error: float
    """Relative error of Z by the power series."""
    kume_wood_1: float
    """Relative error of Z by the saddlepoint of first order; below of third order, and by Monte Carlo."""
    kume_wood_3: float
    """Error of the third-order saddlepoint."""
    monte_carlo: float
    monte_carlo_standard_error: float
    """The estimator's own estimate of its error."""
    mean_energy: float
    """∂ log Z / ∂κ."""
    gradient_1: float
    """Relative error of the gradient of the saddlepoint of first order; below of third order."""
    gradient_3: float
    """Relative error of the third-order saddlepoint's gradient."""
    printed_1: float
    """Error of log Z, not of Z, by the formula of the paper's appendix with Λ⋆ = ŝI − Λ (`bingham.printed`)."""
    printed_2: float
    """The same with Λ⋆ = 2(ŝI − Λ)."""
    printed_gradient_1: float
    """Relative error of the gradient of the first reading."""
    printed_gradient_2: float
    """Relative error of the gradient of the second reading."""


def run(plan: Plan, progress: Progress = silent) -> list[NormalizerRow]:
    cases = [(d, k, kappa) for d, k in plan.shapes for kappa in plan.kappas]
    steps = Steps(progress, len(cases))
    rows = []
    for d, k, kappa in cases:
        rows.append(validate(d, k, kappa, plan.samples))
        steps(f"d = {d}, k = {k}")
    return rows


def validate(dim: int, rank: int, kappa: float, samples: int, seed: int = 0) -> NormalizerRow:
    """One row: all methods at one (d, k, κ)."""
    log_z = float(log_kummer(rank, dim, kappa))
    energy = float(mean_energy(rank, dim, kappa))
    generator = torch.Generator().manual_seed(seed)
    counts = [rank, dim - rank]
    spectrum = torch.tensor([kappa, 0.0], dtype=torch.float64)
    estimate, standard_error = monte_carlo(spectrum, counts, samples=samples, generator=generator)

    def against(approximate: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        """(error of log Z, relative error of its gradient)."""
        x = torch.tensor(kappa, dtype=torch.float64, requires_grad=True)
        value = approximate(torch.stack([x, torch.zeros_like(x)]))
        (gradient,) = torch.autograd.grad(value, x)
        return float(value.detach()) - log_z, float(gradient) / energy - 1

    first, third = (against(partial(kume_wood, multiplicities=counts, order=n)) for n in (1, 3))
    one, two = (against(partial(printed, multiplicities=counts, factor=n)) for n in (1, 2))
    return NormalizerRow(
        dim=dim,
        rank=rank,
        kappa=kappa,
        log_z=log_z,
        series_error=math.expm1(log_kummer_reference(rank, dim, kappa) - log_z),
        kume_wood_1=math.expm1(first[0]),
        kume_wood_3=math.expm1(third[0]),
        monte_carlo=math.expm1(estimate - log_z),
        monte_carlo_standard_error=standard_error,
        mean_energy=energy,
        gradient_1=first[1],
        gradient_3=third[1],
        printed_1=one[0],
        printed_2=two[0],
        printed_gradient_1=one[1],
        printed_gradient_2=two[1],
    )


def show(rows: Sequence[NormalizerRow], samples: int) -> Iterator[Table]:
    title = "log Z(κ) = log ₁F₁(k/2; d/2; κ): relative errors of Z, then E‖Px‖² = ∂log Z/∂κ and its relative errors"
    methods = ["series", "Kume–Wood 1", "Kume–Wood 3", f"Monte Carlo {samples:.0e}"]
    headings = ["d", "k", "κ", "log Z", *methods, "E‖Px‖²", "K–W 1", "K–W 3", "appendix, log Z"]
    table = Table(title, headings, left=0)
    for before, r in zip([None, *rows], rows, strict=False):
        if before is not None and before.dim != r.dim:
            table.end_section()
        table.add(
            str(r.dim),
            str(r.rank),
            f"{r.kappa:g}",
            f"{r.log_z:.10g}",
            f"{r.series_error:.0e}",
            f"{r.kume_wood_1:.1e}",
            f"{r.kume_wood_3:.1e}",
            f"{r.monte_carlo:.1e} ± {r.monte_carlo_standard_error:.0e}",
            f"{r.mean_energy:.6g}",
            f"{r.gradient_1:.1e}",
            f"{r.gradient_3:.1e}",
            f"{r.printed_1:+.0f}, {r.printed_2:+.0f}",
        )
    yield table


def show_noted(rows: Sequence[NormalizerRow], samples: int) -> Iterator[Table | str]:
    """The table, and what its last column is."""
    yield from show(rows, samples)
    yield PRINTED


def save(rows: Sequence[NormalizerRow], path: Path | None) -> dict[str, Path]:
    """Write the rows as JSON. Without a path nothing is written."""
    if path is None:
        return {}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps([asdict(row) for row in rows], indent=1).encode())
    return {"Numbers": path}
