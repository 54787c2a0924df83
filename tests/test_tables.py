"""One table type: the terminal and Markdown show the same cells."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from grmoe.tables import Table, percent, span, with_error


def printed(table: Table, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def terminal_cells(table: Table) -> list[list[str]]:
    """The cells of each row between the vertical lines, headings first."""
    lines = [re.split("[│┃]", line)[1:-1] for line in printed(table).splitlines() if line[:1] in "│┃"]
    return [[cell.strip() for cell in line] for line in lines]


def markdown_cells(table: Table) -> list[list[str]]:
    heading, _, *rows = table.markdown().splitlines()
    split = [re.split(r"(?<!\\)\|", line)[1:-1] for line in (heading, *rows)]
    return [[cell.strip().replace("\\|", "|") for cell in line] for line in split]


# Text that fits one line: what rich would wrap, or a control character, is another matter.
text = st.text(st.characters(categories=["L", "N", "P", "S"], max_codepoint=0x24F), max_size=8)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(text, min_size=n, max_size=n), min_size=1)))
def test_terminal_and_markdown_have_the_same_cells(rows: list[list[str]]) -> None:
    headings = [f"column {i}" for i in range(len(rows[0]))]
    table = Table("title", headings)
    for row in rows:
        table.add(*row)
    assert terminal_cells(table) == [headings, *rows]
    # A backslash before | is ambiguous in Markdown as it is on GitHub.
    if not any("\\" in cell for row in rows for cell in row):
        assert markdown_cells(table) == [headings, *rows]


def test_brackets_are_not_markup() -> None:
    table = Table("[red]title[/]", ["[bold]name[/]"])
    table.add("[/nothing] [0, 1]")
    shown = printed(table)
    for part in ("[red]title[/]", "[bold]name[/]", "[/nothing] [0, 1]"):
        assert part in shown


def test_a_pipe_is_escaped_in_markdown_only() -> None:
    table = Table("", ["max|Δp|", "value"])
    table.add("a|b", "1")
    assert table.markdown() == "| max\\|Δp\\| | value |\n|---|---|\n| a\\|b | 1 |"
    assert "a|b" in printed(table)


@pytest.mark.parametrize("cells", [(), ("a",), ("a", "b", "c")])
def test_a_row_with_the_wrong_number_of_cells_is_refused(cells: tuple[str, ...]) -> None:
    table = Table("", ["name", "value"])
    with pytest.raises(ValueError, match=f"a row must have 2 cells, got {len(cells)}"):
        table.add(*cells)
    assert table.rows == []


def test_columns_are_aligned_left_right_and_left() -> None:
    table = Table("", ["what", "amount", "note"], notes=True)
    table.add("weights", "1 GB", "fp32")
    table.add("x", "12 GB", "a longer note")
    assert "│ weights │   1 GB │ fp32          │" in printed(table)
    assert "│ x       │  12 GB │ a longer note │" in printed(table)


def test_a_narrow_terminal_breaks_headings_between_words_and_not_the_title() -> None:
    headings = ["domain", "validation tokens", "relative throughput", "entropy within"]
    table = Table("A title that is longer than what is below it", headings)
    table.add("a name of several words", "1", "2.00 (1.50 to 2.50)", "0.50 to 1.25")
    shown = printed(table, 58)
    assert shown.startswith("A title that is longer than what is below it\n")
    assert all(word in shown for heading in headings for word in heading.split())
    assert max(map(len, shown.splitlines())) <= 58


def test_a_table_that_is_wider_than_the_terminal_is_turned() -> None:
    numbers = [f"{n}.{n}98765" for n in range(1, 9)]
    table = Table("Bounds", ["block", *"abcdefgh"])
    table.add("1", *numbers)
    table.add("3", *reversed(numbers))
    wide, narrow = printed(table, 100).splitlines(), printed(table, 60).splitlines()
    assert wide[2].split()[1:-1:2] == ["block", *"abcdefgh"]
    assert narrow[0] == "Bounds"
    assert narrow[2].split()[1:-1:2] == ["block", "1", "3"]
    assert [line.split()[1:-1:2] for line in narrow if line[:1] == "│"] == [
        list(row) for row in zip("abcdefgh", numbers, reversed(numbers), strict=True)
    ]
    many = Table("", ["a", "b"])  # turned, it would be wider still
    for number in numbers:
        many.add(number, number)
    assert sum(line[:1] == "│" for line in printed(many, 20).splitlines()) >= len(numbers)


def test_a_narrow_terminal_breaks_no_number_and_folds_a_long_name() -> None:
    """`grmoe bench gate` printed "(0.0409–0." above "0522)" in 80 columns."""
    values = ["0.0466 (0.0409–0.0522)", "0.00511 (0.00508–0.00514)", "0.180 (0.179–0.181)"]
    table = Table("", ["contender", "forward ms", "backward ms", "training ms", "all ms"])
    for place in range(9):
        table.add(f"runs/a/path/to/a/model/without/any/space/in/it/{place}", *values, "1.5 (1.49–1.5123)")
    shown = printed(table, 80)
    for word in " ".join(values).split():
        assert sum(word in line for line in shown.splitlines()) == 9
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("┏") == 2  # parts: the name leaves room for more than one column of numbers


def test_no_width_loses_a_digit() -> None:
    table = Table("", ["a", "b"])
    table.add("1.23456789", "9.87654321")
    shown = printed(table, 18)
    assert "…" not in shown
    assert sum(character.isdigit() for character in shown) == 18


@given(
    st.integers(2, 6).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 10**9), min_size=n, max_size=n), min_size=1)
    ),
    st.integers(24, 80),
)
def test_every_part_is_as_wide_as_the_terminal_at_most(rows: list[list[int]], width: int) -> None:
    table = Table("", [f"the {i}th heading" for i in range(len(rows[0]))])
    for row in rows:
        table.add(*map(str, row))
    lines = printed(table, width).splitlines()
    assert max(map(len, lines)) <= width
    assert all(line[-1] in "┓┃┩│┘┤" for line in lines)


@pytest.mark.parametrize("width", [60, 80])
def test_no_width_loses_a_column(width: int) -> None:
    """`grmoe eval --budget 1,1.5,2` on several domains is too wide either way: its last columns were cut off."""
    names = ["tokens", "perplexity", "word perplexity", "byte perplexity", "bits/byte"]
    table = Table("Perplexity", ["text", "domain", "setting", *names], left=3)
    for row in range(24):
        table.add("text", f"domain {row}", "budget 1.5", *(f"{row}.{n}98765" for n in range(1, 6)))
    shown = printed(table, width)
    assert max(map(len, shown.splitlines())) <= width
    assert all(cell in shown for row in table.rows for cell in row[3:])
    heads = [line for line in shown.splitlines() if "domain" in line and line[0] == "┃"]
    assert len(heads) == (2 if width == 80 else 3)  # each part says which rows it has
    assert re.findall(r"tokens|perplexity|bits/byte", "".join(heads)) == [
        re.split(" ", name)[-1] for name in names
    ]


def test_sections_are_lines_in_the_terminal() -> None:
    table = Table("", ["", ""])
    table.end_section()  # before any row there is nothing to end
    table.add("a", "1")
    table.end_section()
    table.add("b", "2")
    assert table.rows == [("a", "1"), ("b", "2")]
    assert printed(table).count("├") == 1
    assert "┃" not in printed(table)  # no headings, no line for them


def test_numbers() -> None:
    assert percent(0.0073) == "+0.73 %"
    assert span((0.891, 1.114)) == "0.89 to 1.11"
    assert with_error(0.43121, 0.0104) == "0.4312 ± 0.01"
    assert with_error(0.43121, "N/A") == "0.4312"
