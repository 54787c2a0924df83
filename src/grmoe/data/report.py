"""What `grmoe prepare` shows: progress while it works, a table when it is done."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich import progress as rich_progress
from rich.markup import escape
from rich.table import Table

from grmoe.data.prepare import Progress

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_UPDATES = 0.1


class Reporter:
    """A bar on a terminal; elsewhere a line when a phase begins and every ten seconds."""

    def __init__(self, bar: rich_progress.Progress) -> None:
        self.bar = bar
        self.task = bar.add_task("starting", total=None)
        self.phase = ""
        self.shown = 0.0

    def __call__(self, now: Progress) -> None:
        terminal, clock = self.bar.console.is_terminal, time.monotonic()
        pause = SECONDS_BETWEEN_UPDATES if terminal else SECONDS_BETWEEN_LINES
        if now.phase == self.phase and clock < self.shown + pause:
            return
        self.phase, self.shown = now.phase, clock
        label = f"{now.phase}, {now.tokens / 1e6:.1f} M tokens" if now.tokens else now.phase
        if terminal:
            self.bar.update(self.task, description=label, completed=now.done, total=now.total)
        else:
            share = f", {now.done / now.total:.0%}" if now.total else ""
            print(f"{label}{share}", file=sys.stderr, flush=True)


def rich_table(index: dict[str, Any]) -> Table:
    """Domains × documents, bytes, tokens, bytes a token; validation beside training."""
    train, validation = index["splits"]["train"], index["splits"]["validation"]
    table = Table(title=f"{escape(index['tokenizer']['name'])}, {index['tokenizer']['vocab_size']:,} tokens")
    table.add_column("domain")
    for column in (
        "documents",
        "bytes",
        "tokens",
        "bytes/token",
        "validation documents",
        "validation tokens",
    ):
        table.add_column(column, justify="right")
    empty = {"documents": 0, "bytes": 0, "tokens": 0}
    for name in sorted(index["domains"]):
        row = train["domains"].get(name, empty), validation["domains"].get(name, empty)
        table.add_row(escape(name), *_cells(*row))
    table.add_section()
    table.add_row("all", *_cells(train, validation))
    return table


def _cells(train: dict[str, int], validation: dict[str, int]) -> list[str]:
    size, tokens = (train[key] + validation[key] for key in ("bytes", "tokens"))
    counts = [train["documents"], train["bytes"], train["tokens"]]
    held_out = [validation["documents"], validation["tokens"]]
    return [*(f"{n:,}" for n in counts), f"{size / max(1, tokens):.2f}", *(f"{n:,}" for n in held_out)]


def skipped_line(index: dict[str, Any]) -> str | None:
    """What was left out; None where every row was a document."""
    skipped = index["skipped"]
    if not skipped:
        return None
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in skipped.items())
    return f"{sum(skipped.values()):,} rows skipped ({reasons}); --strict stops at the first and names it"
