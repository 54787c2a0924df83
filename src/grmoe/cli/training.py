"""Language models trained and compared: `grmoe train`, `grmoe quality`, `grmoe curves`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from grmoe.terminal import console, fail, need

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG.yaml] [key=value]...", help="A YAML file, and single keys in its place."),
]


def _split(settings: list[str] | None) -> tuple[Path | None, list[str]]:
    """(the YAML file if the first word is one, the overrides)."""
    given = list(settings or [])
    path = Path(given.pop(0)) if given and "=" not in given[0] else None
    return path, given


def train(
    settings: Settings = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run's last checkpoint, to the bit.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print the resolved configuration, and train nothing.")
    ] = False,
) -> None:
    """Train a language model on prepared text.

    Every setting has a default: [bold]grmoe train --show[/] prints them all, as the YAML file they could stand in. A
    model is a preset and changes to it: model.preset=tiny model.router=softmax model.router_options.balance=true.

    The run's folder gets config.yaml, environment.json, log.jsonl, curves.png, tokenizer and checkpoints. Ctrl-C and
    SIGTERM save a checkpoint first; a run that was killed goes on from its last one with --resume. On several GPUs:
    torchrun --nproc-per-node 8 -m grmoe train run.yaml parallel.expert=2

    Example: [bold]grmoe train data.path=runs/data out=runs/first steps=2000 optim.lr=6e-4[/]
    """
    need("transformers", "yaml", extra="lm")
    from grmoe.config import ConfigError, load, to_yaml
    from grmoe.runs.config import TrainConfig
    from grmoe.runs.folder import CONFIG

    path, given = _split(settings)
    try:
        config = load(TrainConfig, path, given)
        saved = Path(config.out) / CONFIG
        if resume and path is None and saved.is_file():
            config = load(TrainConfig, saved, given)
    except ConfigError as error:
        fail(escape(str(error)))
    if show:
        print(to_yaml(config), end="")
        return
    from grmoe.train.command import main

    status = main(config, resume)
    if status:
        raise typer.Exit(status)


def quality(
    settings: Settings = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Repeatable; `--method ?` lists them. Default: the first four.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs a method.")] = 3,
    at_once: Annotated[int, typer.Option(min=1, help="Runs side by side on the device.")] = 1,
    out: Annotated[
        Path, typer.Option(help="Folder for the runs, results.json, table.md, curves.png.")
    ] = Path("runs/quality"),
) -> None:
    """Compare routers as language models: the same text, tokens and experts a token, several seeds.

    Settings are those of [bold]grmoe train[/]; the routers are filled in.

    A study that is interrupted goes on where it stopped when started again.

    Example: [bold]grmoe quality data.path=runs/data steps=1400 optim.lr=6e-4 --seeds 3 --at-once 4[/]
    """
    need("transformers", "yaml", extra="lm")
    need("scipy", "matplotlib")
    from grmoe.config import ConfigError, load
    from grmoe.runs.config import TrainConfig
    from grmoe.studies import quality as compare
    from grmoe.train.curves import draw_curves

    path, given = _split(settings)
    methods = method or list(compare.DEFAULT)
    if unknown := [m for m in methods if m not in compare.METHODS]:
        fail(f"method must be one of {', '.join(compare.METHODS)}, got {escape(', '.join(unknown))}")
    try:
        base = load(TrainConfig, path, given)
        runs = compare.study(
            base, methods, seeds, out, at_once, lambda text: print(text, file=sys.stderr, flush=True)
        )
    except (ConfigError, RuntimeError) as error:
        fail(escape(str(error)))
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on where it stopped")
    console.print(compare.rich_table(compare.rows(runs)))
    numbers = compare.write_results(runs, base, out)
    first = [out / f"{name}-0" for name in methods]
    figure = draw_curves(first, out / "curves.png")
    console.print(f"Numbers: {numbers}", highlight=False, soft_wrap=True)
    console.print(f"Figure:  [bold]{figure}[/] (first seed)", highlight=False, soft_wrap=True)


def curves(
    runs: Annotated[list[Path], typer.Argument(help="Folders of `grmoe train`, drawn over each other.")],
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("runs/curves.png"),
) -> None:
    """Draw loss, load and entropy of one or several runs, finished or not, and print where they stand.

    Example: [bold]grmoe curves runs/grassmann runs/softmax[/]
    """
    need("matplotlib")
    need("transformers", "yaml", extra="lm")
    from grmoe.train.curves import draw_curves, summary

    try:
        draw_curves(runs, out)
        console.print(summary(runs))
    except ValueError as error:
        fail(escape(str(error)))
    console.print(f"Figure: [bold]{escape(str(out))}[/]", highlight=False, soft_wrap=True)
