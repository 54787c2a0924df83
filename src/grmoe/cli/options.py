"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

CalibrationText = Annotated[
    str | None,
    typer.Option(
        help="Calibration text: prepared tokens, or .txt, .jsonl, .parquet.",
        show_default="the run's validation split",
    ),
]
TextTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens of each text.", show_default="8192; 131072 on a GPU")
]
Window = Annotated[int | None, typer.Option(min=1, help="Tokens per window.", show_default="as trained")]
RoutedText = Annotated[
    list[str] | None,
    typer.Option(
        help="Text to route, as `grmoe prepare` reads it; repeatable.", show_default="the run's held-out"
    ),
]
Checkpoint = Annotated[str, typer.Option(help="Of a run: best (of validation), last, or a step.")]


def parse_number(name: str, text: str, unit: str, example: str) -> float:
    """A positive number with or without its unit: 1.3 for "1.3x"."""
    try:
        value = float(text.strip().removesuffix(unit))
    except ValueError:
        raise ValueError(f"{name} must be a number like {example}, got {text!r}") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be above 0 and finite, got {text!r}")
    return value


def parse_percent(name: str, text: str | None, default: str = "1%") -> float:
    """A positive share: 0.01 for "1%" and for "0.01"."""
    text = default if text is None else text
    value = parse_number(name, text, "%", "1%")
    return value / 100 if text.strip().endswith("%") else value
