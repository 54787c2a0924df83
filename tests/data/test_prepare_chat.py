"""Conversations as training data: the template, and the loss on what the assistant says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from grmoe.chat_worker import launch
from grmoe.cli import app
from grmoe.data import TokenDataset, prepare, rendering
from grmoe.data.chat import DEFAULT_TEMPLATE
from grmoe.data.tokenizer import END_OF_TEXT, LoadedTokenizer, load, save
from grmoe.parallel.world import World
from grmoe.runs.config import TrainConfig
from grmoe.train.objective import forward_loss
from grmoe.train.setup import build_trainer
from grmoe.train.validate import validate

transformers = pytest.importorskip("transformers")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Keeps the last answer only: what was said before is not what was trained on.
FORGETS = "{% for m in messages %}{% if loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
ESCAPES = "{{ ''.__class__.__mro__[1].__subclasses__() }}"


def conversation(number: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": f"What is {number} plus one?"},
            {"role": "assistant", "content": f"It is {number + 1}."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "then?"}],
            },
            {"role": "assistant", "content": f"Then {number + 2}."},
        ]
    }


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def spoken(data: TokenDataset) -> list[str]:
    """What the loss counts on, document by document."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(data.tokenizer_folder)
    rows = data.read_rows(0, data.tokens)
    ends = np.cumsum([len(ids) for _, ids in data.iter_documents()])
    return [tokenizer.decode(part[part >= 0]) for part in np.split(rows, ends[:-1])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared with a tokenizer trained on it, and the template for tokenizers without one."""
    root = tmp_path_factory.mktemp("chat")
    source = write(root / "chat.jsonl", [conversation(n) for n in range(60)])
    prepare([source], root / "out", chat=True, tokenizer="bpe:300", validation=0.2, workers=1)
    return root / "out"


def test_the_loss_counts_on_what_the_assistant_says(folder: Path) -> None:
    data = TokenDataset(folder)
    assert data.masked
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(data.tokenizer_folder)
    ids = next(iter(data.iter_documents()))[1]
    text = tokenizer.decode(ids)
    assert text.startswith("system: Answer briefly.\n\nuser: What is ")
    answers = spoken(data)
    assert len(answers) == data.documents
    for answer in answers:
        first, second, rest = answer.split(END_OF_TEXT)
        assert first.startswith(" It is ")
        assert second.startswith(" Then ")
        assert rest == ""
    # The template stays with the tokenizer, so that a model answers in the form it was trained on.
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert shown == "user: Hi\n\nassistant:"
    assert tokenizer.chat_template == DEFAULT_TEMPLATE


def test_a_conversation_may_begin_with_the_assistant(tmp_path: Path) -> None:
    greeting = {"role": "assistant", "content": "Welcome."}
    rows = [{"messages": [greeting, *conversation(n)["messages"][1:]]} for n in range(40)]
    source = write(tmp_path / "chat.jsonl", rows)
    prepare([source], tmp_path / "out", chat=True, tokenizer="bpe:300", validation=0.2, workers=1)
    data = TokenDataset(tmp_path / "out")
    assert data.documents + TokenDataset(tmp_path / "out", "validation").documents == 40
    assert all(answer.startswith(" Welcome.") for answer in spoken(data))


def with_template(folder: Path, to: Path, template: str) -> str:
    loaded = load(str(folder / "tokenizer"))
    loaded.tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    save(LoadedTokenizer(loaded.tokenizer, loaded.special, template), to)
    return str(to)


def test_a_tokenizer_s_own_template(folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(folder, tmp_path / "chatml", CHATML)
    rows = [
        conversation(1),
        {"messages": [{"role": "user", "content": "nobody answers"}]},
        {
            "messages": [
                {"role": "user", "content": "a <|im_end|> of my own"},
                {"role": "assistant", "content": "no"},
            ]
        },
        {"messages": [{"role": "user", "content": None}]},
        {"messages": "none"},
        {"text": "none"},
    ]
    source = write(tmp_path / "chat.jsonl", rows)
    index = prepare([source], tmp_path / "out", chat=True, tokenizer=tokenizer, validation=0, workers=1)
    data = TokenDataset(tmp_path / "out")
    text = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer).decode(data.read(0, data.tokens))
    assert text.startswith("<|im_start|>system\nAnswer briefly.<|im_end|>\n<|im_start|>user\n")
    assert spoken(data) == [f"It is 2.<|im_end|>\nThen 3.<|im_end|>\n{END_OF_TEXT}"]
    assert index["skipped"] == {
        "a message spells a special token": 1, "no answer of the assistant": 1, "no text": 3,
    }  # fmt: skip
    assert (
        index["first_skipped"]["no text"]
        == "chat.jsonl, row 4: no text (field 'messages' holds no conversation)"
    )


@pytest.mark.parametrize("template", [FORGETS, ESCAPES, "{{ raise_exception('no') }}", "{% for", "{{ 1/0 }}"])
def test_a_template_that_does_not_fit_or_is_crafted_is_refused(
    folder: Path, tmp_path: Path, template: str
) -> None:
    tokenizer = with_template(folder, tmp_path / "crafted", template)
    source = write(tmp_path / "chat.jsonl", [conversation(1)])
    options = {"--chat": None, "--tokenizer": tokenizer, "--validation": 0, "--out": tmp_path / "out"}
    words = [str(word) for option in options.items() for word in option if word is not None]
    result = CliRunner().invoke(app, ["prepare", str(source), *words], env={"COLUMNS": "300"})
    assert result.exit_code == 2, result.output
    sentence = "chat.jsonl, row 1: the chat template refuses it"
    assert sentence in result.output.replace("\n", "")
    assert not (tmp_path / "out").exists()


def test_a_template_that_does_not_end_stops_the_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it ran for ever. All rows share one process, also after an error of the template."""
    template = (
        "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
        "{% endfor %}{% endif %}{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}"
        + DEFAULT_TEMPLATE
    )
    tokenizer = with_template(folder, tmp_path / "crafted", template)
    started: list[float] = []
    monkeypatch.setattr(rendering, "launch", lambda s: (started.append(s), launch(0.5))[1])

    def rows(*contents: str) -> Path:
        answer = {"role": "assistant", "content": "yes"}
        return write(
            tmp_path / "chat.jsonl",
            [{"messages": [{"role": "user", "content": text}, answer]} for text in contents],
        )

    options: dict[str, Any] = {"chat": True, "tokenizer": tokenizer, "validation": 0, "workers": 1}
    index = prepare([rows("a", "no", "b", "c")], tmp_path / "out", **options)
    assert index["splits"]["train"]["documents"] == 3
    assert index["skipped"] == {"the chat template refuses it": 1}
    assert len(started) == 1
    with pytest.raises(
        ValueError, match=r"template took more than 10 s for the conversation .* 'loop'; give"
    ):
        prepare([rows("a", "loop")], tmp_path / "other", **options)


def test_conversations_are_held_out_whole(folder: Path) -> None:
    for split in ("train", "validation"):
        assert all(answer.count(END_OF_TEXT) == 2 for answer in spoken(TokenDataset(folder, split)))


def test_training_and_validation_count_the_same_tokens(
    folder: Path, settings: Callable[..., TrainConfig]
) -> None:
    """The naive loss: logits of all tokens, and the mean over those that the assistant says."""
    world = World(0, 1, 0, torch.device("cpu"), None)
    trainer = build_trainer(settings(data={"path": str(folder), "batch_size": 2}), world)
    rows = next(trainer.data.batches(2, 32))
    assert 0 < int((rows < 0).sum()) < rows.numel()
    model = trainer.model.eval()
    with torch.no_grad():
        ids = torch.where(rows < 0, ~rows, rows)
        logits = model(input_ids=ids[:, :-1]).logits.flatten(0, 1)
        targets = ids[:, 1:].flatten()
        counted = rows[:, 1:].flatten() >= 0
        wanted = torch.nn.functional.cross_entropy(logits, targets, reduction="none")[counted].mean()
        assert forward_loss(model, rows).loss.item() == pytest.approx(wanted.item(), rel=1e-5)
        # A batch of context alone is no NaN.
        assert forward_loss(model, torch.where(rows < 0, rows, ~rows)).loss.item() == 0.0
        held_out = TokenDataset(folder, "validation")
        total = count = 0.0
        for batch in held_out.windows(32, 1):
            plain = torch.where(batch < 0, ~batch, batch)
            logits = model(input_ids=plain[:, :-1]).logits.flatten(0, 1)
            losses = torch.nn.functional.cross_entropy(logits, plain[:, 1:].flatten(), reduction="none")
            total += losses[batch[:, 1:].flatten() >= 0].sum().item()
            count += int((batch[:, 1:] >= 0).sum())
    assert validate(trainer).loss == pytest.approx(total / count, rel=1e-5)


def test_plain_commands_read_plain_tokens(folder: Path) -> None:
    data = TokenDataset(folder)
    ids = data.read(0, data.tokens)
    assert ids.min() >= 0
    assert ids.max() < data.vocab_size
    assert data.token_counts().sum() == (data.read_rows(0, data.tokens) >= 0).sum() < data.tokens
    assert (np.where(data.read_rows(0, data.tokens) < 0, ~data.read_rows(0, data.tokens), ids) == ids).all()
