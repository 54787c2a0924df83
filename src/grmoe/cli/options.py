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
CalibrationText = Annotated[
    str | None,
    typer.Option(
        help="Calibration text: a folder of prepared tokens, or a .txt, .jsonl or .parquet file.",
        show_default="the run's validation split",
    ),
]
TextTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens to read of each text.", show_default="8192; 131072 on a GPU"),
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


def results_folder(files: str, kind: str) -> Any:
    """The option `--out` of a command that writes `files` next to a model."""
    return typer.Option(
        file_okay=False, help=f"Folder for {files}.", show_default=f"RUN/{kind}, or MODEL-{kind}"
    )
