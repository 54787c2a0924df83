"""What `grmoe prepare` shows: progress while it works, a table when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from grmoe.data.prepare import Progress
from grmoe.tables import Table
from grmoe.terminal import Progress as Show

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


def show(index: dict[str, Any]) -> Iterator[Table | str]:
    """The table of domains, what was skipped, and a warning if nothing is held out."""
    yield domains(index)
    if skipped := index["skipped"]:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in skipped.items())
        yield f"{sum(skipped.values()):,} rows skipped ({reasons}). --strict stops at the first and names it."
    if not index["splits"]["validation"]["tokens"]:
        yield "No document is held out for validation. Give --validation-source or a larger --validation."


def domains(index: dict[str, Any]) -> Table:
    """Documents, bytes, tokens and bytes per token of each domain, training and validation."""
    train, validation = index["splits"]["train"], index["splits"]["validation"]
    title = f"{index['tokenizer']['name']}, {index['tokenizer']['vocab_size']:,} tokens"
    counts = ["documents", "bytes", "tokens", "bytes/token", "validation documents", "validation tokens"]
    table = Table(title, ["domain", *counts])
    empty = {"documents": 0, "bytes": 0, "tokens": 0}
    for name in sorted(index["domains"]):
        row = train["domains"].get(name, empty), validation["domains"].get(name, empty)
        table.add(name, *_cells(*row))
    table.end_section()
    table.add("all", *_cells(train, validation))
    return table


def _cells(train: dict[str, int], validation: dict[str, int]) -> list[str]:
    size, tokens = (train[key] + validation[key] for key in ("bytes", "tokens"))
    counts = [train["documents"], train["bytes"], train["tokens"]]
    held_out = [validation["documents"], validation["tokens"]]
    return [*(f"{n:,}" for n in counts), f"{size / max(1, tokens):.2f}", *(f"{n:,}" for n in held_out)]
