"""How `grmoe eval` goes through texts and tasks, and how it reads texts. The model and the harness are made up."""

from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grmoe.evaluate import Plan, harness, run, texts
from grmoe.evaluate import run as evaluate
from grmoe.evaluate.perplexity import Perplexity
from grmoe.evaluate.results import Point
from grmoe.evaluate.run import check_alphas
from grmoe.evaluate.texts import DomainText, read_domains
from grmoe.probe.routing import RoutingFigures
from grmoe.routing.curve import LayerNumbers

END = 0


class MadeUp:
    """A model with loss α per token, or its budget if it has one. It notes what was set, reset and asked, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[Any] = []
        self.alpha = 3.0
        self.budget: float | None = None
        self.config = SimpleNamespace(
            alpha=3.0, check_has_dial=lambda: None, layer_numbers=self.layer_numbers
        )
        self.shown: list[tuple[str, int, int]] = []
        self.saved: list[list[Point]] = []
        module = inspect.getmodule(run)
        assert module is not None
        loaded = SimpleNamespace(model=self, tokenizer="tokenizer")
        stubs: dict[str, Any] = {
            "open_model": lambda path, checkpoint: self.told.append(checkpoint) or loaded,
            "window_length": lambda loaded, length: length or 8,
            "read_domains": self.read, "measure_text": self.measure, "routing_figures": self.figures,
            "save": lambda result, out: self.saved.append(list(result.evaluation.points)),
        }  # fmt: skip
        for name, stub in stubs.items():
            monkeypatch.setattr(module, name, stub)
        monkeypatch.setattr(harness, "task_specs", lambda *given: given)
        monkeypatch.setattr(harness, "Harness", self.harness)

    def set_alpha(self, alpha: float) -> None:
        self.alpha, self.budget = alpha, None

    def set_budget(self, budget: float | None) -> None:
        self.budget = budget

    def layer_numbers(self, budget: float) -> list[LayerNumbers]:
        """Up to two experts per token both layers have one α."""
        if budget > 4:
            raise ValueError("too large a budget")
        return [LayerNumbers(0.5, 1.0, 4), LayerNumbers(0.5, max(1.0, budget / 2), 4)]

    @property
    def value(self) -> float:
        return self.alpha if self.budget is None else self.budget

    @property
    def at(self) -> str:
        return f"{self.alpha:g}" if self.budget is None else f"budget {self.budget:g}"

    def reset_routing_metrics(self) -> None:
        self.told.append(f"reset at {self.at}")

    def read(self, sources: Any, loaded: Any, tokens: int | None) -> list[DomainText]:
        self.told.append((list(sources), tokens))
        counts = {"a": 17, "b": 33}  # tokens to predict: 2 and 4 windows of 8, and a short one each
        return [
            DomainText(
                text=s, domain=d, tokens=np.zeros(n + 1, dtype=np.int64), documents=1, words=2, bytes=3
            )
            for s in sources
            for d, n in counts.items()
        ]

    def measure(
        self, model: Any, text: DomainText, length: int, stride: int, batch: int, done: Any
    ) -> Perplexity:
        self.told.append(f"{text.text}/{text.domain} at {self.at}, {length}/{stride}, {batch}")
        done(1)
        done(2)
        return Perplexity(nll=self.value, tokens=10, words=2, bytes=3, documents=1)

    def figures(self, model: Any) -> RoutingFigures:
        return RoutingFigures(
            layer_experts=(self.value,),
            entropy=1.0,
            effective_experts_entropy=2.0,
            effective_experts_inverse=2.0,
        )

    def harness(self, specs: Any, model: Any, tokenizer: str, batch: int, shots: int | None) -> Any:
        self.told.append(("tasks", *specs, tokenizer, batch, shots))
        return self

    def run(self, limit: int | None, progress: Any) -> dict[str, Any]:
        progress("requests", 3, 7)
        self.told.append(f"tasks at {self.at}, limit {limit}")
        return {"piqa": {"acc,none": self.value}}

    def progress(self, stage: str, done: int, total: int) -> None:
        self.shown.append((stage, done, total))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    return MadeUp(monkeypatch)


def test_texts_then_tasks_at_every_alpha(model: MadeUp, tmp_path: Path) -> None:
    plan = Plan(
        model=tmp_path, out=tmp_path / "out", texts=["t"], tasks=["piqa"], alphas=[1.0, 2.0], shots=4, limit=5,
        tokens=99, stride=4, batch=3, checkpoint="last",
    )  # fmt: skip
    result = evaluate(plan, model.progress)
    assert model.told == [
        "last",
        (["t"], 99),
        ("tasks", ["piqa"], None, tmp_path / "out" / "tasks", "tokenizer", 3, 4),  # before anything is measured
        "reset at 1", "t/a at 1, 8/4, 3", "t/b at 1, 8/4, 3",
        "reset at 2", "t/a at 2, 8/4, 3", "t/b at 2, 8/4, 3",
        "reset at 1", "tasks at 1, limit 5",
        "reset at 2", "tasks at 2, limit 5",
    ]  # fmt: skip
    # 17 tokens are windows from 0, 4, 8, 12; 33 are eight: 12 windows at each of two α. Three were told per text.
    places = ("a at α = 1", "b at α = 1", "a at α = 2", "b at α = 2")
    counted = [(place, 3 * i + n, 24) for i, place in enumerate(places) for n in (1, 3)]
    asked = [("requests at α = 1", 3, 7), ("requests at α = 2", 3, 7)]
    assert model.shown == counted + asked
    points = result.evaluation.points
    assert [p.alpha for p in points] == [p.experts_per_token for p in points] == [1.0, 2.0]
    assert [p.budget for p in points] == [None, None]
    for p, alpha in zip(points, (1.0, 2.0), strict=True):
        assert {d: v.nll for d, v in p.texts["t"].items()} == {"a": alpha, "b": alpha}
        assert (p.totals["t"].nll, p.totals["t"].tokens) == (2 * alpha, 20)
        assert p.tasks == {"piqa": {"acc,none": alpha}}
        assert p.text_routing is not None
        assert p.task_routing is not None
    # Saved after every point with all that is known: first the texts, then the tasks.
    assert [[bool(p.tasks) for p in s] for s in model.saved] == [
        [False], [False, False], [True, False], [True, True],
    ]  # fmt: skip
    evaluation = result.evaluation
    assert (evaluation.length, evaluation.stride, evaluation.batch, evaluation.tokens) == (8, 4, 3, 99)
    assert (evaluation.shots, evaluation.limit) == (4, 5)
    assert {"torch", "transformers"} <= set(evaluation.versions)


def test_budgets_come_after_alphas_each_once(model: MadeUp, tmp_path: Path) -> None:
    plan = Plan(
        model=tmp_path, out=tmp_path, texts=["t"], tasks=["piqa"], alphas=[2.0, 2], budgets=[4, 1.5, 4.0], batch=3,
    )  # fmt: skip
    result = evaluate(plan, model.progress)
    assert model.told[3:] == [
        "reset at 2", "t/a at 2, 8/8, 3", "t/b at 2, 8/8, 3",
        "reset at budget 4", "t/a at budget 4, 8/8, 3", "t/b at budget 4, 8/8, 3",
        "reset at budget 1.5", "t/a at budget 1.5, 8/8, 3", "t/b at budget 1.5, 8/8, 3",
        "reset at 2", "tasks at 2, limit None",  # the α of the plan, not that of the last budget
        "reset at budget 4", "tasks at budget 4, limit None",
        "reset at budget 1.5", "tasks at budget 1.5, limit None",
    ]  # fmt: skip
    assert {total for stage, _, total in model.shown if "requests" not in stage} == {3 * (3 + 5)}
    assert list(dict.fromkeys(stage for stage, _, _ in model.shown)) == [
        "a at α = 2", "b at α = 2", "a at budget 4", "b at budget 4", "a at budget 1.5", "b at budget 1.5",
        "requests at α = 2", "requests at budget 4", "requests at budget 1.5",
    ]  # fmt: skip
    points = result.evaluation.points
    # Beside a budget stands the α that it sets: one per layer where layers differ.
    assert [(p.alpha, p.budget) for p in points] == [(2.0, None), ([1.0, 2.0], 4.0), (1.0, 1.5)]
    for p, value in zip(points, (2.0, 4.0, 1.5), strict=True):
        assert p.experts_per_token == value
        assert p.totals["t"].nll == 2 * value
        assert p.tasks == {"piqa": {"acc,none": value}}
    assert [len(saved) for saved in model.saved] == [1, 2, 3, 3, 3, 3]


def test_budgets_alone_measure_no_alpha(model: MadeUp, tmp_path: Path) -> None:
    plan = Plan(model=tmp_path, out=tmp_path, tasks=["piqa"], budgets=[1.5])
    (point,) = evaluate(plan, model.progress).evaluation.points
    assert (point.alpha, point.budget, point.experts_per_token) == (1.0, 1.5, 1.5)
    assert point.routing is point.task_routing


def test_the_saved_budget_is_measured_unless_another_setting_is_asked_for(
    model: MadeUp, tmp_path: Path
) -> None:
    for alphas, budgets, found in (
        ([], [], [(1.0, 2.0)]),
        ([], [1.5], [(1.0, 1.5)]),
        ([0.5], [], [(0.5, None)]),
    ):
        model.set_budget(2.0)
        result = evaluate(Plan(model=tmp_path, out=tmp_path, alphas=alphas, budgets=budgets))
        assert [(p.alpha, p.budget) for p in result.evaluation.points] == found


def test_checking_alphas_leaves_the_setting_as_it_was(model: MadeUp) -> None:
    loaded: Any = model
    for budget in (None, 2.0):
        model.set_budget(budget)
        assert check_alphas(loaded, [1.0, 5, 1]) == [1.0, 5.0]
        assert (model.alpha, model.budget) == (3.0, budget)


def test_a_wrong_budget_shows_before_any_text_is_read(model: MadeUp, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too large a budget"):
        evaluate(Plan(model=tmp_path, out=tmp_path, texts=["t"], budgets=[1.5, 5.0]))
    assert model.told == ["best"]


@pytest.mark.parametrize("tasks", [["piqa"], []])
def test_tasks_alone_need_no_text(model: MadeUp, tmp_path: Path, tasks: list[str]) -> None:
    folder = None if tasks else tmp_path
    plan = Plan(model=tmp_path, out=tmp_path, tasks=tasks, tasks_from=folder, scorer="harness")
    result = evaluate(plan, model.progress)
    assert model.told[1] == ([], None)
    assert [t for t in model.told if isinstance(t, str)] == ["best", "reset at 3", "tasks at 3, limit None"]
    (point,) = result.evaluation.points
    assert (point.alpha, point.budget, point.experts_per_token) == (3.0, None, 3.0)
    assert (point.texts, point.text_routing) == ({}, None)
    assert point.routing is point.task_routing
    assert point.tasks == {"piqa": {"acc,none": 3.0}}
    assert len(model.saved) == 1


def test_a_place_that_cannot_be_written_shows_before_anything_is_measured(
    model: MadeUp, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        evaluate(Plan(model=tmp_path, out=tmp_path / "file" / "eval", texts=["t"]))
    assert not any("/a at" in str(told) for told in model.told)


def test_nothing_asked_for_is_the_validation_split(model: MadeUp, tmp_path: Path) -> None:
    result = evaluate(Plan(model=tmp_path, out=tmp_path), model.progress)
    assert model.told[1] == (["validation"], None)
    assert "validation/a at 3, 8/8, 8" in model.told
    # 17 tokens are windows from 0, 8 and 16, and 33 are five.
    assert {total for _, _, total in model.shown} == {3 + 5}
    (point,) = result.evaluation.points
    assert (point.tasks, point.task_routing) == ({}, None)
    with pytest.raises(ValueError, match="stride must be at most the length of a window, 8, got 9"):
        evaluate(Plan(model=tmp_path, out=tmp_path, stride=9))
    with pytest.raises(ValueError, match="stride"):
        evaluate(Plan(model=tmp_path, out=tmp_path, stride=0))


def test_defaults_of_a_plan() -> None:
    plan = vars(Plan(model=Path("m"), out=Path("o")))
    assert {k: v for k, v in plan.items() if k not in ("model", "out")} == {
        "texts": (), "tasks": (), "tasks_from": None, "alphas": (), "budgets": (), "shots": None, "limit": None,
        "tokens": None, "length": None, "stride": None, "batch": 8, "scorer": "auto", "checkpoint": "best",
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------- texts


class Reading:
    """Documents of given tokens. Decoding is noted, and gives one word of three bytes per token."""

    end_of_text = END

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded: list[list[int]] = []
        self.documents: list[Any] = []
        self.skips: list[str] = []
        self.tokenizer = self
        monkeypatch.setattr(texts, "document_encoder", lambda loaded: self)
        monkeypatch.setattr(texts, "read_documents", self.read)

    def read(self, source: str, loaded: Any, skipped: Any) -> Any:
        for reason in self.skips:
            skipped(reason)
        return iter(self.documents)

    def add(self, domain: str, *ids: int, text: str | None = None) -> None:
        self.documents.append(SimpleNamespace(domain=domain, ids=np.array(ids, dtype=np.int64), text=text))

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens is False
        self.decoded.append(ids)
        return " ".join(f"{i:03d}" for i in ids)

    def domains(self, limit: int | None = None) -> dict[str, DomainText]:
        self.decoded.clear()
        loaded: Any = None
        return {text.domain: text for text in read_domains(["source", "source"], loaded, limit)}


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    return Reading(monkeypatch)


def test_a_limit_cuts_inside_a_document(reading: Reading) -> None:
    reading.add("d", 1, 2, END, text="one two")
    reading.add("e", 7, 8, END)
    reading.add("d", 3, 4, 5, END, text="drei vier fünf")

    def read(limit: int | None) -> tuple[list[int], int, int, int]:
        found = reading.domains(limit)["d"]
        return found.tokens.tolist(), found.documents, found.words, found.bytes

    # The text as it was written is counted where nothing is cut. Prepared tokens have no text.
    whole = ([END, 1, 2, END, 3, 4, 5, END], 2, 5, 7 + 15)
    assert read(None) == read(7) == read(8) == whole
    assert reading.decoded == [[7, 8]]
    # Cut: what is left, without an end-of-text, is decoded.
    assert read(6) == ([END, 1, 2, END, 3, 4, 5], 2, 2 + 3, 7 + 11)
    assert reading.decoded == [[7, 8], [3, 4, 5]]
    assert read(4) == ([END, 1, 2, END, 3], 2, 2 + 1, 7 + 3)
    assert read(3) == ([END, 1, 2, END], 1, 2, 7)
    assert reading.decoded == [[7, 8]]
    assert read(2) == ([END, 1, 2], 1, 2, 7)
    assert reading.decoded == [[1, 2], [7, 8]]
    with pytest.raises(ValueError, match=r"text source \(d\) must hold at least two tokens, got 1"):
        reading.domains(1)


def test_rows_that_were_skipped_are_counted_by_reason(
    reading: Reading, capsys: pytest.CaptureFixture[str]
) -> None:
    reading.add("d", 1, END, text="one")
    assert reading.domains()["d"].tokens.tolist() == [END, 1, END]
    assert capsys.readouterr().err == ""
    reading.skips = ["empty", "invalid JSON", "empty"]
    reading.domains()
    assert capsys.readouterr().err == "source: skipped 3 rows (2 empty, 1 invalid JSON)\n"
    reading.documents.clear()
    with pytest.raises(ValueError, match="text source must hold a document, got none"):
        reading.domains()


def test_an_end_of_text_that_is_not_there_is_not_cut(reading: Reading) -> None:
    reading.add("d", 1, 2)
    found = reading.domains()["d"]
    assert reading.decoded == [[1, 2]]
    assert (found.words, found.bytes, found.documents) == (2, 7, 1)


# ------------------------------------------------------------------------------------------------------ the harness


def test_the_harness_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are raised; everything else it and `datasets` would say disturbs the bar."""
    told: list[Any] = []
    datasets = SimpleNamespace(
        logging=SimpleNamespace(set_verbosity=lambda level: told.append(level)),
        disable_progress_bars=lambda: told.append("no bars"),
    )
    manager = SimpleNamespace(load=lambda specs: {"tasks": {}})
    stubs: dict[str, Any] = {
        "datasets": datasets, "lm_eval": SimpleNamespace(__path__=[]),
        "lm_eval.models": SimpleNamespace(__path__=[]),
        "lm_eval.models.huggingface": SimpleNamespace(HFLM=lambda **options: None),
        "lm_eval.tasks": SimpleNamespace(TaskManager=lambda include_defaults: manager),
    }  # fmt: skip
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    logger = logging.getLogger("lm_eval")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    unused: Any = None
    loaded = harness.Harness(["/a/b.yaml"], unused, None, 2, None)
    assert logger.level == logging.ERROR
    assert told == [logging.CRITICAL, "no bars"]
    assert loaded.batch == 2

    def fail(specs: list[str]) -> None:
        raise RuntimeError

    manager.load = fail
    with pytest.raises(ValueError, match=r"task b could not be loaded \(RuntimeError: \); --tasks-from"):
        harness.Harness(["/a/b.yaml"], unused, None, 2, None)
