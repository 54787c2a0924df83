"""Everything that docs/results/paper-items.md names exists: code, commands, settings, files, tests and pages."""

from __future__ import annotations

import inspect
import re

import pytest
from doc_pages import NOTHING, ROOT, all_pages, anchors, find_object
from test_docs_commands import COMMANDS, parse, split
from test_docs_links import links

from grmoe.config import load
from grmoe.runs.config import TrainConfig

PAGE = "docs/results/paper-items.md"
HEADINGS = ["paper", "what it says", "here", "checked by", "what remains"]
SECTIONS = [
    "Background", "Method", "Theory", "Inference", "Training", "Synthetic", "Baselines", "Metrics", "Language models",
    "Analysis", "Post-hoc", "Ablations", "Overhead", "Normaliser and parallelism", "Appendix", "Future work",
]  # fmt: skip


def tables(text: str) -> dict[str, list[dict[str, str]]]:
    """{title of a section: rows of its table}."""
    found: dict[str, list[dict[str, str]]] = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        lines = [line for line in body.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        if cells:
            assert cells[0] == HEADINGS, title
            found[title] = [dict(zip(HEADINGS, row, strict=True)) for row in cells[2:]]
    return found


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def wrong_name(name: str) -> str:
    """What is wrong with a name of the column "here"; empty where nothing is."""
    if name.startswith("grmoe "):
        return _wrong_command(name)
    if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+=\S+", name):
        try:
            load(TrainConfig, None, [name])
        except ValueError as error:
            return str(error)
        return ""
    if "/" in name:
        return "" if (ROOT / name).is_file() else "there is no such file"
    dotted = re.fullmatch(r"(grmoe(?:\.\w+)+)(?:\((\w+)=(.+)\))?", name)
    return _wrong_object(*dotted.groups()) if dotted else "no code, command, setting or file"


def _wrong_command(line: str) -> str:
    command = " ".join(line.split()[1:3])
    if command not in COMMANDS and command.split()[0] not in COMMANDS:
        return "there is no such command"
    try:
        parse(*split(line))
    except Exception as error:  # typer's own, which it does not export, or a setting that is refused
        return str(error) or type(error).__name__
    return ""


def _wrong_object(dotted: str, argument: str | None, value: str | None) -> str:
    found = find_object(dotted)
    if found is NOTHING:
        return "there is no such module, class or function"
    if argument is None:
        return ""
    parameter = inspect.signature(found).parameters.get(argument)
    if parameter is None:
        return f"it has no argument {argument}"
    allowed = str(parameter.annotation).replace("'", '"')
    known = "Literal" not in allowed or not str(value).startswith('"') or str(value) in allowed
    return "" if known else f"{argument} must be of {allowed}"


def wrong_test(name: str) -> str:
    """What is wrong with a test of the column "checked by": FILE.py or FILE.py::test_name, below tests/."""
    path, _, test = name.partition("::")
    file = ROOT / "tests" / path
    if not (file.name.startswith("test_") and file.is_file()):
        return "there is no such file of tests"
    defined = re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE)
    return "" if not test or test in defined else "the file has no such test"


def wrong_link(target: str, anchor: str) -> str:
    if target not in all_pages():
        return "there is no such page"
    return "" if not anchor or anchor in anchors(all_pages()[target]) else "the page has no such heading"


def test_every_section_of_the_paper_has_its_table() -> None:
    assert list(tables(all_pages()[PAGE])) == SECTIONS


@pytest.mark.parametrize("section", SECTIONS)
def test_what_a_row_names_exists(section: str) -> None:
    wrong = []
    for row in tables(all_pages()[PAGE])[section]:
        here, checked = row["here"], row["checked by"]
        what = f"{row['paper']}, {row['what it says']}"
        assert row["paper"], what
        assert row["what it says"], what
        assert code(here), f"{what}: nothing is here"
        assert checked, f"{what}: nothing checks it"
        wrong += [f"{what}: {name}: {why}" for name in code(here) if (why := wrong_name(name))]
        wrong += [f"{what}: {name}: {why}" for name in code(checked) if (why := wrong_test(name))]
    assert not wrong, "\n".join(wrong)


def test_every_link_of_the_page_resolves() -> None:
    found = links(PAGE)
    assert len(found) > len(SECTIONS)
    assert not [(target, anchor, why) for target, anchor in found if (why := wrong_link(target, anchor))]


@pytest.mark.parametrize(
    "name",
    [
        "grmoe.nothing",
        "grmoe.layer.Nothing",
        "grmoe.layer.MoE.nothing",
        "grmoe.layer.MoE(nothing=1)",
        'grmoe.routing.GrassmannRouter(scaling="nothing")',
        "grmoe nothing",
        "grmoe reproduce --nothing",
        "grmoe dial runs/first --beside",
        "routing.nothing=1",
        "routing.overlap_unit=nothing",
        "configs/nothing.yaml",
        "nothing",
    ],
)
def test_a_wrong_name_is_seen(name: str) -> None:
    assert wrong_name(name)


@pytest.mark.parametrize(
    "name", ["test_nothing.py", "test_layer.py::test_nothing", "doc_pages.py", "test_layer.py::test_soft_moe"]
)
def test_a_wrong_test_is_seen(name: str) -> None:
    assert wrong_test(name)


@pytest.mark.parametrize(
    ("target", "anchor"), [("docs/results/nothing", ""), ("docs/results/paper/index.md", "nothing")]
)
def test_a_wrong_link_is_seen(target: str, anchor: str) -> None:
    assert wrong_link(target, anchor)


def test_a_row_with_a_missing_cell_is_seen() -> None:
    head = f"## A\n\n| {' | '.join(HEADINGS)} |\n|---|---|---|---|---|\n"
    assert tables(f"{head}| a | b | c | d |  |\n")["A"][0]["checked by"] == "d"
    with pytest.raises(ValueError, match="zip"):
        tables(f"{head}| a | b | c | d |\n")
