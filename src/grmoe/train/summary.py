"""What `grmoe train` prints when a run ends: validation, and the files written."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grmoe.data import unigram_perplexity
from grmoe.data.dataset import TokenDataset
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import LOG, read_log
from grmoe.train.curves import draw_curves
from grmoe.train.log import describe_domains
from grmoe.train.loop import Outcome


@dataclass(frozen=True, kw_only=True)
class Summary:
    outcome: Outcome
    perplexity: float | None
    """Of the last validation. None if unknown: the run had already ended and its log was removed."""
    domains: dict[str, float]
    """Its loss by domain, in nats per token."""
    unigram: float
    """Perplexity of a unigram model of the training text on the same text."""
    has_log: bool
    """Whether the log has lines to draw."""


def summarize(config: TrainConfig, outcome: Outcome) -> Summary:
    lines = read_log(outcome.folder)
    held_out = [line for line in lines if line["kind"] == "validation"]
    perplexity, domains = None, {}
    if outcome.validation is not None:  # known even if the log was removed
        perplexity, domains = outcome.validation.perplexity, outcome.validation.domains
    elif held_out:
        perplexity, domains = held_out[-1]["perplexity"], held_out[-1]["domains"]
    return Summary(
        outcome=outcome,
        perplexity=perplexity,
        domains=domains,
        unigram=unigram_perplexity(TokenDataset(config.data.path, "validation")),
        has_log=bool(held_out) and any(line["kind"] == "train" for line in lines),
    )


def show(summary: Summary) -> Iterator[str]:
    folder = summary.outcome.folder
    if summary.outcome.validation is None:
        yield f"{folder} had already reached its last step. To train it further, add steps=N with a larger N."
    if summary.perplexity is not None:
        each = describe_domains(summary.domains)
        yield f"Validation perplexity {summary.perplexity:.2f}{each}; unigram model {summary.unigram:.1f}"
    if not summary.has_log:
        yield f"{folder / LOG} has no lines to draw."


def save(summary: Summary) -> dict[str, Path]:
    """Draw the curves where that is possible. Returns the paths to name."""
    written = {}
    if summary.has_log and importlib.util.find_spec("matplotlib") is not None:
        folder = summary.outcome.folder
        written["Figure"] = draw_curves([folder], folder / "curves.png", summary.unigram)
    return written | {"Checkpoint": summary.outcome.checkpoint.path}
