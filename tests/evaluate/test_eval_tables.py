"""The tables of `grmoe eval` on numbers that were made up, and arithmetic at its limits."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grmoe.evaluate.perplexity import Perplexity, measure_text
from grmoe.evaluate.results import Evaluation, Point, Result, show_alpha
from grmoe.evaluate.tables import _about_alpha, _domain_table, _summary_table, card_section, show
from grmoe.evaluate.texts import DomainText
from grmoe.head import IGNORED
from grmoe.model import GrmoeConfig
from grmoe.probe.routing import RoutingFigures
from grmoe.tables import Table

ROUTING = RoutingFigures(
    layer_experts=(1.5, 2.5), entropy=1.0, effective_experts_entropy=2.7, effective_experts_inverse=2.0
)


def value(nll: float, tokens: int = 1000) -> Perplexity:
    return Perplexity(nll=nll, tokens=tokens, words=500, bytes=4000, documents=1)


def made_up(alpha: float, **changes: Any) -> Point:
    one, two = value(1000 * alpha), value(2000 * alpha, 2000)
    fields: dict[str, Any] = {
        "texts": {"folder/both": {"ones": one, "twos": two}, "single": {"ones": one}},
        "totals": {"folder/both": one + two, "single": one},
        "tasks": {}, "text_routing": ROUTING, "experts_per_token": 2.0,
    }  # fmt: skip
    return Point(alpha=alpha, **fields | changes)


def evaluation(points: list[Point], stride: int = 64) -> Evaluation:
    return Evaluation(
        length=64,
        stride=stride,
        batch=8,
        tokens=None,
        shots=None,
        limit=None,
        scorer="",
        versions={},
        points=points,
    )


def test_a_text_of_several_domains_has_a_row_for_all_of_them() -> None:
    table = _domain_table(evaluation([made_up(1.0), made_up(2.0)]))
    sections = [section for section in table.sections if section]
    assert [[row[:4] for row in section] for section in sections] == [
        [
            ("both", "ones", "1", "1,000"), ("both", "ones", "2", "1,000"),
            ("both", "twos", "1", "2,000"), ("both", "twos", "2", "2,000"),
            ("both", "all domains", "1", "3,000"), ("both", "all domains", "2", "3,000"),
        ],
        [("single", "ones", "1", "1,000"), ("single", "ones", "2", "1,000")],
    ]  # fmt: skip
    # 1000 nats: e per token, e² per word, e^¼ per byte.
    row = ("2.718", "7.389", "1.2840", f"{0.25 / math.log(2):.4f}")
    assert sections[1][0][4:] == row
    assert table.left == 3
    assert table.title == "Perplexity in windows of 64 tokens, no overlap"
    assert _domain_table(evaluation([made_up(1.0)], 48)).title.endswith("64 tokens, 16 tokens of overlap")


def test_a_number_that_is_not_there_yet_is_a_dash() -> None:
    tasks = {
        "piqa": {"acc,none": 0.5, "acc_stderr,none": 0.01, "acc_norm,none": 0.25, "shots": 3, "rows": 10},
        "other": {"perplexity,none": 12.0, "perplexity_stderr,none": "N/A", "alias": "o", "shots": 0},
    }
    table = _summary_table([made_up(0.5, tasks=tasks), made_up(4.0)])
    assert table.headings == ("", "α = 0.5", "α = 4")
    assert table.rows == [
        ("experts per token", "2.000", "2.000"),
        ("exp(entropy) of the gate", "2.700", "2.700"),
        ("both, perplexity", f"{math.exp(0.5):.3f}", f"{math.exp(4):.3f}"),
        ("both, bits/byte", *(f"{a * 3000 / 8000 / math.log(2):.4f}" for a in (0.5, 4))),
        ("single, perplexity", f"{math.exp(0.5):.3f}", f"{math.exp(4):.3f}"),
        ("single, bits/byte", *(f"{a * 1000 / 4000 / math.log(2):.4f}" for a in (0.5, 4))),
        ("piqa, 3-shot, acc", "0.5 ± 0.01", "–"),
        ("piqa, 3-shot, acc_norm", "0.25", "–"),
        ("other, 0-shot, perplexity", "12", "–"),
    ]


def test_without_texts_there_is_no_table_of_domains() -> None:
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16)
    loaded: Any = SimpleNamespace(model=model)
    both = Result(loaded=loaded, evaluation=evaluation([made_up(1.0)], 32))
    assert [table.headings[0] for table in show(both) if isinstance(table, Table)] == ["text", ""]
    tasks_only = made_up(1.0, texts={}, totals={}, text_routing=None, task_routing=ROUTING)
    (table,) = show(Result(loaded=loaded, evaluation=evaluation([tasks_only])))
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["experts per token", "exp(entropy) of the gate"]
    card = card_section(both)
    assert "windows of 64 tokens, stride 32 (" in card
    assert ", bfloat16):" in card
    assert "| both, perplexity | 2.718 |" in card


def test_alphas_in_words() -> None:
    assert show_alpha(2.0) == "α = 2"
    assert show_alpha([1.0, 0.5, 4.0]) == "α = 1, 0.5, 4"


def test_a_huge_loss_has_a_finite_perplexity() -> None:
    bad = Perplexity(nll=1e7, tokens=10, words=1, bytes=20, documents=1)
    assert bad.loss == 1e6
    for number in (bad.perplexity, bad.word_perplexity, bad.byte_perplexity):
        assert 1e300 < number < math.inf
    assert value(699_000.0).perplexity == math.exp(699)  # what fits is exact


def test_a_text_without_words_or_bytes_has_no_perplexity_of_them() -> None:
    empty = Perplexity(nll=20.0, tokens=10, words=0, bytes=0, documents=1)
    assert empty.perplexity == math.exp(2)
    for number in (empty.word_perplexity, empty.byte_perplexity, empty.bits_per_byte):
        assert math.isnan(number)
    partly = Perplexity(nll=20.0, tokens=10, words=0, bytes=40, documents=1)
    assert math.isnan(partly.word_perplexity)
    assert partly.byte_perplexity == math.exp(0.5)


def test_windows_weigh_by_the_tokens_they_score() -> None:
    """A model with loss w in its w-th batch: the sum must be Σ w · tokens scored there."""
    scored: list[int] = []
    reported: list[int] = []

    class Model:
        device = torch.device("cpu")

        def __call__(self, *, labels: torch.Tensor, shift_labels: torch.Tensor, **options: Any) -> Any:
            assert options["use_cache"] is False
            assert options["skip_logits"] is True
            assert torch.equal(labels, shift_labels)
            scored.append(int((labels != IGNORED).sum()))
            return SimpleNamespace(loss=torch.tensor(float(len(scored))))

    tokens = np.arange(24)  # 23 targets: windows of 8 from 0, 5, 10, 15 score 8, 5, 5, 5
    text = DomainText(text="t", domain="d", tokens=tokens, documents=3, words=6, bytes=46)
    model: Any = Model()
    found = measure_text(model, text, length=8, stride=5, batch=3, done=reported.append)
    assert scored == [18, 5]
    assert reported == [3, 1]
    assert found == Perplexity(nll=1.0 * 18 + 2.0 * 5, tokens=23, words=6, bytes=46, documents=3)
    assert found.loss == pytest.approx(28 / 23)


def test_top_k_says_that_alpha_does_not_change_the_number_of_experts() -> None:
    """A default model has the same experts per token at every α: the column would look like a fault."""
    top = GrmoeConfig()
    [said] = _about_alpha(top, Path("runs/first"))
    assert said == (
        "This model computes its 2 most probable experts at every α. To change their number, give --budget. "
        "Calibrate first: grmoe dial runs/first"
    )
    [said] = _about_alpha(top, Path("my model"), is_run=False)
    assert said.endswith("Calibrate first: grmoe dial 'my model' --text FILE --write")
    top.budget_curve = [{"experts_per_token": 1.0, "tau": 0.2, "alpha": 1.0, "cap": 2}]
    [said] = _about_alpha(top, Path("m"))
    assert said.endswith("give --budget.")
    for other in (GrmoeConfig(selection="mass"), GrmoeConfig(router="switch")):
        assert list(_about_alpha(other, Path("m"))) == []
