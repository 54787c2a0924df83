"""Our own scorer of tasks: the harness's prompts and numbers, and a loop that scores one token at a time."""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.evaluate import Plan
from grmoe.evaluate import run as evaluate
from grmoe.evaluate.harness import find_files
from grmoe.evaluate.run import choose_scorer
from grmoe.evaluate.scoring import (
    PROMPTS,
    Prompt,
    Score,
    Task,
    encode_pair,
    encode_pairs,
    last_word,
    multiple_choice,
    read_rows,
    score_pairs,
)
from grmoe.runs.open import LoadedModel, open_model
from grmoe.runs.results import load_results

NAMES = ("arc_easy", "hellaswag", "lambada_openai", "piqa")
# sha256 of every (context, continuation) that lm_eval 0.4.13 asks of these twelve rows, and of its examples.
ASKED = {
    ("arc_easy", 0): "da4aef898b3be8ff", ("arc_easy", 3): "e1f833e429146ad3",
    ("hellaswag", 0): "296cf440312e8038", ("hellaswag", 3): "fa8d2db19731cd04",
    ("lambada_openai", 0): "749661343c1fcab0", ("lambada_openai", 3): "ed42fd45f6d97694",
    ("piqa", 0): "c7a61bc26a21d1bc", ("piqa", 3): "5ef614f1a89fccd1",
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded(run: Path) -> LoadedModel:
    return open_model(run)


def asked(task: Task, shots: int) -> list[tuple[str, str]]:
    prompts = task.questions(shots, None)
    return [(prompt.question, text) for prompt in prompts for text in task.continuations(prompt)]


def digest(requests: list[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(requests).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shots", [0, 3])
def test_what_is_asked_is_what_the_harness_asks(tasks: Path, name: str, shots: int) -> None:
    task = Task.read(name, find_files(tasks)[name])
    assert digest(asked(task, shots)) == ASKED[name, shots]


def test_the_harness_itself_asks_the_same(tasks: Path, tmp_path: Path) -> None:
    """Where lm_eval is installed: so the digests above can be made again."""
    manager = pytest.importorskip("lm_eval.tasks", reason="pip install 'grmoe[eval]'").TaskManager
    from grmoe.evaluate.harness import task_specs

    for name in NAMES:
        (spec,) = task_specs([name], tasks, tmp_path)
        theirs = manager(include_defaults=False).load([spec])["tasks"][name]
        ours = Task.read(name, find_files(tasks)[name])
        for shots in (0, 3):
            theirs.set_config(key="num_fewshot", value=shots)
            theirs.set_fewshot_seed(seed=1234)
            theirs.build_all_requests()
            assert [tuple(i.args) for i in theirs.instances] == asked(ours, shots)


@pytest.mark.parametrize("shots", [0, 2])
def test_numbers_are_the_harness_s(run: Path, tasks: Path, tmp_path: Path, shots: int) -> None:
    pytest.importorskip("lm_eval", reason="pip install 'grmoe[eval]'")
    theirs, ours = (
        evaluate(
            Plan(model=run, out=tmp_path, tasks_from=tasks, shots=shots, limit=10, batch=4, scorer=scorer)
        )
        .evaluation.points[0]
        .tasks
        for scorer in ("harness", "grmoe")
    )
    assert set(theirs) == set(ours) == set(NAMES)
    for name, numbers in theirs.items():
        error = numbers.pop("perplexity_stderr,none", None)  # of a bootstrap
        assert error is None or ours[name]["perplexity_stderr,none"] == pytest.approx(error, rel=0.15)
        assert {key: ours[name][key] for key in numbers} == pytest.approx(numbers, rel=1e-5)


def naive(loaded: LoadedModel, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Token by token, each from the model's logits of what the window still holds before it."""
    total, greedy, ids = 0.0, True, context + continuation
    first = max(0, len(ids) - 1 - loaded.model.config.max_position_embeddings)
    for place in range(len(context), len(ids)):
        with torch.no_grad():
            log_p = torch.log_softmax(
                loaded.model(torch.tensor([ids[first:place]])).logits[0, -1].double(), -1
            )
        total += float(log_p[ids[place]])
        greedy &= int(log_p.argmax()) == ids[place]
    return total, greedy


def test_a_loop_over_tokens_scores_the_same(loaded: LoadedModel) -> None:
    draw = random.Random(0)
    size, longest = len(loaded.tokenizer), loaded.model.config.max_position_embeddings
    lengths = [(3, 1), (20, 4), (1, 7), (longest + 5, 3), (2, longest)]  # two lose their beginning
    pairs = [
        tuple([draw.randrange(size) for _ in range(n)] for n in lengths_of_pair)
        for lengths_of_pair in lengths
    ]
    want = [naive(loaded, *pair) for pair in pairs]
    done: list[int] = []
    for batch in (1, 2, 5):
        scores = score_pairs(loaded.model, pairs, batch, done.append)  # type: ignore[arg-type]
        assert [score.log_likelihood for score in scores] == pytest.approx([w[0] for w in want], abs=1e-4)
        assert [score.greedy for score in scores] == [w[1] for w in want]
    assert done == [1, 2, 3, 4, 5, 2, 4, 5, 5]
    (cut,) = score_pairs(loaded.model, pairs[1:2], 1, longest=8)  # type: ignore[arg-type]
    ids = [*pairs[1][0], *pairs[1][1]]
    assert cut.log_likelihood == pytest.approx(naive(loaded, ids[-9:-4], ids[-4:])[0], abs=1e-4)
    with pytest.raises(ValueError, match=f"1 to {longest} tokens"):
        score_pairs(loaded.model, [([1], [])], 1)


def test_a_greedy_continuation_is_right(loaded: LoadedModel) -> None:
    ids = loaded.tokenizer.encode("one two three four")
    with torch.no_grad():
        next_id = int(loaded.model(torch.tensor([ids])).logits[0, -1].argmax())
    right, wrong = score_pairs(loaded.model, [(ids, [next_id]), (ids, [(next_id + 1) % 280])], 2)
    assert (right.greedy, wrong.greedy) == (True, False)
    assert right.log_likelihood > wrong.log_likelihood


def test_the_arithmetic() -> None:
    """acc, acc_norm and standard errors of two rows, by hand: s/√n with n − 1."""
    prompts = [Prompt("q", ["a", "bcde"], 1), Prompt("q", ["ab", "cd"], 0), Prompt("q", ["a", "b"], 1)]
    scores = [[Score(-2.0, False), Score(-4.0, False)], [Score(-1.0, True), Score(-3.0, False)]]
    scores.append([Score(-1.0, False), Score(-2.0, False)])
    numbers = multiple_choice(prompts, scores)
    # Row 1: −2 against −4, but −2 against −1 per character.
    assert numbers["acc,none"] == pytest.approx(1 / 3)
    assert numbers["acc_norm,none"] == pytest.approx(2 / 3)
    assert numbers["acc_stderr,none"] == pytest.approx(math.sqrt((4 / 9 + 1 / 9 + 1 / 9) / 2 / 3))
    words = last_word([[Score(-1.0, True)], [Score(-3.0, False)]])
    assert words["perplexity,none"] == pytest.approx(math.exp(2))
    assert words["perplexity_stderr,none"] == pytest.approx(math.exp(2) * math.sqrt(2) / math.sqrt(2))
    assert (words["acc,none"], words["acc_stderr,none"]) == (0.5, pytest.approx(0.5))
    assert multiple_choice(prompts[:1], scores[:1])["acc_stderr,none"] is None


def test_prompts_of_the_real_rows() -> None:
    row = {
        "activity_label": "Roof shingle removal", "ctx_a": "A man [step] sits.", "ctx_b": "he",
        "endings": ["is  up [title] Then", " off."], "label": "1",
    }  # fmt: skip
    assert PROMPTS["hellaswag"](row) == Prompt(
        "Roof shingle removal: A man sits. He", ["is up. Then", "off."], 1
    )
    numbered = {
        "question": "Why?",
        "choices": {"text": ["x", "y", "z"], "label": ["1", "2", "3"]},
        "answerKey": "3",
    }
    assert PROMPTS["arc_easy"](numbered) == Prompt("Question: Why?\nAnswer:", ["x", "y", "z"], 2)
    assert PROMPTS["lambada_openai"]({"text": 'He said "no\nyes.'}) == Prompt("He said", [' "no\nyes.'], 0)


def test_examples_are_other_rows(tasks: Path) -> None:
    files = find_files(tasks)["piqa"]
    task = Task.read("piqa", files)
    for row, prompt in zip(
        task.rows, task.questions(11, None), strict=True
    ):  # eleven of twelve: all the others
        assert prompt.question.count(f"Question: {row['goal']}\n") == 1
        assert prompt.question.count("Question:") == 12
    doubled = Task("piqa", [*task.rows, *task.rows[:6]], [*task.rows, *task.rows[:6]], apart=False)
    for row, prompt in zip(doubled.rows, doubled.questions(10, None), strict=True):
        assert prompt.question.count(f"Question: {row['goal']}\n") == 1
    same = Task("piqa", task.rows[:1] * 3, task.rows[:1] * 3, apart=False)
    with pytest.raises(ValueError, match="shots must be at most 0, the rows of piqa that differ"):
        list(same.questions(2, None))
    trained = Task.read("piqa", {**files, "train": files["validation"]})
    assert trained.apart
    assert len(list(trained.questions(2, 5))) == 5


def test_spaces_belong_to_the_word_behind_them(loaded: LoadedModel) -> None:
    encode = loaded.tokenizer.encode
    context, continuation = encode_pair(loaded.tokenizer, "one two ", "three")
    assert context == encode("one two")
    assert context + continuation == encode("one two three")
    assert encode_pair(loaded.tokenizer, "", " one") == ([loaded.tokenizer.eos_token_id], encode(" one"))


@pytest.mark.parametrize("name", NAMES)
def test_all_pairs_at_once_are_the_pairs_one_by_one(name: str, loaded: LoadedModel, tasks: Path) -> None:
    requests = [
        *asked(Task.read(name, find_files(tasks)[name]), 2),
        ("one two ", "three"),
        ("", " one"),
        ("  ", "one"),
    ]
    assert encode_pairs(loaded.tokenizer, requests) == [encode_pair(loaded.tokenizer, *r) for r in requests]
    assert encode_pairs(loaded.tokenizer, []) == []


def test_the_command_scores_local_files(exported: Path, tasks: Path, tmp_path: Path) -> None:
    arguments = ["eval", str(exported), "--tasks-from", str(tasks), "--scorer", "grmoe", "--task", "piqa"]
    arguments += ["--task", "lambada", "--limit", "6", "--shots", "1", "--alpha", "3", "--alpha", "1"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    body = load_results(tmp_path / "results.json", "eval").body
    assert body["scorer"] == "grmoe"
    sharp, saved = body["points"]
    assert set(saved["tasks"]) == {"piqa", "lambada_openai"}
    assert (saved["tasks"]["piqa"]["rows"], saved["tasks"]["piqa"]["shots"]) == (6, 1)
    words = [point["tasks"]["lambada_openai"]["perplexity,none"] for point in (sharp, saved)]
    assert words[0] != words[1]  # α reached the model
    assert "piqa, 1-shot, acc_norm" in result.output


def test_mistakes(exported: Path, tasks: Path, tmp_path: Path) -> None:
    def said(**options: Any) -> str:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            evaluate(Plan(**{"model": exported, "out": tmp_path / "out", "scorer": "grmoe"} | options))
        return str(error.value)

    broken = tmp_path / "broken"
    broken.mkdir()
    assert "must hold TASK_SPLIT.jsonl" in said(tasks_from=broken)
    (broken / "piqa_val.jsonl").write_text('{"goal": "a"}\n')
    assert "a row of piqa has other fields than the task (KeyError: 'sol1')" in said(tasks_from=broken)
    (broken / "piqa_val.jsonl").write_text("{}\nnot json\n")
    assert "is not a JSONL file (row 2:" in said(tasks_from=broken)
    (broken / "piqa_val.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="must hold a row"):
        read_rows(broken / "piqa_val.jsonl")
    assert "got mmlu" in said(tasks_from=tasks, tasks=["mmlu"])
    assert "shots must be below the 12 rows of piqa, got 12" in said(
        tasks_from=tasks, tasks=["piqa"], shots=12
    )
    assert "scorer must be harness" in said(tasks=["piqa"])
    assert "scorer must be one of" in said(tasks=["piqa"], scorer="mine")


def test_lm_eval_scores_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for lacking, scorer in (({"eval": ["lm_eval"]}, "grmoe"), ({}, "harness")):
        monkeypatch.setattr(
            sys.modules[choose_scorer.__module__], "missing", lambda extra, lacking=lacking: lacking
        )
        assert choose_scorer("auto", ["piqa"], tmp_path) == scorer
        # A name of the hub and a task file are the harness's.
        assert choose_scorer("auto", ["piqa"], None) == "harness"
        assert choose_scorer("auto", ["own.yaml"], tmp_path) == "harness"
