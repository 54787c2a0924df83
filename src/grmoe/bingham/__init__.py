"""The Bingham distribution on the unit sphere, p(x) = exp(xᵀAx) / Z with respect to the uniform measure.

It is the likelihood of the gate: A_e = U_e diag(λ_e) U_eᵀ (or κ_e U_eU_eᵀ), and Z is its normaliser, E exp(xᵀAx)
over uniform x. The paper calls it matrix Bingham. A token is a vector, so this is the vector distribution.
"""

from grmoe.bingham.contour import log_normalizer
from grmoe.bingham.estimates import kume_wood, monte_carlo, printed
from grmoe.bingham.kummer import log_kummer, log_kummer_reference, mean_energy
from grmoe.bingham.sampling import sample

__all__ = [
    "kume_wood",
    "log_kummer",
    "log_kummer_reference",
    "log_normalizer",
    "mean_energy",
    "monte_carlo",
    "printed",
    "sample",
]
