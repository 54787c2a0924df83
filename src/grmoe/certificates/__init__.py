"""Proved bounds on routing: entropy, top-k mass, load balance, truncation error, range of the logits.

Every function takes tensors and returns a `Certificate`: a number, and whether the hypothesis behind it holds. Where it
does not, the number is the trivial one that is always true. There are two kinds of bound: `paper` is the formula as the
paper prints it, `sharp` the best one from the same assumptions. Both are exact in real arithmetic; rounding adds a few
units in the last place. Half-precision input is widened to fp32. Logits ℓ include α and the prior, so that the gate is
softmax(ℓ). Entropies are in nats.
"""

from grmoe.certificates.amortized import amortized_tv_bound
from grmoe.certificates.certificate import Certificate
from grmoe.certificates.entropy import EntropyBounds, entropy_bounds, entropy_bounds_from_range
from grmoe.certificates.load import load_cv_bound, min_load_bounds, separation_gap
from grmoe.certificates.logit_range import logit_range_bound
from grmoe.certificates.truncation import topk_mass_bound, truncation_error_bound

__all__ = [
    "Certificate",
    "EntropyBounds",
    "amortized_tv_bound",
    "entropy_bounds",
    "entropy_bounds_from_range",
    "load_cv_bound",
    "logit_range_bound",
    "min_load_bounds",
    "separation_gap",
    "topk_mass_bound",
    "truncation_error_bound",
]
