"""results.json, and the tables of it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from grmoe.evaluate.points import Point, show

LIBRARIES = ("grmoe", "torch", "transformers", "lm_eval")


def write_results(points: Sequence[Point], settings: dict[str, Any], out: Path) -> Path:
    """All numbers in full precision, of the points that have any; written whole or not at all."""
    versions: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    measured = [_point(point) for point in points if point.texts or point.tasks]
    content = settings | {"versions": versions, "points": measured}
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.json"
    writing = out / ".results.json"
    writing.write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
    os.replace(writing, path)
    return path


def _point(point: Point) -> dict[str, Any]:
    texts = [{"text": t, "domain": d} | value.numbers() for (t, d), value in point.texts.items()]
    return {
        "alpha": point.alpha,
        "experts_per_token": point.experts,
        "texts": texts,
        "totals": {text: value.numbers() for text, value in point.totals().items()},
        "text_routing": point.text_routing,
        "tasks": point.tasks,
        "task_routing": point.task_routing,
    }


def summary(points: Sequence[Point]) -> Table:
    """A column for each α: experts a token, then every text's perplexity and every task's metrics."""
    table = Table(title="At each setting of the dial", title_justify="left")
    table.add_column("")
    for point in points:
        table.add_column(f"α = {show(point.alpha)}", justify="right")
    table.add_row("experts a token", *(f"{point.experts:.3f}" for point in points))
    routing = [point.text_routing or point.task_routing for point in points]
    table.add_row("exp(entropy) of the gate", *(f"{r['effective_experts_entropy']:.3f}" for r in routing))
    for text in points[0].totals():
        values = [point.totals()[text] for point in points]
        name = escape(os.path.basename(text.rstrip("/")))
        table.add_row(f"{name}, perplexity", *(f"{value.perplexity:.3f}" for value in values))
        table.add_row(f"{name}, bits/byte", *(f"{value.bits_per_byte:.4f}" for value in values))
    for task, numbers in points[0].tasks.items():
        for key in numbers:
            metric, _, rule = key.partition(",")
            if not rule or metric.endswith("_stderr"):
                continue
            name = f"{escape(task)}, {numbers['shots']}-shot, {metric}"
            error = f"{metric}_stderr,{rule}"
            table.add_row(name, *(_with_error(point.tasks[task], key, error) for point in points))
    return table


def _with_error(numbers: dict[str, Any], key: str, error: str) -> str:
    value, spread = numbers[key], numbers.get(error)
    return f"{value:.4g} ± {spread:.2g}" if isinstance(spread, float) else f"{value:.4g}"


def domains(points: Sequence[Point], length: int, stride: int) -> Table:
    """A row for each domain of each text and each α, and one for the whole of a text that has several."""
    overlap = "no overlap" if stride == length else f"{length - stride} tokens of overlap"
    table = Table(title=f"Perplexity in windows of {length} tokens, {overlap}", title_justify="left")
    for heading in ("text", "domain", "α"):
        table.add_column(heading)
    for heading in ("tokens", "perplexity", "word perplexity", "byte perplexity", "bits/byte"):
        table.add_column(heading, justify="right")
    for text in points[0].totals():
        rows = [(escape(d), [p.texts[text, d] for p in points]) for t, d in points[0].texts if t == text]
        if len(rows) > 1:
            rows.append(("[bold]together[/]", [p.totals()[text] for p in points]))
        for name, values in rows:
            for point, value in zip(points, values, strict=True):
                table.add_row(
                    escape(os.path.basename(text.rstrip("/"))),
                    name,
                    show(point.alpha),
                    f"{value.tokens:,}",
                    f"{value.perplexity:.3f}",
                    f"{value.word_perplexity:.4g}",
                    f"{value.byte_perplexity:.4f}",
                    f"{value.bits_per_byte:.4f}",
                )
        table.add_section()
    return table
