"""Train and compare language models: `grmoe train`, `grmoe curves`, `grmoe compare`."""

from __future__ import annotations

import contextlib
import difflib
import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from grmoe.cli import options
from grmoe.cli.options import Settings
from grmoe.cli.shell import list_and_exit, run_plan, shell
from grmoe.terminal import console, note, say, say_all, say_written


def _split(settings: list[str] | None, context: typer.Context) -> tuple[Path | None, list[str]]:
    """(the YAML file if the first word is one, the overrides).

    Unknown options are among the words, because other trainers take `--steps 30`. The message has the option that was
    meant, or shows how the setting is written here.
    """
    given = list(settings or [])
    options = [name.lstrip("-") for parameter in context.command.params for name in parameter.opts]
    for place, word in enumerate(given):
        if word.startswith("-"):
            key, _, value = word.lstrip("-").partition("=")
            if near := difflib.get_close_matches(key, options, n=1, cutoff=0.75):
                raise ValueError(f"there is no option {word}; did you mean --{near[0]}?")
            value = value or next((v for v in given[place + 1 : place + 2] if "=" not in v), "…")
            raise ValueError(
                f"there is no option {word} (--help lists them); settings have no dashes: "
                f"{key.replace('-', '_')}={value}"
            )
    path = Path(given.pop(0)) if given and "=" not in given[0] else None
    return path, given


def train(
    context: typer.Context,
    settings: Settings = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the run's last checkpoint, bit for bit on a CPU.")
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Start from the weights of a run (its best checkpoint) or of an exported model, with other data or "
            "other settings. The optimisers start fresh.",
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the resolved configuration as YAML and exit.")
    ] = False,
) -> None:
    """Train a language model on prepared text.

    Every setting has a default. [bold]grmoe train --show[/] prints them as YAML, which you can save, edit and pass
    back. A model is a preset plus changes: model.preset=tiny model.router=softmax model.router_options.balance=true.
    The page "Configuration" of the documentation lists all fields of a model.

    On a CPU the defaults train a small model in minutes: preset tiny, 128 tokens per sequence, 16 sequences per step.
    On a GPU the preset is small.

    The run's folder (out=…) receives config.yaml, environment.json, log.jsonl, curves.png, the tokenizer and the
    checkpoints. Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 save a checkpoint first. --resume continues a run that was stopped
    or killed. Settings that you leave out are as the run has them. With more steps it also continues a finished run.

    On several GPUs: torchrun --nproc-per-node 8 -m grmoe train run.yaml parallel.expert=2

    Example: [bold]grmoe train data.path=runs/data out=runs/first steps=2000 optim.lr=6e-4[/]

    Example: [bold]grmoe train --from runs/first data.path=runs/other out=runs/tuned steps=200 optim.lr=3e-4[/]
    """
    with shell("lm"):
        from grmoe.config import read_tree, to_yaml
        from grmoe.runs.folder import checkpoints_of
        from grmoe.runs.start import starting_config

        tree = read_tree(*_split(settings, context))
        if source is not None:
            tree["start_from"] = str(source)
        config = starting_config(tree, resume)
        if show:
            print(to_yaml(config), end="")
            return
        from grmoe.runs.about import about
        from grmoe.runs.lock import trained_by
        from grmoe.train.loop import TrainingStopped
        from grmoe.train.loop import train as run
        from grmoe.train.summary import save, summarize
        from grmoe.train.summary import show as show_summary

        is_first = os.environ.get("RANK", "0") == "0"  # only the first process of torchrun prints
        out = Path(config.out)
        if resume and is_first and checkpoints_of(out, config).latest() is None and trained_by(out) is None:
            note(f"{config.out} has no checkpoint to resume from: this starts a new run.")
        try:
            outcome = run(config, resume)
        except TrainingStopped as stopped:
            if is_first:
                with contextlib.suppress(OSError):  # the terminal may be closed
                    note(str(stopped))
            raise typer.Exit(stopped.status) from stopped
        if is_first:
            summary = summarize(config, outcome)
            say_all(show_summary(summary))
            say_written(**save(summary))
            say(f"Next: {about(config.out)[2]}")


def curves(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of `grmoe train`, drawn in one figure.")
    ],
    out: Annotated[Path, typer.Option(dir_okay=False, help="The figure, a PNG file.")] = Path(
        "runs/curves.png"
    ),
) -> None:
    """Draw loss, expert load and gate entropy of one or more runs, and print the last validation of each.

    The runs may still be training.

    Example: [bold]grmoe curves runs/grassmann runs/softmax[/]
    """
    with shell("lm", "studies"):
        from grmoe.train.curves import draw_curves, summary

        draw_curves(runs, out)
        console.print(summary(runs))
        say_written(Figure=out)


def compare(
    context: typer.Context,
    settings: Settings = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="A router or a way to train; `--recipe ?` lists them. One of your own is 'NAME: key=value key=value'. "
            "The first is what others are compared with. Repeatable.",
            show_default="grmoe, grmoe-amortised, softmax-load, softmax-bias",
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="key=a,b,c: train every recipe with each of these values of a setting. Repeatable, one key after "
            "another."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Models per recipe.")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    text: Annotated[
        list[Path] | None, typer.Option(help="Another text to measure on, beside held-out text. Repeatable.")
    ] = None,
    tokens: options.TextTokens = None,
    at_once: Annotated[int, typer.Option(min=1, help="Models to train at the same time.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for models, numbers, table.md and curves.png.")] = Path(
        "runs/compare"
    ),
) -> None:
    """Compare routers and ways to train as language models: same text, same tokens, several seeds.

    The settings are those of [bold]grmoe train[/], the learning rate too; a recipe adds its own. Each model is
    measured as it was trained and with fewer experts per token. The table has means with 95 % intervals over seeds, and
    differences to the first recipe, paired by seed. Finished models are skipped when you run the same command again.

    Example: [bold]grmoe compare data.path=runs/data steps=1400 --recipe grmoe --recipe softmax-bias --at-once 4[/]

    Example: [bold]grmoe compare data.path=runs/data --recipe grmoe --vary model.router_rank=16,32,64[/]
    """
    with shell("lm", "studies", continues=True):
        from grmoe.config import read_tree
        from grmoe.studies.compare import DEFAULT, Plan, run, save, show
        from grmoe.studies.models import find_recipe
        from grmoe.studies.models import vary as varied
        from grmoe.studies.models.recipes import RECIPES

        list_and_exit(recipe, {name: found.label for name, found in RECIPES.items()})
        # The rates of recipes are for `small`. Those that you write yourself stay.
        recipes = [find_recipe(n) if ":" in n else find_recipe(n).without_rate() for n in recipe or DEFAULT]
        for key in vary or []:
            recipes = [found for each in recipes for found in varied(each, key)]
        plan = Plan(
            tree=read_tree(*_split(settings, context)), recipes=tuple(recipes), out=out, seeds=seeds,
            first_seed=first_seed, texts=tuple(text or ()), tokens=tokens, at_once=at_once,
        )  # fmt: skip
        run_plan(plan, run, show, partial(save, out=out))
