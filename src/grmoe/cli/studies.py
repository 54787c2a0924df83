"""Studies of the paper that need no language model: `grmoe synthetic`, `grmoe normalizer`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grmoe.cli.options import Device
from grmoe.cli.shell import list_and_exit, run_plan, shell

if TYPE_CHECKING:
    from grmoe.studies.synthetic.task import Setting


def synthetic(
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for METHOD.json, table.md and the figures.",
            show_default="runs/synthetic; with --map runs/synthetic-map",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Easy setting, seven methods, six seeds, one learning rate: under a minute."
        ),
    ] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="easy, hard or skewed (classes of unequal frequency). Repeatable.", show_default="all"
        ),
    ] = None,
    rho: Annotated[
        list[float] | None,
        typer.Option(
            help="A setting of your own: overlap ρ* of the classes. Repeatable.", show_default="0.1"
        ),
    ] = None,
    sigma2: Annotated[
        list[float] | None,
        typer.Option(
            help="A setting of your own: noise σ² outside a subspace. Repeatable.", show_default="0.1"
        ),
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            help="A setting of your own: class e has a weight ∝ ratio^e.", show_default="1, equal weights"
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=1, help="Rank k of the classes and of GrMoE's frames.", show_default="16"),
    ] = None,
    draw_map: Annotated[
        bool,
        typer.Option(
            "--map",
            help="GrMoE and Softmax on a grid of ρ* and σ². --rho and --sigma2 change the grid.",
        ),
    ] = False,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Method to run; `--method ?` lists them. Repeatable.", show_default="all"),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Seeds per method. All seeds of a method train as one batch.",
            show_default="50; 10 with --map; fewer with --quick",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps.", show_default="the study's own")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            help="Factor on the learning rates. Each method uses the best one, found on other tasks. Repeatable.",
            show_default="0.1, 0.3, 1, 3, 10; 1 with --quick",
        ),
    ] = None,
    at_once: Annotated[
        int, typer.Option(min=1, help="Methods that run at the same time, on one device.")
    ] = 1,
    device: Device = "auto",
) -> None:
    """Run the paper's synthetic routing study: its eight methods and fourteen more, the Bayes oracle, and the dial.

    Tokens of 8 classes lie near 8 subspaces of R^128. The target of each class is its own linear map. Routers and
    experts train end to end on the regression loss. No method sees a label, except the one named supervised.

    First every method tries all learning rates on other tasks. Then it runs with the best one.

    An interrupted study continues where it stopped when you run the same command again.

    Example: [bold]grmoe synthetic --setting easy --method grmoe --method softmax_top1 --seeds 10[/]

    Example: [bold]grmoe synthetic --rho 0.2 --sigma2 0.3 --rank 8 --seeds 10[/]
    """
    with shell("studies", continues=True):
        from grmoe.hardware import use_device
        from grmoe.studies.synthetic import Config, Plan, heatmap, run, save, show
        from grmoe.studies.synthetic.methods import METHODS, find_methods
        from grmoe.studies.synthetic.study import QUICK_METHODS

        list_and_exit(method, {found.key: found.title for found in METHODS})
        config = heatmap.map_config(quick) if draw_map else Config.quick() if quick else Config()
        config = replace(
            config,
            device=use_device(device).type,
            seeds=seeds or config.seeds,
            rank=rank or config.rank,
            rates=tuple(rate or config.rates),
            training=replace(config.training, steps=steps or config.training.steps),
        )
        settings = _settings(setting, rho, sigma2, ratio, draw_map=draw_map, quick=quick)
        every = heatmap.METHODS if draw_map else QUICK_METHODS if quick else [m.key for m in METHODS]
        plan = Plan(
            out=out or Path("runs/synthetic-map" if draw_map else "runs/synthetic"),
            config=config,
            settings=settings,
            methods=find_methods(method or every),
            curves=not draw_map,
            at_once=at_once,
        )
        if draw_map:
            run_plan(plan, run, heatmap.show, partial(heatmap.save, out=plan.out))
        else:
            run_plan(plan, run, show, partial(save, out=plan.out))


def _settings(
    names: list[str] | None,
    rhos: list[float] | None,
    sigma2s: list[float] | None,
    ratio: float | None,
    *,
    draw_map: bool,
    quick: bool,
) -> tuple[Setting, ...]:
    """Named settings, settings of the user's own, or the grid of a map."""
    from grmoe import checks
    from grmoe.studies.synthetic import heatmap
    from grmoe.studies.synthetic.study import SETTINGS

    own = bool(rhos or sigma2s) or ratio is not None
    checks.require(
        not (names and (own or draw_map)),
        "--setting cannot be given with --map, --rho, --sigma2 or --ratio, which make settings of their own",
    )
    if not (own or draw_map):
        wanted = names or (["easy"] if quick else list(SETTINGS))
        return tuple(SETTINGS[checks.one_of("setting", name, tuple(SETTINGS))] for name in wanted)
    rows, columns = ((0.1,), (0.1,)) if not draw_map else heatmap.axes(quick)
    return heatmap.grid(rhos or rows, sigma2s or columns, 1.0 if ratio is None else ratio)


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

    The normaliser Z(κ) makes the gate of a subspace a density. A row has log Z for one dimension, rank and κ by the
    contour integral, and the relative errors of the other methods.

    Example: [bold]grmoe normalizer --dim 768 --rank 48 --kappa 0.4 --kappa 4.2[/]

    Example: [bold]grmoe normalizer --run runs/first[/]
    """
    with shell(*(() if run is None else ("lm",))):
        from grmoe.studies import normalizer_table as fixed

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
