"""The paper's studies that need no language model: `grmoe synthetic`, `grmoe normalizer`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from grmoe.terminal import Watch, console, fail, need, progress


def synthetic(
    out: Annotated[Path, typer.Option(help="Folder for results.json, table.md and the figures.")] = Path(
        "runs/synthetic"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="Easy setting, seven methods, six seeds: under a minute.")
    ] = False,
    setting: Annotated[
        list[str] | None, typer.Option(help="easy or hard; repeatable. Default: both.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Repeatable; `--method ?` lists them. Default: all.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds per method, trained as one batch.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")] = "auto",
) -> None:
    """Run the paper's synthetic routing study: nine methods, the Bayes oracle, the dial.

    Tokens of 8 classes lie near 8 subspaces of R^128; each class has its own linear map as target. Routers and experts
    are trained end to end on the regression loss. No method sees a label, except the row that says so.
    An interrupted run continues where it stopped when started again with the same options.

    Example: [bold]grmoe synthetic --setting easy --method grmoe --method softmax_top1 --seeds 10[/]
    """
    need("scipy", "matplotlib")
    import torch

    from grmoe.studies.synthetic.figure import draw
    from grmoe.studies.synthetic.methods import find_methods
    from grmoe.studies.synthetic.report import NOTES, rich_table, write_results
    from grmoe.studies.synthetic.study import QUICK_METHODS, SETTINGS, Config, run_setting

    if device not in ("auto", "cpu", "cuda"):
        fail(f"device must be auto, cpu or cuda, got {device}")
    if device == "cuda" and not torch.cuda.is_available():
        fail("device cuda needs a GPU that PyTorch can use; there is none")
    kind = "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    config = replace(Config.quick() if quick else Config(), device=kind)
    if seeds is not None:
        config = replace(config, seeds=seeds)
    if steps is not None:
        config = replace(config, training=replace(config.training, steps=steps))
    names = setting or (["easy"] if quick else list(SETTINGS))
    if unknown := [n for n in names if n not in SETTINGS]:
        fail(f"setting must be one of {', '.join(SETTINGS)}, got {', '.join(unknown)}")
    try:
        methods = find_methods(method or (QUICK_METHODS if quick else None))
    except ValueError as error:
        fail(str(error))
    total = len(names) * len(methods) * config.training.steps
    results = []
    with progress() as bar:
        watch = Watch(bar, total)
        for name in names:
            results.append(run_setting(SETTINGS[name], methods, config, out, watch))
    figures = [draw(result, out / f"synthetic-{result.setting.name}.png") for result in results]
    for result in results:
        console.print(rich_table(result))
    console.print(NOTES, style="dim", highlight=False)
    numbers = write_results(results, config, out)
    console.print(f"Numbers: {numbers}", highlight=False, soft_wrap=True)
    for figure in figures:
        console.print(f"Figure:  [bold]{figure}[/]", highlight=False, soft_wrap=True)


def normalizer(
    kappa: Annotated[list[float] | None, typer.Option(help="Concentration; repeatable.")] = None,
    dim: Annotated[
        list[int] | None, typer.Option(help="Dimension d; repeatable, one for each --rank.")
    ] = None,
    rank: Annotated[list[int] | None, typer.Option(help="Subspace rank k.")] = None,
    samples: Annotated[int, typer.Option(min=2, help="Monte Carlo samples.")] = 1_000_000,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the rows here.")] = None,
) -> None:
    """Validate the Bingham normaliser: contour integral, Kume-Wood and Monte Carlo side by side.

    Example: [bold]grmoe normalizer --dim 768 --rank 48 --kappa 0.4 --kappa 4.2[/]
    """
    from grmoe.studies import normalizer as study

    if len(dim or []) != len(rank or []):
        fail(f"give one --rank for each --dim, got {len(dim or [])} and {len(rank or [])}")
    shapes = list(zip(dim, rank, strict=True)) if dim and rank else list(study.SHAPES)
    cases = [(d, k, value) for d, k in shapes for value in kappa or study.KAPPAS]
    rows = []
    with progress() as bar:
        task = bar.add_task("normaliser", total=len(cases))
        for d, k, value in cases:
            try:
                rows.append(study.validate(d, k, value, samples))
            except ValueError as error:
                fail(str(error))
            bar.advance(task)
    console.print(study.rich_table(rows, samples))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps([asdict(r) for r in rows], indent=1))
