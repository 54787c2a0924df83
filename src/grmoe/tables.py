"""One table type: built once, shown in a terminal or written as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

_NAME = 16  # letters of a long name that a narrow terminal shows in a line


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
        for part in (self if fits else turned)._parts(options.max_width):
            yield part._rich(options.max_width)

    def _rich(self, width: int) -> RichTable:
        table = RichTable(show_header=any(self.headings))
        for place, (heading, least) in enumerate(zip(self.headings, self._widths(width), strict=True), 1):
            left = place <= self.left or (self.notes and place == len(self.headings))
            # An ellipsis would replace the digits of a number: where a word has no room, it is folded.
            table.add_column(Text(heading), justify="left" if left else "right", width=least, overflow="fold")
        for section in self.sections:
            for row in section:
                table.add_row(*map(Text, row))
            table.add_section()
        return table

    def _widths(self, width: int) -> list[int | None]:
        """Of the columns, so that the table fits; None: as wide as the text. rich itself may cut off the last column.

        The widest column gives way first. A narrow terminal breaks between words; a narrower one breaks words, but
        never those of a heading.
        """
        columns = list(zip(self.headings, *self.rows, strict=True))
        widths = [max(map(cell_len, column)) for column in columns]
        room = width - 1 - 3 * len(widths)
        if sum(widths) <= room:
            return [None] * len(widths)
        for floors in (list(map(_longest_word, columns)), [_longest_word(column[:1]) for column in columns]):
            while sum(widths) > room and any(w > least for w, least in zip(widths, floors, strict=True)):
                at = max((w, i) for i, (w, least) in enumerate(zip(widths, floors, strict=True)) if w > least)
                widths[at[1]] -= 1
        return [max(w, 1) for w in widths]

    def _least_width(self) -> int:
        """Columns of a terminal below which a word would be broken or a column cut off."""
        return sum(_longest_word(column) + 3 for column in zip(self.headings, *self.rows, strict=True)) + 1

    def _parts(self, width: int) -> Iterator[Table]:
        """The table; or where numbers would be broken, some columns at a time, each time behind the first `left`.

        Words of those may be broken: they are names. Where no part saves a number, the table stays whole while its
        headings fit.
        """
        least = [_longest_word(column) + 3 for column in zip(self.headings, *self.rows, strict=True)]
        for place, heading in enumerate(self.headings[: self.left]):
            least[place] = min(least[place], max(_NAME, _longest_word([heading])) + 3)
        room = width - 1 - sum(least[: self.left])
        numbers, headings = least[self.left :], [_longest_word([heading]) + 3 for heading in self.headings]
        if sum(numbers) <= room or (sum(headings) < width and max(numbers, default=0) > room):
            yield self
            return
        groups: list[list[int]] = []
        for place in range(self.left, len(least)):
            if groups and sum(least[i] for i in [*groups[-1], place]) <= room:
                groups[-1].append(place)
            else:
                groups.append([place])
        for group in groups or [[]]:
            shown = [*range(self.left), *group]
            notes = self.notes and shown[-1] == len(least) - 1
            part = Table("", [self.headings[i] for i in shown], self.left, notes)
            part.sections = [[tuple(row[i] for i in shown) for row in section] for section in self.sections]
            yield part

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
    return max((cell_len(word) for cell in cells for word in cell.split()), default=0)


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
