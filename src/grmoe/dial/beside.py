"""What a model does at round budgets, beside other models on the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from grmoe.dial.saved import Book
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.losses import Increase, Measurement, increase, measure
from grmoe.probe.windows import Text, read_texts
from grmoe.runs.open import LoadedModel


@dataclass(frozen=True, kw_only=True)
class BudgetRow:
    """One model at one budget, on one text."""

    model: str
    """The end of its path."""
    budget: float
    """Experts per token, as asked for."""
    experts_per_token: float
    loss: float
    """Nats per token."""
    perplexity: float
    load_cv: float
    """Mean over MoE layers."""
    increase: Increase
    """Of perplexity, relative to the same model as it was trained."""


def round_budgets(cap: int) -> list[float]:
    """Budgets that people ask for, from `cap` down to one."""
    shares = (1, 0.75, 0.625) if cap <= 2 else (1, 0.75, 0.5, 0.25, 0.125)
    return sorted({1.0, *(cap * share for share in shares if cap * share >= 1)}, reverse=True)


def check_tokens(
    models: Iterable[LoadedModel], text: Text, asked: str | None, length: int | None, tokens: int | None
) -> None:
    """Refuse a model that reads other tokens in the same text: its perplexity could not be compared."""
    for loaded in models:
        (own,) = read_texts((asked,), loaded, length, tokens)
        if not torch.equal(own.rows_WS, text.rows_WS):
            raise ValueError(
                f"beside must be models that read the calibration text as the same tokens, got {loaded.path}: "
                "another tokenizer, another window or another held-out text"
            )


def short_names(paths: Iterable[Path]) -> list[str]:
    """The shortest ends of these paths that tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-count:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def model_names(models: Iterable[LoadedModel]) -> list[str]:
    """What tables call these models: `short_names`, and the step where two are checkpoints of one run.

    Raises where two are the same: tables would take the rows of both for one model.
    """
    found = list(models)
    places = [(m.path.resolve(), m.step) for m in found]
    for number, loaded in enumerate(found):
        if places[number] in places[:number]:
            raise ValueError(f"beside must be models that differ from each other, got {loaded.path} twice")
    names = short_names(m.path for m in found)
    pairs = zip(names, found, strict=True)
    return [f"{name}, step {m.step}" if names.count(name) > 1 else name for name, m in pairs]


def measure_budgets(
    name: str,
    loaded: LoadedModel,
    trained: Measurement | None,
    text: Text,
    cap: int | None = None,
    step: Callable[[str], None] = lambda _: None,
    book: Book | None = None,
    known: Mapping[float, Measurement] | None = None,
) -> list[BudgetRow]:
    """The model at every round budget of its curve; without a curve, as it was trained. It is left as trained.

    name: what the rows call it.
    trained: what was measured at the trained setting; None: measure it now.
    book: what was measured before, and where new measurements go.
    known: what was measured at budgets that are points of the curve.
    """
    model, book, known = loaded.model, book or Book(), known or {}

    def at(budget: float | None) -> Measurement:
        model.set_budget(budget)
        return book.take(
            (model.config.router_policy(budget), model.config.numbers), lambda: measure(model, text)
        )

    model.set_budget(None)
    base = at(None) if trained is None else trained
    if trained is None:
        step("beside")
    budgets = _within(model, cap)
    if not budgets:
        return [_row(name, base.experts_per_token, base, base)]
    rows = []
    for budget in budgets:
        rows.append(_row(name, budget, known.get(budget) or at(budget), base))
        step("budgets")
    model.set_budget(None)
    return rows


def _within(model: GrmoeForCausalLM, cap: int | None) -> list[float]:
    """Round budgets inside the calibrated range, from the highest down."""
    curve = model.config.budget_curve
    if not curve:
        return []
    low, high = (curve[i]["experts_per_token"] for i in (0, -1))
    return [b for b in round_budgets(cap or model.config.num_experts_per_tok or 1) if low <= b <= high]


def _row(name: str, budget: float, measured: Measurement, base: Measurement) -> BudgetRow:
    return BudgetRow(
        model=name,
        budget=budget,
        experts_per_token=measured.experts_per_token,
        loss=measured.loss,
        perplexity=measured.perplexity,
        load_cv=measured.load_cv,
        increase=increase(measured, base),
    )
