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
    int | None, typer.Option(min=1, help="Of each text.", show_default="8192; 131072 on a GPU")
]
Window = Annotated[int | None, typer.Option(min=1, help="Tokens of a window.", show_default="as trained")]
RoutedText = Annotated[
    list[str] | None,
    typer.Option(
        help="Text to route, as `grmoe prepare` reads it; repeatable.", show_default="the run's held-out"
    ),
]
Checkpoint = Annotated[str, typer.Option(help="Of a run: best (of validation), last, or a step.")]
