"""The shell around every command: extras, exit statuses, one line per expected error."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import grmoe
from grmoe.cli import app
from grmoe.cli.shell import fail, need, run_plan, shell
from grmoe.extras import EXTRAS, install_line
from grmoe.runs.checkpoint import CheckpointError
from grmoe.terminal import Progress

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["compare", "--recipe", "?"], "softmax-bias +Softmax"),
        (["synthetic", "--method", "grmoe", "--method", "?"], "switch +Switch"),
    ],
)
def test_a_question_mark_lists_names_and_what_they_mean(command: list[str], line: str) -> None:
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0
    assert re.search(f"^{line}", done.output, re.MULTILINE)


def test_named_lists_of_shapes_are_offered_where_there_are_any() -> None:
    offered = {name: "--shapes" in typer_options(name) for name in ("gate", "layer", "dial", "train-step")}
    assert offered == {"gate": False, "layer": True, "dial": False, "train-step": False}


def typer_options(name: str) -> set[str]:
    """Of `grmoe bench NAME`."""
    group = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
    return {option for parameter in group.commands[name].params for option in parameter.opts}


def ends(work: Callable[[], object], *extras: str, continues: bool = False) -> tuple[int, str]:
    """(exit status, stderr) of a command that does `work` in the shell."""
    program = typer.Typer()

    @program.command()
    def command() -> None:
        with shell(*extras, continues=continues):
            work()

    result = CliRunner().invoke(program, [])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stderr


def raising(error: BaseException) -> Callable[[], object]:
    def work() -> object:
        raise error

    return work


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in modules else real(name))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("alpha must be positive, got -1"), 2),
        (ModuleNotFoundError("log.wandb needs wandb; install with: pip install wandb"), 2),
        (OSError("cannot write runs/log.jsonl: No space left on device"), 1),
        (FileNotFoundError(2, "No such file or directory", "corpus.txt"), 1),
        (CheckpointError("could not read checkpoint step-00000005"), 2),
        (CheckpointError("could not write checkpoint step-00000010: No space left", status=1), 1),
    ],
)
def test_expected_errors_are_one_line(error: Exception, status: int) -> None:
    assert ends(raising(error)) == (status, f"error: {error}\n")


def test_a_bug_keeps_its_traceback() -> None:
    for bug in (KeyError("layers"), TypeError("got None"), RuntimeError("CUDA error: illegal access")):
        with pytest.raises(type(bug)) as caught:
            ends(raising(bug))
        assert caught.value is bug


def test_an_exit_within_the_shell_keeps_its_status() -> None:
    assert ends(raising(typer.Exit(143))) == (143, "")  # it is a RuntimeError, and not one of ours
    assert ends(lambda: fail("no", status=1)) == (1, "error: no\n")
    assert ends(lambda: None) == (0, "")


def test_ctrl_c_has_the_status_of_its_signal() -> None:
    assert ends(raising(KeyboardInterrupt())) == (130, "error: interrupted\n")
    status, said = ends(raising(KeyboardInterrupt()), continues=True)
    assert (status, said) == (130, "error: interrupted; run the same command again to continue\n")


@pytest.mark.parametrize(
    "text", ["[bold]x[/]", "α must lie in [0, 1]", "closes [/nothing]", "a\\[b]", "x" * 300]
)
def test_brackets_are_not_markup_and_long_lines_stay_one(text: str) -> None:
    assert ends(raising(ValueError(text))) == (2, f"error: {text}\n")


def test_missing_extras_are_named_once_with_one_line_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "yaml", "scipy", "matplotlib")
    status, said = ends(raising(AssertionError("not reached")), "lm", "studies")
    assert status == 2
    line = 'this command needs yaml, scipy and matplotlib; install with: pip install "grmoe[lm,studies]"'
    assert said == f"error: {line}\n"
    # Only the extras that lack something.
    assert '"grmoe[studies]"' in ends(lambda: None, "studies", "serve")[1]
    assert ends(lambda: None, "serve") == (0, "")
    # An extra that brings another is named alone.
    without(monkeypatch, "yaml", "uvicorn")
    assert (
        'yaml and uvicorn; install with: pip install "grmoe[serve]"' in ends(lambda: None, "lm", "serve")[1]
    )


def test_a_module_that_turns_out_to_be_missing_has_its_extra_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ModuleNotFoundError("No module named 'scipy.optimize'", name="scipy.optimize")
    assert ends(raising(plain)) == (
        2,
        'error: this needs scipy; install with: pip install "grmoe[studies]"\n',
    )
    other = ModuleNotFoundError("No module named 'mine'", name="mine")
    assert ends(raising(other)) == (2, "error: No module named 'mine'\n")
    # In Python too, where only the library was installed.
    missing = ModuleNotFoundError("No module named 'transformers'", name="transformers")
    monkeypatch.setattr("importlib.import_module", lambda _: raising(missing)())
    with pytest.raises(
        ModuleNotFoundError, match=r'needs transformers; install with: pip install "grmoe\[lm\]"'
    ):
        grmoe.__getattr__("open_model")


def test_grmoe_that_was_never_installed_is_installed_from_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", unknown)
    source = Path(grmoe.__file__).parents[2]
    assert install_line(["eval"]) == f'pip install -e "{source}[eval]"'


def test_the_install_line_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "tokenizers")
    result = CliRunner().invoke(app, ["prepare"])
    assert result.exit_code == 2
    assert result.stderr.endswith('needs tokenizers; install with: pip install "grmoe[lm]"\n')


def test_extras_are_those_of_the_package() -> None:
    """Each extra exists, and installing it brings every module that is looked for."""
    packages = {"yaml": "pyyaml", "lm_eval": "lm-eval"}
    brought = {"safetensors": "transformers"}  # as a dependency of another
    known = PYPROJECT["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        listed = {re.split(r"[>=<\[;]", package)[0] for package in known[extra]}
        for module in modules:
            assert packages.get(module, brought.get(module, module)) in listed, (extra, module)
    need("lm", "studies", "serve")  # the development environment has them


def test_install_lines_of_the_pages_name_extras_that_exist_for_cpu_and_gpu() -> None:
    known = set(PYPROJECT["project"]["optional-dependencies"])
    for page in ("README.md", "docs/quickstart.md"):
        lines = re.findall(r"^    (pip install .*)$", (ROOT / page).read_text(), re.MULTILINE)
        named = [set(found[1].split(",")) for line in lines if (found := re.search(r'"\.\[(.+?)\]"', line))]
        assert len(named) == 2, page
        assert set().union(*named) <= known
        assert ["download.pytorch.org/whl/cpu" in line for line in lines] == [
            True,
            False,
        ]  # no CUDA for a CPU


def test_transformers_is_quiet_in_a_command_that_loads_models() -> None:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        assert ends(lambda: None, "lm") == (0, "")
        assert logging.get_verbosity() == logging.ERROR
        assert not logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity(before)


def _commands(group: Any, prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        deeper = hasattr(command, "list_commands")
        found += _commands(command, (*prefix, name)) if deeper else [((*prefix, name), command)]
    return found


COMMANDS = _commands(typer.main.get_command(app))


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[" ".join(name) for name, _ in COMMANDS])
def test_help_explains_the_command_and_every_option(name: tuple[str, ...], command: Any) -> None:
    assert "Example" in command.help, name
    for parameter in command.params:
        assert parameter.help, (name, parameter.name)
    shown = CliRunner().invoke(app, [*name, "--help"])
    assert shown.exit_code == 0


@pytest.mark.parametrize("name", [(), ("bench",)])
def test_help_of_a_group_has_an_example_that_exists(name: tuple[str, ...]) -> None:
    shown = " ".join(CliRunner().invoke(app, [*name, "--help"], env={"COLUMNS": "400"}).output.split())
    example = shown.partition("Example")[2]
    known = [" ".join(("grmoe", *command)) for command, _ in COMMANDS]
    assert any(f"{command} " in example for command in known)


def test_a_plan_is_run_shown_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[object] = []

    def run(plan: str, progress: Progress) -> int:
        progress("counting", 0, 2)
        calls.append(plan)
        return len(plan)

    def save(result: int) -> dict[str, Path]:
        calls.append(result)
        return {"Numbers": tmp_path / "n.json", "Figure": tmp_path / "f.png"}

    assert run_plan("four", run, lambda result: [f"[{result}]"], save) == 4
    assert calls == ["four", 4]
    shown = capsys.readouterr()
    assert shown.out == f"[4]\nNumbers: {tmp_path}/n.json\nFigure:  {tmp_path}/f.png\n"
    assert shown.err == "counting (0% done)\n"


@pytest.mark.parametrize(
    "error", [SystemExit(1), OSError(28, "No space left on device"), KeyboardInterrupt()]
)
def test_what_cannot_be_printed_is_saved(error: BaseException) -> None:
    """`grmoe dial RUN | head -1`: rich ends the program with SystemExit where nobody reads any more."""
    saved: list[str] = []

    def show(result: str) -> list[str]:
        raise error

    def save(result: str) -> dict[str, Path]:
        saved.append(result)
        return {}

    with pytest.raises(type(error)):
        run_plan("four", lambda plan, progress: plan, show, save)
    assert saved == ["four"]
