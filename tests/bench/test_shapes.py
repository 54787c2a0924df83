"""Sizes as text, and the messages for mistakes in it."""

from __future__ import annotations

import pytest

from grmoe.bench.shapes import DialShape, GateShape, LayerShape, Shape, default_rank, parse_shape


def test_text_and_shape_are_inverse() -> None:
    shape = parse_shape(LayerShape, "16384, 768,8,1536,2")
    assert shape == LayerShape(tokens=16384, dim=768, experts=8, width=1536, top_k=2)
    assert parse_shape(LayerShape, shape.text) == shape
    assert str(shape) == "tokens 16384, dim 768, experts 8, width 1536, top_k 2"


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GateShape, "64,32", "must be tokens,dim,experts,rank, got 2 numbers in '64,32'"),
        (GateShape, "64,32,4,8,2", "must be tokens,dim,experts,rank, got 5 numbers"),
        (GateShape, "64,32,four,8", "must be tokens,dim,experts,rank, got '64,32,four,8'"),
        (GateShape, "64,32,4,33", "rank must be at most dim = 32, got 33"),
        (GateShape, "64,32,1,8", "experts must be at least 2, got 1"),
        (LayerShape, "0,32,4,32,2", "tokens must be an integer >= 1, got 0"),
        (LayerShape, "64,32,4,32,5", "experts must be at least 5, got 4"),
        (DialShape, "64,32,3,32", "experts must be at least 4, got 3"),
    ],
)
def test_mistakes_are_named(kind: type[Shape], text: str, message: str) -> None:
    with pytest.raises(ValueError, match="--shape") as caught:
        parse_shape(kind, text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text", "changed"),
    [
        (GateShape, "64,32,4,8", "64,32,4,16"),
        (LayerShape, "64,32,4,32,2", None),
        (DialShape, "64,32,4,32", None),
    ],
)
def test_another_rank_must_fit_into_the_shape(kind: type[Shape], text: str, changed: str | None) -> None:
    """Only the gate's shape has a rank. That of the others is an option of the benchmark."""
    shape = parse_shape(kind, text)
    assert shape.at_rank(16).text == (changed or text)
    with pytest.raises(ValueError, match="rank must be at most dim = 32, got 33"):
        shape.at_rank(33)


@pytest.mark.parametrize(
    ("dim", "experts", "rank"), [(768, 8, 48), (2048, 16, 64), (2048, 64, 32), (256, 64, 4), (8, 16, 1)]
)
def test_default_rank(dim: int, experts: int, rank: int) -> None:
    assert default_rank(dim, experts) == rank
