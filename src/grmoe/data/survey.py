"""A look at the sources before anything is written: is there text, and how is it split?"""

from __future__ import annotations

from grmoe.checks import require
from grmoe.data.documents import Reader, Skipped
from grmoe.data.splitting import Split, choose_split, is_far_too_much, place

_ENOUGH = 2**28  # bytes of text: what is read first decides about the rest


def survey(reader: Reader, share: float, least: int, whole: bool = False) -> Split:
    """The split that gives validation `least` bytes of text (see `choose_split`). Raises if there is no document.

    Reads until the share asked for has held out enough, and not most of what was read. That is a few megabytes, or all
    of a corpus of few documents.
    """
    documents: list[tuple[float, int]] = []
    held_out = read = 0
    bad: Skipped | None = None
    for row in reader.read():
        if isinstance(row, Skipped):
            bad = bad or row
            continue
        if row.split == "validation":  # of a validation source
            continue
        documents.append((place(row.text.encode()), row.size))
        read += row.size
        held_out += row.size if documents[-1][0] < share else 0
        suits = held_out >= least and (whole or not is_far_too_much(held_out, read, share, least))
        if not share or suits or read >= _ENOUGH:
            break
    why = f"{reader.units[0].name} is empty" if bad is None else bad.sentence
    require(bool(documents), f"the sources hold no document to train on; {why}")
    return choose_split(documents, share, least, whole) if share else Split()
