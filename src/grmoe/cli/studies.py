"""Studies of the paper that need no language model: `grmoe synthetic`, `grmoe normalizer`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from grmoe.cli.options import Device
from grmoe.cli.shell import run_plan, shell


def synthetic(
    out: Annotated[Path, typer.Option(help="Folder for results.json, table.md and the figures.")] = Path(
        "runs/synthetic"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="Easy setting, seven methods, six seeds: under a minute.")
    ] = False,
    setting: Annotated[
        list[str] | None, typer.Option(help="easy or hard. Repeatable.", show_default="both")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Method to run; `--method ?` lists them. Repeatable.", show_default="all"),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Seeds per method. All seeds of a method train as one batch.",
            show_default="50; 6 with --quick",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps.", show_default="the study's own")
    ] = None,
    device: Device = "auto",
) -> None:
    """Run the paper's synthetic routing study: its eight methods and three more, the Bayes oracle, and the dial.

    Tokens of 8 classes lie near 8 subspaces of R^128. The target of each class is its own linear map. Routers and
    experts train end to end on the regression loss. No method sees a label, except the one named supervised.

    An interrupted study continues where it stopped when you run the same command again.

    Example: [bold]grmoe synthetic --setting easy --method grmoe --method softmax_top1 --seeds 10[/]
    """
    with shell("studies", continues=True):
        from grmoe import checks
        from grmoe.hardware import use_device
        from grmoe.studies.synthetic import Config, Plan, run, save, show
        from grmoe.studies.synthetic.methods import METHODS, find_methods
        from grmoe.studies.synthetic.study import QUICK_METHODS, SETTINGS

        config = replace(Config.quick() if quick else Config(), device=use_device(device).type)
        if seeds is not None:
            config = replace(config, seeds=seeds)
        if steps is not None:
            config = replace(config, training=replace(config.training, steps=steps))
        names = setting or (["easy"] if quick else list(SETTINGS))
        plan = Plan(
            out=out,
            config=config,
            settings=tuple(SETTINGS[checks.one_of("setting", name, tuple(SETTINGS))] for name in names),
            methods=find_methods(method or (QUICK_METHODS if quick else [m.key for m in METHODS])),
        )
        run_plan(plan, run, show, partial(save, out=out))


def normalizer(
    kappa: Annotated[
        list[float] | None,
        typer.Option(help="Concentration κ. Repeatable.", show_default="six from 0.4 to 1000"),
    ] = None,
    dim: Annotated[
        list[int] | None,
        typer.Option(help="Dimension d. Repeatable, with one --rank each.", show_default="128, 768, 2048"),
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option(help="Rank k of the subspace.", show_default="16, 48, 64")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a run or an exported model: also at its learned κ, with its own d and k. The argument of Z "
            "is c·κ there."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=2, help="Monte Carlo samples.")] = 1_000_000,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the rows to this file.")
    ] = None,
) -> None:
    """Validate the Bingham normaliser: contour integral, Kume-Wood and Monte Carlo side by side.

    Example: [bold]grmoe normalizer --dim 768 --rank 48 --kappa 0.4 --kappa 4.2[/]

    Example: [bold]grmoe normalizer --run runs/first[/]
    """
    with shell(*(() if run is None else ("lm",))):
        from grmoe.studies import normalizer as fixed

        if run is not None:
            from grmoe.studies import learned_kappa as at_learned

            if dim or rank:
                raise ValueError("give --dim and --rank, or --run, which has its own; got both")
            plan_learned = at_learned.Plan(model=run, samples=samples, kappas=tuple(kappa or fixed.KAPPAS))
            shown = partial(at_learned.show_learned, samples=samples)
            run_plan(plan_learned, at_learned.run, shown, partial(fixed.save, path=json_path))
            return
        dims, ranks = dim or [], rank or []
        if len(dims) != len(ranks):
            raise ValueError(f"give one --rank for each --dim, got {len(ranks)} for {len(dims)}")
        shapes = tuple(zip(dims, ranks, strict=True)) or fixed.SHAPES
        plan = fixed.Plan(samples=samples, shapes=shapes, kappas=tuple(kappa or fixed.KAPPAS))
        shown = partial(fixed.show_noted, samples=samples)
        run_plan(plan, fixed.run, shown, partial(fixed.save, path=json_path))
