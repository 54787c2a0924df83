"""The paper's "Bingham Normalizer Validation": all methods for log Z side by side.

The exact value is the contour integral, checked against the power series in the same table. Errors are relative, of Z
and of ∂log Z/∂κ. The paper reports 1.5 % and 0.3 % for its saddlepoint at κ in 0.4–4.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from rich.table import Table

from grmoe.bingham import kume_wood, log_kummer, log_kummer_reference, mean_energy, monte_carlo

KAPPAS = (0.4, 1.0, 4.2, 10.0, 100.0, 1000.0)
SHAPES = ((128, 16), (768, 48), (2048, 64))


@dataclass(frozen=True, kw_only=True)
class NormalizerRow:
    """All methods at one (d, k, κ). Errors of Z are relative to the contour integral."""

    dim: int
    rank: int
    kappa: float
    log_z: float
    """From the contour integral."""
    series_error: float
    """Error of the power series."""
    kume_wood_1: float
    """Error of the first-order saddlepoint."""
    kume_wood_3: float
    """Error of the third-order saddlepoint."""
    monte_carlo: float
    """Error of Monte Carlo."""
    monte_carlo_standard_error: float
    """As the estimator itself reports it."""
    mean_energy: float
    """∂ log Z / ∂κ."""
    gradient_1: float
    """Relative error of the first-order saddlepoint's gradient."""
    gradient_3: float
    """Relative error of the third-order saddlepoint's gradient."""


def validate(dim: int, rank: int, kappa: float, samples: int, seed: int = 0) -> NormalizerRow:
    """One row: all methods at one (d, k, κ)."""
    log_z = float(log_kummer(rank, dim, kappa))
    energy = float(mean_energy(rank, dim, kappa))
    generator = torch.Generator().manual_seed(seed)
    counts = [rank, dim - rank]
    spectrum = torch.tensor([kappa, 0.0], dtype=torch.float64)
    estimate, standard_error = monte_carlo(spectrum, counts, samples=samples, generator=generator)
    errors, gradients = {}, {}
    for order in (1, 3):
        x = torch.tensor(kappa, dtype=torch.float64, requires_grad=True)
        value = kume_wood(torch.stack([x, torch.zeros_like(x)]), counts, order=order)
        (gradient,) = torch.autograd.grad(value, x)
        errors[order] = math.expm1(float(value.detach()) - log_z)
        gradients[order] = float(gradient) / energy - 1
    return NormalizerRow(
        dim=dim,
        rank=rank,
        kappa=kappa,
        log_z=log_z,
        series_error=math.expm1(log_kummer_reference(rank, dim, kappa) - log_z),
        kume_wood_1=errors[1],
        kume_wood_3=errors[3],
        monte_carlo=math.expm1(estimate - log_z),
        monte_carlo_standard_error=standard_error,
        mean_energy=energy,
        gradient_1=gradients[1],
        gradient_3=gradients[3],
    )


def rich_table(rows: list[NormalizerRow], samples: int) -> Table:
    title = "log Z(κ) = log ₁F₁(k/2; d/2; κ): relative errors of Z, then E‖Px‖² = ∂log Z/∂κ and relative errors of it"
    table = Table(title=title, title_justify="left")
    columns = ["d", "k", "κ", "log Z", "series", "Kume–Wood 1", "Kume–Wood 3", f"Monte Carlo {samples:.0e}"]
    for name in [*columns, "E‖Px‖²", "K–W 1", "K–W 3"]:
        table.add_column(name, justify="right", no_wrap=True)
    for i, r in enumerate(rows):
        table.add_row(
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
            end_section=i + 1 < len(rows) and rows[i + 1].dim != r.dim,
        )
    return table
