"""Forms of our layer: other choices of kernels than the default, each timed beside the form it would replace.

A choice that wins becomes the default, and its form leaves this table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grmoe.bench.measure import Choice
from grmoe.bench.shapes import LayerShape

# Decoding and short prompts. The experts' weights are read once and hardly used.
FEW_TOKENS = (1, 2, 8, 32, 128)
OURS, SOFTMAX = "ours", "ours, softmax gate"
IN_PARTS = f"{SOFTMAX}, backward in parts"


@dataclass(frozen=True, kw_only=True)
class Form:
    choices: Callable[[], Sequence[Choice]]
    """What differs from the default. Called where Triton is."""
    beside: str
    """The contender that its time is divided by."""
    softmax: bool = False
    """With the softmax gate, so that the experts alone are compared."""
    forward: bool = True
    backward: bool = True
    suits: Callable[[LayerShape], bool] = lambda shape: True


def early() -> list[Choice]:
    """Kernels start while the one before them still runs (`grmoe.kernels.early`)."""
    from grmoe.kernels import launch

    return [(launch, "EARLY", True)]


def one_token() -> list[Choice]:
    """The experts of one token without a list."""
    from grmoe.experts import one_token

    return [(one_token, "ENABLED", True)]


def _ahead(steps: int) -> Choice:
    """One of the two groups that multiply goes ahead of the other by that many steps, on Hopper."""
    from grmoe.kernels import hopper

    return (hopper, "LEAD", steps)


def _specialised() -> Choice:
    """All GEMMs are warp-specialised, on Hopper."""
    from grmoe.kernels import grouped_gemm

    return (grouped_gemm, "ALL_SPECIALISED", True)


def _at_once() -> list[Choice]:
    """The weighted sum per token, with all of a token's rows on their way at once."""
    from grmoe.kernels import rows

    return [(rows, "AT_ONCE", True)]


def _any_number() -> list[Choice]:
    """The warp-specialised gate, also where it has more experts than it takes by default."""
    from grmoe.kernels import gate

    return [(gate, "MOST", 256)]


def _backward(hidden: bool, down: bool, up: bool) -> Callable[[], list[Choice]]:
    """Which parts of the experts' backward are fused (`grmoe.kernels.experts.Fused`)."""

    def choices() -> list[Choice]:
        from grmoe.kernels import experts

        return [(experts, "fused_parts", lambda x: experts.Fused(hidden, down, up))]

    return choices


def _fused(*parts: bool) -> Form:
    return Form(choices=_backward(*parts), beside=IN_PARTS, softmax=True, forward=False)


FORMS = {
    f"{OURS}, early starts": Form(choices=early, beside=OURS),
    f"{SOFTMAX}, early starts": Form(choices=early, beside=SOFTMAX, softmax=True),
    f"{OURS}, 3 steps ahead": Form(choices=lambda: [_ahead(3)], beside=OURS),
    f"{SOFTMAX}, 2 steps ahead": Form(choices=lambda: [_ahead(2)], beside=SOFTMAX, softmax=True),
    f"{SOFTMAX}, 3 steps ahead": Form(choices=lambda: [_ahead(3)], beside=SOFTMAX, softmax=True),
    f"{SOFTMAX}, all specialised": Form(choices=lambda: [_specialised()], beside=SOFTMAX, softmax=True),
    f"{SOFTMAX}, all specialised, 2 steps ahead": Form(
        choices=lambda: [_specialised(), _ahead(2)], beside=SOFTMAX, softmax=True
    ),
    f"{SOFTMAX}, all specialised, 3 steps ahead": Form(
        choices=lambda: [_specialised(), _ahead(3)], beside=SOFTMAX, softmax=True
    ),
    f"{SOFTMAX}, sums at once": Form(choices=_at_once, beside=SOFTMAX, softmax=True),
    f"{OURS}, specialised gate": Form(
        choices=_any_number,
        beside=OURS,
        suits=lambda shape: shape.experts > 64 and shape.tokens > max(FEW_TOKENS),
    ),
    f"{OURS}, one token": Form(
        choices=one_token, beside=OURS, backward=False, suits=lambda shape: shape.tokens == 1
    ),
    f"{OURS}, one token, early starts": Form(
        choices=lambda: [*one_token(), *early()],
        beside=OURS,
        backward=False,
        suits=lambda shape: shape.tokens == 1,
    ),
    IN_PARTS: _fused(False, False, False),
    f"{SOFTMAX}, backward with fused hidden values": _fused(True, False, False),
    f"{SOFTMAX}, backward with gathered tokens": _fused(False, False, True),
    f"{SOFTMAX}, backward fused": _fused(True, True, True),
    f"{SOFTMAX}, backward fused, all specialised, 3 steps ahead": Form(
        choices=lambda: [*_backward(True, True, True)(), _specialised(), _ahead(3)],
        beside=IN_PARTS,
        softmax=True,
        forward=False,
    ),
}
