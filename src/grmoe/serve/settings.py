"""What the server allows and how it computes: everything `grmoe serve` can be told."""

from __future__ import annotations

from dataclasses import dataclass

from grmoe import checks


@dataclass(frozen=True)
class Limits:
    prompt_tokens: int
    max_tokens: int  # of an answer
    body_bytes: int = 1 << 20
    concurrency: int = 16  # answers in the making at the same time
    queue: int = 64  # requests that wait for their turn; the next one gets a 429
    timeout: float = 120.0  # seconds from the last byte of a request to the last of its answer
    grace: float = 10.0  # seconds that running answers get when the server is told to stop
    connections: int = 1024  # open at the same time, idle ones included


@dataclass(frozen=True)
class Dial:
    default: tuple[float, ...]  # α of each MoE layer
    low: float
    high: float

    def of(self, alpha: float | None) -> tuple[float, ...]:
        """α of each layer for a request."""
        if alpha is None:
            return self.default
        checks.require(
            self.low <= alpha <= self.high,
            f"alpha must be between {self.low:g} and {self.high:g}, got {alpha:g}",
        )
        return (alpha,) * len(self.default)


def parse_range(text: str) -> tuple[float, float]:
    """`0.5:5` as (0.5, 5.0)."""
    low, colon, high = text.partition(":")
    try:
        found = (float(low), float(high)) if colon else None
    except ValueError:
        found = None
    if found is None or not 0 <= found[0] <= found[1] <= checks.LARGEST_ALPHA:
        raise ValueError(f"alpha-range must be LOW:HIGH with 0 <= LOW <= HIGH, such as 0.5:5, got {text!r}")
    return found
