"""The map of CONTRIBUTING.md is true: imports flow one way, siblings stay apart, and a rule has one home."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "grmoe"
# Folders of tests that mirror no room: what several rooms share.
SHARED_TESTS = {"docs", "gpu"}
OPEN_MODEL = r"open_model\("
# A rule and the files that may hold it: a second home is a copy.
ONE_HOME = {
    r"\brich\.table\b": {"tables.py"},
    r"matplotlib\.use\(|rc_context\(": {"pictures.py"},
    r"set_verbosity_error\(|disable_progress_bar\(": {"cli/shell.py"},
    r"encode_special_tokens": {"data/encoding.py"},
    r"os\.replace\(": {"files.py"},
    r"Reader\(units|Reader\(\[": {"probe/text.py", "data/prepare.py"},
    # Each room opens its model once.
    OPEN_MODEL: {
        *("runs/open.py", "runs/export.py", "cli/model.py", "dial/calibration.py", "prune/surgery.py"),
        *(
            "evaluate/run.py",
            "analyze/study.py",
            "report/content.py",
            "serve/server.py",
            "studies/models/worker.py",
            "studies/learned_kappa.py",
            "studies/throughput.py",
            "runs/start.py",
        ),
    },
    r"\.data\.sequence_length or": {"train/setup.py"},
}


def read_map(text: str) -> list[list[str]]:
    """Rows of the table under "## The map", top first: the modules that each row names."""
    section = text.split("## The map", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [re.findall(r"`(\w+)`", row) for row in rows]


def modules_of(package: Path) -> dict[str, list[Path]]:
    """Top-level modules of a package and their files."""
    found: dict[str, list[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).parts[0].removesuffix(".py")
        if not name.startswith("__"):
            found.setdefault(name, []).append(path)
    return found


def imports_of(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level module) of every import from the package, wherever in the file it stands."""
    name = package.name
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            parts = node.module.split(".")
            if parts == [name]:
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif parts[0] == name:
                yield node.lineno, parts[1]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == name and len(parts) > 1:
                    yield node.lineno, parts[1]


def violations(rows: list[list[str]], package: Path) -> list[str]:
    """Imports against the flow: of a lower row, or of a sibling."""
    floor = {module: number for number, row in enumerate(rows) for module in row}
    found = []
    for module, files in modules_of(package).items():
        for path in files:
            for line, other in imports_of(path, package):
                if other == module or other not in floor:  # a name of the package itself, such as __version__
                    continue
                if floor[other] >= floor[module]:
                    kind = "a sibling" if floor[other] == floor[module] else "a higher floor"
                    found.append(f"{path.relative_to(package)}:{line} imports {other}, {kind}")
    return found


ROWS = read_map((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def test_the_map_names_every_module_once() -> None:
    named = [module for row in ROWS for module in row]
    assert len(named) == len(set(named))
    assert set(named) == set(modules_of(PACKAGE))


def test_imports_follow_the_map() -> None:
    assert violations(ROWS, PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("low.py", "import grmoe.high.a", "low.py:1 imports high, a higher floor"),
        ("low.py", "from grmoe import high", "low.py:1 imports high, a higher floor"),
        ("left/a.py", "def f():\n    from grmoe.right import x", "left/a.py:2 imports right, a sibling"),
        ("left/a.py", "from grmoe.low import x", None),
        ("left/a.py", "from grmoe.left.b import x", None),
        ("high/a.py", "from grmoe import __version__\nfrom grmoe.left import x", None),
    ],
)
def test_this_test_finds_what_it_looks_for(tmp_path: Path, file: str, line: str, said: str | None) -> None:
    package = tmp_path / "grmoe"
    for name in ("low.py", "left/a.py", "right/a.py", "high/a.py"):
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (package / file).write_text(line)
    rows = read_map(
        "## The map\n\n|a|b|\n|---|---|\n| `low` | x |\n| `left`, `right` | y |\n| `high` | z |\n\n## On"
    )
    assert rows == [["low"], ["left", "right"], ["high"]]
    assert violations(rows, package) == ([] if said is None else [said])


def test_the_walks_name_files_that_exist_and_none_twice() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Two walks through the code", 1)[1].split("\n## ", 1)[0]
    walks = section.split("\n**")[1:]
    assert len(walks) == 2
    for walk in walks:
        files = re.findall(r"`([\w/]+\.py)`", walk)
        assert len(files) > 20
        assert [name for name in files if not (PACKAGE / name).is_file()] == []
        assert len(files) == len(set(files))


def test_tests_mirror_the_rooms() -> None:
    rooms = {module for module, files in modules_of(PACKAGE).items() if files[0].parent != PACKAGE}
    folders = {p.name for p in (ROOT / "tests").iterdir() if p.is_dir() and any(p.glob("test_*.py"))}
    assert folders - SHARED_TESTS == rooms


def test_a_rule_has_one_home() -> None:
    copies, unused = [], {(rule, home) for rule, homes in ONE_HOME.items() for home in homes}
    for rule, homes in ONE_HOME.items():
        for path in sorted(PACKAGE.rglob("*.py")):
            name = path.relative_to(PACKAGE).as_posix()
            found = re.search(rule, path.read_text(encoding="utf-8"))
            unused -= {(rule, name)} if found else set()
            if found and name not in homes:
                copies.append(f"{name}: {rule}")
    assert copies == []
    assert unused == set()  # a home that has moved


def test_each_room_opens_its_model_once() -> None:
    for name in ONE_HOME[OPEN_MODEL]:
        text = (PACKAGE / name).read_text(encoding="utf-8")
        assert len(re.findall(OPEN_MODEL, text)) == 1, name


def test_a_long_file_says_why() -> None:
    silent = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 400 and "One file" not in (ast.get_docstring(ast.parse(text)) or ""):
            silent.append(f"{path.relative_to(PACKAGE)}: {text.count(chr(10))} lines")
    assert silent == []
