"""What every command does around its work: check extras, quiet libraries, turn errors into one line.

with shell("lm", "studies"):
    from grmoe.analyze import Plan, run, save, show      # heavy imports happen in here

    run_plan(Plan(...), run, show, partial(save, out=out))

Exit status: 0 for success, 2 for a mistake in the request, 1 for a problem of the machine, 128 + signal after a signal.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from grmoe.extras import explain, install_line, missing
from grmoe.terminal import Progress, say_all, say_written, show_progress

P = TypeVar("P")
R = TypeVar("R")


def fail(message: str, status: int = 2) -> NoReturn:
    """Print one line on stderr and exit. Status 2: a mistake in the request. Status 1: a problem of the machine."""
    text = Text.assemble(("error:", "bold red"), " ", message)
    Console(stderr=True).print(text, soft_wrap=True)
    raise typer.Exit(status)


def need(*extras: str) -> None:
    """Stop with one install line where optional dependencies are missing."""
    found = missing(*extras)
    if found:
        *most, last = (module for modules in found.values() for module in modules)
        names = f"{', '.join(most)} and {last}" if most else last
        fail(f"this command needs {names}; install with: {install_line(found)}")


def list_and_exit(wanted: Iterable[str] | None, known: Mapping[str, str]) -> None:
    """`--option ?`: print the known names, each with what it means, and stop."""
    if "?" in (wanted or ()):
        width = max(map(len, known))
        say_all(f"{name:<{width}}  {meaning}" for name, meaning in known.items())
        raise typer.Exit


@contextmanager
def shell(*extras: str, continues: bool = False) -> Iterator[None]:
    """Run a command's work. Expected errors end it with one line; anything else is a bug and keeps its traceback.

    continues: the command continues where it stopped when it is run again. Ctrl-C prints that.
    """
    need(*extras)
    if "lm" in extras:
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
    try:
        yield
    except ValueError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        fail(explain(error))
    except OSError as error:
        fail(str(error), status=1)
    except RuntimeError as error:
        if not _expected(error):
            raise
        fail(str(error), status=getattr(error, "status", 2))
    except KeyboardInterrupt:
        advice = "; run the same command again to continue" if continues else ""
        fail(f"interrupted{advice}", status=128 + signal.SIGINT)


def run_plan(
    plan: P,
    run: Callable[[P, Progress], R],
    show: Callable[[R], Iterable[object]],
    save: Callable[[R], dict[str, Path]],
) -> R:
    """Run a plan under a progress bar, print what it shows, write what it saves and say where."""
    with show_progress() as progress:
        result = run(plan, progress)
    try:
        say_all(show(result))
    except BaseException:  # `| head` has read enough, the disk behind `>` is full, Ctrl-C: the work is kept
        save(result)
        raise
    say_written(**save(result))
    return result


def _expected(error: RuntimeError) -> bool:
    """Whether a RuntimeError is one of ours, raised with a message for the user."""
    return type(error).__module__.startswith("grmoe.")
