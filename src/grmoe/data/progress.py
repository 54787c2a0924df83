"""What `grmoe prepare` shows: progress while it works, a table when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from grmoe.data.packing import Tally
from grmoe.data.prepare import Progress
from grmoe.data.room import lacks_room, longest_sequence
from grmoe.data.splitting import CPU_LENGTH, SEQUENCE_LENGTH
from grmoe.hardware import find_device
from grmoe.tables import Table, counted, largest, shortened
from grmoe.terminal import Progress as Show

_MOST_DOMAINS = 10  # rows of the table
_SECONDS_BETWEEN_UPDATES = 0.1
_SECONDS_BETWEEN_COUNTS = 10.0  # without a terminal each new label is a line


class Reporter:
    """Passes on what `prepare` reports. The label names the phase and, now and then, the tokens written so far."""

    def __init__(self, show: Show, clock: Callable[[], float] = time.monotonic) -> None:
        self.show, self.clock = show, clock
        self.phase = self.label = ""
        self.shown = self.counted = 0.0

    def __call__(self, now: Progress) -> None:
        clock = self.clock()
        begins = now.phase != self.phase
        if not begins and clock < self.shown + _SECONDS_BETWEEN_UPDATES:
            return
        if begins or clock >= self.counted + _SECONDS_BETWEEN_COUNTS:
            self.label = f"{now.phase}, {now.tokens / 1e6:.1f} M tokens" if now.tokens else now.phase
            self.counted = clock
        self.phase, self.shown = now.phase, clock
        self.show(self.label, now.done, now.total or 0)


def usual_length() -> int:
    """Tokens per sequence that `grmoe train` takes on this machine if nothing is said."""
    return CPU_LENGTH if find_device().type == "cpu" else SEQUENCE_LENGTH


def show(index: dict[str, Any], asked: int | None = None) -> Iterator[Table | str]:
    """The table of domains, what was skipped, what is held out, and a warning if that is too little.

    asked: tokens per sequence. None: both what most models take and what `grmoe train` takes here must fit.
    """
    yield domains(index)
    if skipped := index["skipped"]:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in skipped.items())
        yield f"{counted(sum(skipped.values()), 'row')} skipped ({reasons}). --strict stops at the first and names it."
        yield from (f"  {sentence}" for sentence in index.get("first_skipped", {}).values())
    yield _validation(index)
    length = asked or SEQUENCE_LENGTH
    if missing := lacks_room(index, length):
        fitting = longest_sequence(index, length)
        advice = f" Shorter sequences fit: data.sequence_length={fitting}." if fitting else " Give more text."
        if fitting and asked is None and fitting >= usual_length():
            advice += f" `grmoe train` takes {usual_length()} on this machine if you do not set it."
        yield f"Too little for sequences of {length:,} tokens: {missing}.{advice}"


def _validation(index: dict[str, Any]) -> str:
    tokens, by = index["splits"]["validation"]["tokens"], index.get("held_out", {})
    if not tokens:
        advice = "prepare it again with --overwrite and without --validation"
        return f"Validation: nothing is held out, and `grmoe train` needs some text: {advice}."
    if tail := by.get("tail"):
        if index["splits"]["train"]["documents"] == 1:
            return f"Validation: {tokens:,} tokens, the last {tail:.1%} of the document."
        part = f"the last {tail:.1%} of each document"
        return f"Validation: {tokens:,} tokens, {part}, because there are few documents or long ones."
    share = by.get("share", 0.0)
    if share > index["recipe"]["validation"]:
        return f"Validation: {tokens:,} tokens, {share:.1%} of the documents, so that later commands have enough."
    return f"Validation: {tokens:,} tokens."


def next_command(index: dict[str, Any], out: Path, asked: int | None = None) -> str:
    """The command to train on what was prepared, with sequences that it has room for; empty if there are none.

    asked: tokens per sequence. None: what `grmoe train` takes here.
    """
    usual = usual_length()
    fitting = longest_sequence(index, asked or usual)
    if fitting is None:
        return ""
    length = "" if fitting == usual else f" data.sequence_length={fitting}"
    return f"grmoe train data.path={quote(str(out))}{length}"


def domains(index: dict[str, Any]) -> Table:
    """Documents, bytes, tokens and bytes per token of each domain, in both splits. Many small ones are summed up."""
    train, validation = index["splits"]["train"], index["splits"]["validation"]
    title = f"{index['tokenizer']['name']}, {index['tokenizer']['vocab_size']:,} tokens"
    counts = ["documents", "bytes", "tokens", "bytes per token", "validation tokens"]
    table = Table(title, ["domain", *counts])
    rows = {
        name: [Tally(**split["domains"].get(name, {})) for split in (train, validation)]
        for name in sorted(index["domains"])
    }
    by_size = sorted(rows, key=lambda name: -sum(tally.tokens for tally in rows[name]))
    shown, rest = largest(by_size, _MOST_DOMAINS)
    others = [Tally(), Tally()]
    for name, tallies in rows.items():
        if name in shown:
            table.add(shortened(name), *_cells(*tallies))
        else:
            others[0] += tallies[0]
            others[1] += tallies[1]
    if rest:
        table.add(rest, *_cells(*others))
    if len(rows) > 1:
        table.end_section()
        whole = (Tally(s["documents"], s["bytes"], s["tokens"]) for s in (train, validation))
        table.add("all", *_cells(*whole))
    return table


def _cells(train: Tally, validation: Tally) -> list[str]:
    size, tokens = train.bytes + validation.bytes, train.tokens + validation.tokens
    counts = [train.documents, train.bytes, train.tokens]
    return [*(f"{n:,}" for n in counts), f"{size / max(1, tokens):.2f}", f"{validation.tokens:,}"]
