"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

ModelFolder = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Folder of a run (`grmoe train`) or of an exported model.")
]
Checkpoint = Annotated[
    str, typer.Option(help="Checkpoint of a run: best (lowest validation loss), last, or a step.")
]
Alpha = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="The dial α. Larger means sharper routing, and fewer experts under a mass or threshold selection.",
        show_default="as saved with the model",
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Experts per token, within the range that `grmoe dial` calibrated. Instead of α.",
        show_default="as saved with the model",
    ),
]
CalibrationText = Annotated[
    str | None,
    typer.Option(
        help="Calibration text: prepared tokens, or any file or folder that `grmoe prepare` reads.",
        show_default="the run's validation split",
    ),
]
CheckedTexts = Annotated[
    list[str] | None, typer.Option(help="Another text to check the result on. Repeatable.")
]
TextTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens to read of each text.", show_default="8192; 131072 on a GPU")
]
Window = Annotated[int | None, typer.Option(min=1, help="Tokens per window.", show_default="as trained")]
RoutedText = Annotated[
    list[str] | None,
    typer.Option(
        help="Text to route, in any form that `grmoe prepare` reads. Repeatable.",
        show_default="the run's validation split",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.yaml] [key=value]...", help="A YAML file, then single settings that override it."
    ),
]
AMBIGUOUS_SHARE = 0.1  # a share as large as this is rare, and 0.5 for "half a percent" is not
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto: a GPU if there is one.")]


def beside_model(files: str, kind: str) -> Any:
    """The option `--out` of a command that writes `files` to the folder of a run or next to an exported model."""
    place = f"MODEL/{kind} of a run, MODEL-{kind} of an exported model"
    return typer.Option(file_okay=False, help=f"Folder for {files}.", show_default=place)


def parse_number(name: str, text: str, unit: str, example: str, zero: bool = False) -> float:
    """A positive number with or without its unit: 1.3 for "1.3x". zero: 0 is allowed too."""
    try:
        value = float(text.strip().removesuffix(unit))
    except ValueError:
        raise ValueError(f"{name} must be a number like {example}, got {text!r}") from None
    if not (0 < value < float("inf") or (zero and value == 0)):
        raise ValueError(f"{name} must be {'at least' if zero else 'above'} 0 and finite, got {text!r}")
    return value


def parse_numbers(name: str, texts: list[str] | None) -> list[float]:
    """Positive numbers of a repeatable option with commas: [1.0, 1.5] for ["1,1.5"]."""
    return [parse_number(name, part, "", "1.5") for text in texts or [] for part in text.split(",")]


def parse_percent(
    name: str, text: str | None, default: str = "1%", ambiguous: float = AMBIGUOUS_SHARE, zero: bool = False
) -> float:
    """A positive share: 0.01 for "1%" and for "0.01". Without the sign, a number from `ambiguous` on is refused.

    It may mean percent. zero: 0 is allowed too.
    """
    text = (default if text is None else text).strip()
    value = parse_number(name, text, "%", "1%", zero)
    if text.endswith("%"):
        return value / 100
    if value >= ambiguous:
        other = f" or {100 * value:g}%" if value < 1 else f" or {value / 100:g}" if value < 10 else ""
        raise ValueError(f"{name} {text}: {value:g}%{other}? From {ambiguous:g} on, write the % sign")
    return value
