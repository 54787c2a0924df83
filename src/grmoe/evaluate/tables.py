"""An evaluation in tables: for the terminal, and as a section of the model card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from grmoe.evaluate.results import Evaluation, Point, Result, show_alpha
from grmoe.hardware import device_name
from grmoe.model import GrmoeConfig
from grmoe.model.choices_grmoe import OWN_CHOICE
from grmoe.runs.results import save_results
from grmoe.tables import Table, with_error


def show(result: Result) -> Iterator[Table | str]:
    """The tables to print, and a word where α does not do what its user may expect."""
    if result.evaluation.points[0].texts:
        yield _domain_table(result.evaluation)
    yield _summary_table(result.evaluation.points)
    if len([point for point in result.evaluation.points if point.budget is None]) > 1:
        yield from _about_alpha(result.loaded.model.config, result.loaded.path, result.loaded.is_run)


def _about_alpha(config: GrmoeConfig, path: Path, is_run: bool = True) -> Iterator[str]:
    """Under top-k, α changes the weights of experts, and not how many compute a token."""
    if config.selection != "topk" or config.router in OWN_CHOICE:
        return
    # An exported model has no text, and its folder gets no curve: --write saves one with it.
    more = "" if is_run else " --text FILE --write"
    first = "" if config.budget_curve else f" Calibrate first: grmoe dial {quote(str(path))}{more}"
    yield (
        f"This model computes its {config.num_experts_per_tok} most probable experts at every α. "
        f"To change their number, give --budget.{first}"
    )


def save(result: Result, out: Path) -> dict[str, Path]:
    """Write OUT/results.json."""
    return {"Numbers": save_results(result.loaded, "eval", result.evaluation, out, card_section(result))}


def card_section(result: Result) -> str:
    """Section of the model card, one column per α or budget."""
    model, evaluation = result.loaded.model, result.evaluation
    windows = f"windows of {evaluation.length} tokens, stride {evaluation.stride}"
    machine = f"{device_name(model.device)}, {str(model.dtype).removeprefix('torch.')}"
    table = _summary_table(evaluation.points).markdown()
    return f"## Measured\n\nWith `grmoe eval`, {windows} ({machine}):\n\n{table}\n"


def _summary_table(points: Sequence[Point]) -> Table:
    """One column per α or budget: experts per token, the perplexity of every text, the metrics of every task."""
    table = Table(
        "At each setting of the dial", ["", *(show_alpha(point.alpha, point.budget) for point in points)]
    )
    table.add("experts per token", *(f"{point.experts_per_token:.3f}" for point in points))
    table.add("exp(entropy) of the gate", *(f"{p.routing.effective_experts_entropy:.3f}" for p in points))
    for text in points[0].totals:
        totals = [point.totals[text] for point in points]
        table.add(f"{_name(text)}, perplexity", *(f"{total.perplexity:.3f}" for total in totals))
        table.add(f"{_name(text)}, bits/byte", *(f"{total.bits_per_byte:.4f}" for total in totals))
    for task, numbers in points[0].tasks.items():
        for key in numbers:
            metric, _, rule = key.partition(",")
            if rule and not metric.endswith("_stderr"):
                cells = [_metric(point.tasks.get(task), metric, rule) for point in points]
                table.add(f"{task}, {numbers['shots']}-shot, {metric}", *cells)
    return table


def _metric(numbers: Mapping[str, Any] | None, metric: str, rule: str) -> str:
    """A number of the harness with its standard error; – at a point that is not there yet."""
    if numbers is None:
        return "–"
    return with_error(numbers[f"{metric},{rule}"], numbers.get(f"{metric}_stderr,{rule}"))


def _domain_table(evaluation: Evaluation) -> Table:
    """One row per domain and setting, and rows for a whole text of several domains."""
    points, shared = evaluation.points, evaluation.length - evaluation.stride
    overlap = f"{shared} tokens of overlap" if shared else "no overlap"
    title = f"Perplexity in windows of {evaluation.length} tokens, {overlap}"
    alphas = all(p.budget is None for p in points)
    numbers = ["tokens", "perplexity", "word perplexity", "byte perplexity", "bits/byte"]
    table = Table(
        title,
        ["text", "domain", "α" if alphas else "setting", *numbers],
        left=3,
    )
    for text, domains in points[0].texts.items():
        rows = [(domain, [point.texts[text][domain] for point in points]) for domain in domains]
        if len(domains) > 1:
            rows.append(("all domains", [point.totals[text] for point in points]))
        for domain, values in rows:
            for point, value in zip(points, values, strict=True):
                table.add(
                    _name(text),
                    domain,
                    show_alpha(point.alpha, point.budget).removeprefix("α = " if alphas else ""),
                    f"{value.tokens:,}",
                    f"{value.perplexity:.3f}",
                    f"{value.word_perplexity:.4g}",
                    f"{value.byte_perplexity:.4f}",
                    f"{value.bits_per_byte:.4f}",
                )
        table.end_section()
    return table


def _name(text: str) -> str:
    """The last part of a path: a model card is public, the folders of a disk need not be."""
    return Path(text).name or text
