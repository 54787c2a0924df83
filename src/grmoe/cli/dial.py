"""`grmoe dial`: choose the sparsity of a trained model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer

from grmoe.cli import options
from grmoe.cli.shell import run_plan, shell
from grmoe.terminal import say


def dial(
    model: options.ModelFolder,
    target_experts: Annotated[
        float | None, typer.Option(help="Lowest perplexity with at most this many experts per token.")
    ] = None,
    max_ppl_increase: Annotated[
        str | None,
        typer.Option(
            help="Fewest experts with a perplexity increase of at most this, 1% or 0.01: at the upper end of its 90 % "
            "interval, on each domain of the text, and with a --margin for other text.",
            show_default="1%",
        ),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            help="How many times the increase on the calibration text must fit into --max-ppl-increase: perplexity can "
            "grow by more on text of another kind. 1: the calibration text is like the text you will serve.",
            show_default="2.5",
        ),
    ] = None,
    throughput: Annotated[
        str | None, typer.Option(help="Lowest perplexity at this measured speed-up or more, e.g. 1.3x.")
    ] = None,
    text: options.CalibrationText = None,
    check: options.CheckedTexts = None,
    tokens: options.TextTokens = None,
    length: options.Window = None,
    cap: Annotated[
        int | None, typer.Option(min=1, help="The most experts per token.", show_default="as trained")
    ] = None,
    checkpoint: options.Checkpoint = "best",
    beside: Annotated[
        list[Path] | None,
        typer.Option(
            help="Another run or model, measured on the same text: at its budgets if it was dialled, else as trained. "
            "Repeatable."
        ),
    ] = None,
    no_speed: Annotated[
        bool,
        typer.Option("--no-speed", help="Time nothing. Quicker, and on a busy machine times mean nothing."),
    ] = False,
    out: Annotated[Path | None, options.beside_model("results.json and pareto.png", "dial")] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Save the model with the chosen setting to OUT/model.")
    ] = False,
) -> None:
    """Choose how sparse a trained model is: the cheapest setting that meets a target, with certificates.

    A token computes its most probable expert and those with at least some weight, or the fewest that reach probability
    τ; at most --cap. The command compares one α for all layers, one α per layer, top-k with one k or a k per layer, and
    experts by gate × output norm, all on the same text. Nothing is retrained. After an interruption the same command
    uses what was measured.

    The answer stands first, the tables behind it follow. A second dial replaces results.json and says so. Without
    --write it moves a model that an earlier dial saved to OUT/model-old, if that no longer belongs to the results.

    Example: [bold]grmoe dial runs/first --max-ppl-increase 1% --check wikitext.txt --write[/]
    """
    with shell("lm", "studies", continues=True):
        asked = _asked(target_experts, max_ppl_increase, throughput)  # before the imports, which take seconds
        if margin is not None and asked[0] != "perplexity":
            raise ValueError("--margin belongs to --max-ppl-increase: other targets do not use it")
        from grmoe.dial import Plan, Target, run, save, show
        from grmoe.runs.about import export_command
        from grmoe.runs.export import check_place
        from grmoe.runs.results import check_results, results_folder

        out = out or results_folder(model, "dial")
        target = Target(*asked) if margin is None else Target(*asked, margin)
        plan = Plan(
            model=model, target=target, text=text, checks=check or [],
            tokens=tokens, length=length, cap=cap, checkpoint=checkpoint, beside=beside or [], timed=not no_speed,
            folder=out,
        )  # fmt: skip
        if write:
            check_place(model, out / "model")
            check_results(model, "dial")
        result = run_plan(plan, run, show, partial(save, out=out, write=write))
        place = out / "model"
        if write:
            say(f"Next: grmoe serve {quote(str(place))}")
        elif result.loaded.is_run and result.body.budget is not None:
            # Other commands look for the curve of a run in its own folder alone.
            if out.resolve() != results_folder(model, "dial").resolve():
                say(f"Next: run it again with --write, which saves the model to {quote(str(place))}")
                return
            dtype, step = str(result.loaded.model.dtype), None if checkpoint == "best" else result.loaded.step
            say(f"Next: {export_command(model, result.body.budget, dtype, place, step)}")


def _asked(
    experts: float | None, max_ppl_increase: str | None, throughput: str | None
) -> tuple[Literal["experts", "perplexity", "throughput"], float]:
    """Kind and value of the one target that was given. Without any: a perplexity increase of 1 %."""
    if sum(v is not None for v in (experts, max_ppl_increase, throughput)) > 1:
        raise ValueError("give one of --target-experts, --max-ppl-increase and --throughput, not several")
    if experts is not None:
        return "experts", experts
    if throughput is not None:
        return "throughput", options.parse_number("throughput", throughput, "x", "1.3x")
    return "perplexity", options.parse_percent("max-ppl-increase", max_ppl_increase)
