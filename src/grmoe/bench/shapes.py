"""The sizes of a benchmark, as text on the command line."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace
from typing import Self, TypeVar

from grmoe import checks

TOP_K = 2  # of the gate benchmark, which computes no experts


@dataclass(frozen=True)
class Shape:
    """Positive integers. The text of a shape lists the fields of its class in order."""

    def __post_init__(self) -> None:
        for field in fields(self):
            checks.positive_int(field.name, getattr(self, field.name))

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))

    @property
    def text(self) -> str:
        """The value of `--shape`."""
        return ",".join(map(str, astuple(self)))

    def at_rank(self, rank: int) -> Self:
        """The shape with another rank of the Grassmann gate, if the shape has one. The rank must fit into it."""
        return self


@dataclass(frozen=True)
class GateShape(Shape):
    tokens: int
    dim: int
    experts: int
    rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.subspace(self.dim, self.rank)
        _at_least("experts", self.experts, TOP_K)

    def at_rank(self, rank: int) -> Self:
        return replace(self, rank=rank)


@dataclass(frozen=True)
class ExpertsShape(Shape):
    """Gate and experts. The rank is not part of it: a benchmark derives it, or takes it from `--rank`."""

    tokens: int
    dim: int
    experts: int
    width: int

    def at_rank(self, rank: int) -> Self:
        checks.subspace(self.dim, rank)
        return self


@dataclass(frozen=True)
class LayerShape(ExpertsShape):
    top_k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least("experts", self.experts, max(2, self.top_k))


@dataclass(frozen=True)
class DialShape(ExpertsShape):
    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least("experts", self.experts, 4)


S = TypeVar("S", bound=Shape)


def _at_least(name: str, value: int, least: int) -> None:
    checks.require(value >= least, f"{name} must be at least {least}, got {value}")


def parse_shape(kind: type[S], text: str) -> S:
    """A shape from "16384,768,8,48". A `ValueError` names the fields."""
    names = [field.name for field in fields(kind)]
    try:
        return kind(*[int(part) for part in text.split(",")])
    except TypeError:
        got = f"{len(text.split(','))} numbers in {text!r}"
    except ValueError as error:
        got = f"{text!r}" if "invalid literal" in str(error) else f"{text!r}: {error}"
    raise ValueError(f"--shape must be {','.join(names)}, got {got}")


def default_rank(dim: int, experts: int) -> int:
    """Half of d/N, rounded down to a multiple of 16, but at least min(32, d/N).

    This is half the paper's k: the frames of all experts together span half of the model's space.
    """
    share = max(1, dim // experts)
    return max(share // 2 // 16 * 16, min(32, share))
