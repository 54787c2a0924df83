"""One table type: built once, shown in a terminal or written as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text


class Table:
    """Headings and rows of plain text. The first `left` columns are aligned left, the others right.

    notes: the last column is text as well, aligned left. Headings are left out if all of them are empty.

    table = Table("Held-out text", ["text", "perplexity"])
    table.add("books", "12.3")
    console.print(table)            # rich calls __rich__
    path.write_text(table.markdown())
    """

    def __init__(self, title: str, headings: Sequence[str], left: int = 1, notes: bool = False) -> None:
        self.title, self.headings, self.left, self.notes = title, tuple(headings), left, notes
        self.sections: list[list[tuple[str, ...]]] = [[]]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return [row for section in self.sections for row in section]

    def add(self, *cells: str) -> None:
        """Append a row, one cell per heading."""
        if len(cells) != len(self.headings):
            raise ValueError(f"a row must have {len(self.headings)} cells, got {len(cells)}: {cells}")
        self.sections[-1].append(cells)

    def end_section(self) -> None:
        """Draw a line below the rows so far. Markdown has no such line."""
        if self.sections[-1]:
            self.sections.append([])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:  # not the title of rich's table, which is as narrow as the table
            yield Text(self.title, style="table.title")
        turned = self._turned()
        fits = self._least_width() <= options.max_width or turned._least_width() >= self._least_width()
        yield (self if fits else turned)._rich()

    def _rich(self) -> RichTable:
        table = RichTable(show_header=any(self.headings))
        for place, heading in enumerate(self.headings, 1):
            left = place <= self.left or (self.notes and place == len(self.headings))
            # A narrow terminal breaks between words, not in one. What is narrower still folds them: an ellipsis would
            # replace the digits of a number.
            least = _longest_word([heading])
            table.add_column(
                escape(heading), justify="left" if left else "right", min_width=least, overflow="fold"
            )
        for section in self.sections:
            for row in section:
                table.add_row(*map(escape, row))
            table.add_section()
        return table

    def _least_width(self) -> int:
        """Columns of a terminal below which a word would be broken or a column cut off."""
        return sum(_longest_word(column) + 3 for column in zip(self.headings, *self.rows, strict=True)) + 1

    def _turned(self) -> Table:
        """Rows as columns, for tables that are wider than the terminal."""
        first, *others = zip(self.headings, *self.rows, strict=True)
        turned = Table("", first)
        for column in others:
            turned.add(*column)
        return turned

    def markdown(self) -> str:
        """A GitHub table without the title. Cells keep their text: `|` is escaped."""
        lines = [_line(self.headings), f"|{'---|' * len(self.headings)}"]
        return "\n".join([*lines, *map(_line, self.rows)])


def _longest_word(cells: Sequence[str]) -> int:
    return max((len(word) for cell in cells for word in cell.split()), default=0)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def largest(names: Sequence[str], most: int) -> tuple[list[str], str]:
    """The first `most` names of a list with the largest first, and "3 others" for the rest; "" if there is none.

    One name more is shown, because "1 others" would take its place.
    """
    left = len(names) - most
    return (list(names[:most]), f"{left:,} others") if left > 1 else (list(names), "")


def shortened(name: str, width: int = 40) -> str:
    """A name that users chose, cut where it is too long for a table or a line."""
    return name if len(name) <= width else name[: width - 1] + "…"


def counted(number: float, noun: str) -> str:
    """1 expert, 2 experts, 1.5 experts."""
    shown = f"{number:,g}" if isinstance(number, float) else f"{number:,}"
    return f"{shown} {noun}" if shown == "1" else f"{shown} {noun}s"


def percent(share: float) -> str:
    """+0.73 % for 0.0073."""
    return f"{100 * share:+.2f} %"


def span(interval: tuple[float, float], digits: int = 2) -> str:
    """0.89 to 1.11."""
    return f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}"


def with_error(value: float, error: Any) -> str:
    """0.4312 ± 0.01, or the value alone where there is no error."""
    return f"{value:.4g} ± {error:.2g}" if isinstance(error, float) else f"{value:.4g}"
