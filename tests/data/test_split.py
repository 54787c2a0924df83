"""What is held out of few documents, which domains there are, and whether later commands have enough."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_corpus import WORDS
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.data import TokenDataset, prepare, progress
from grmoe.data.cutting import cut_tail
from grmoe.data.splitting import (
    SEQUENCE_LENGTH,
    TRAINING_WINDOWS,
    VALIDATION_WINDOWS,
    Split,
    choose_split,
    place,
    validation_bytes,
)
from grmoe.model import GrmoeConfig, preset
from grmoe.probe.windows import MIN_WINDOWS, window_starts
from grmoe.runs import start
from grmoe.runs.config import DataConfig

tokenizers = pytest.importorskip("tokenizers")
LENGTH = 32


def words(count: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    return "".join(
        f"{draw.choice(WORDS[:8])}{draw.randrange(100)}{draw.choice(' ' * 9 + chr(10))}" for _ in range(count)
    )


def command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["prepare", *map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.output.replace("\n", " ")


def check_later_commands(folder: Path, length: int) -> None:
    """Each later command finds its windows."""
    train, validation = TokenDataset(folder), TokenDataset(folder, "validation")
    next(train.batches(TRAINING_WINDOWS, length))  # grmoe train, one batch
    assert len(window_starts(validation.tokens - 1, 100, length)) >= MIN_WINDOWS  # grmoe dial, eval and prune


def decoded(folder: Path, split: str) -> list[str]:
    data = TokenDataset(folder, split)
    tokenizer = tokenizers.Tokenizer.from_file(str(data.tokenizer_folder / "tokenizer.json"))
    return [tokenizer.decode(ids[:-1].tolist()) for _, ids in data.iter_documents()]


def test_the_needs_are_those_of_the_later_commands() -> None:
    assert VALIDATION_WINDOWS == MIN_WINDOWS
    assert GrmoeConfig().max_position_embeddings == SEQUENCE_LENGTH
    assert (DataConfig().batch_size or 0) <= TRAINING_WINDOWS


@pytest.mark.parametrize("files", [1, 3])
def test_a_lone_file_or_a_few_are_split_at_their_ends(tmp_path: Path, files: int) -> None:
    """Before, one file had no validation text and `grmoe train` refused what `grmoe prepare` had accepted."""
    texts = [words(2500, seed) for seed in range(files)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    sources = sorted(tmp_path.glob("*.txt"))
    out = tmp_path / "out"
    code, output = command(*sources, "--out", out, "--tokenizer", "bpe:300", "--sequence-length", LENGTH)
    assert code == 0, output
    which = "the document." if files == 1 else "each document, because"
    assert re.search(rf"Validation: [\d,]+ tokens, the last \d+\.\d% of {which}", output)
    assert f"data.path={out} data.sequence_length={LENGTH}" in output
    check_later_commands(out, LENGTH)
    train, held_out = decoded(out, "train"), decoded(out, "validation")
    assert [a + b for a, b in zip(train, held_out, strict=True)] == texts
    assert all(text.endswith("\n") for text in train)  # cut between lines


def test_a_cut_document_survives_an_interruption(tmp_path: Path) -> None:
    """Both parts of a document have a position of their own, so a preparation may stop between them."""
    (tmp_path / "a.txt").write_text(words(1500))
    options: dict[str, Any] = {
        "tokenizer": "bpe:300",
        "sequence_length": LENGTH,
        "shard_tokens": 700,
        "workers": 1,
    }
    whole = prepare([tmp_path / "a.txt"], tmp_path / "whole", **options)
    shards = sum(len(split["shards"]) for split in whole["splits"].values())
    assert shards > 3
    seen = 0

    def stop(now: Any) -> None:
        nonlocal seen
        seen += now.phase == "tokenising"
        if seen == 2:  # after the training part, before the end of the document is written
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([tmp_path / "a.txt"], tmp_path / "out", progress=stop, **options)
    assert (tmp_path / "out" / "journal.jsonl").read_text().count("\n") > 3
    assert prepare([tmp_path / "a.txt"], tmp_path / "out", **options) == whole


def test_too_little_text_names_the_rows_that_were_skipped(tmp_path: Path) -> None:
    """They may be why. A file in another encoding beside a short one once looked like too little text alone."""
    (tmp_path / "a.txt").write_text(words(3000))
    (tmp_path / "b.txt").write_bytes("Grüße".encode("latin-1") * 9999)
    code, output = command(tmp_path, "--out", tmp_path / "out", "--tokenizer", "bpe:300")
    assert code == 2
    assert "too little text" in output
    assert "1 row skipped: b.txt: not UTF-8 (byte 0xfc at position 2)" in output.replace("\n", " ")


def test_too_little_text_stops_at_prepare_with_a_line_that_works(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(words(3000))
    out = tmp_path / "out"
    code, output = command(tmp_path / "a.txt", "--out", out, "--tokenizer", "bpe:300")
    assert code == 2
    assert "too little text for sequences of 1,024 tokens" in output
    assert not out.exists()  # nothing is left that refuses the next try
    found = re.search(r"give at least ([\d,]+) kB of text, or .*: (--sequence-length) (\d+)", output)
    assert found is not None, output
    code, output = command(
        tmp_path / "a.txt", "--out", out, "--tokenizer", "bpe:300", "--sequence-length", found[3]
    )
    assert code == 0, output
    check_later_commands(out, int(found[3]))
    # and so does the amount of text
    (tmp_path / "b.txt").write_text(words(10**5)[: int(found[1].replace(",", "")) * 1000])
    code, output = command(tmp_path / "b.txt", "--out", tmp_path / "more", "--tokenizer", "bpe:300")
    assert code == 0, output
    check_later_commands(tmp_path / "more", SEQUENCE_LENGTH)


def machine_with(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "find_device", lambda: torch.device(kind))


def test_a_share_that_holds_out_too_little_says_which_sequences_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with("cuda", monkeypatch)
    rows = [json.dumps({"text": words(40, seed)}) for seed in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    code, output = command(
        tmp_path / "a.jsonl", "--out", tmp_path / "out", "--tokenizer", "bpe:300", "--validation", 0.1
    )
    assert code == 0
    found = re.search(r"Next: grmoe train data\.path=\S+ data\.sequence_length=(\d+)", output)
    assert found is not None, output
    assert "Too little for sequences of 1,024 tokens" in output
    assert "on this machine" not in output
    check_later_commands(tmp_path / "out", int(found[1]))


def test_the_next_command_names_the_length_where_train_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, 1,024 counted as the default of `grmoe train` on a CPU too, which takes 128 there."""
    rows = [json.dumps({"text": words(200, seed)}) for seed in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    options = [tmp_path / "a.jsonl", "--out", tmp_path / "out", "--tokenizer", "bpe:300", "--validation", 0.1]
    train = f"Next: grmoe train data.path={tmp_path / 'out'}"
    machine_with("cpu", monkeypatch)
    code, output = command(*options)
    assert code == 0, output
    assert "Too little for sequences of 1,024 tokens" in output
    assert re.search(
        r"fit: data\.sequence_length=(256|512)\. `grmoe train` takes 128 on this machine", output
    ), output
    assert output.strip().endswith(train)
    assert command(*options, "--sequence-length", 128)[1].strip().endswith(train)
    assert (
        command(*options, "--sequence-length", 256)[1].strip().endswith(f"{train} data.sequence_length=256")
    )
    check_later_commands(tmp_path / "out", 256)
    machine_with("cuda", monkeypatch)
    assert (
        command(*options, "--sequence-length", 128)[1].strip().endswith(f"{train} data.sequence_length=128")
    )


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_usual_length_is_that_of_train(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(kind, monkeypatch)
    monkeypatch.setattr(start, "find_device", lambda _: torch.device(kind))
    config = start.starting_config({})
    assert config.preset is not None
    assert progress.usual_length() == (
        config.data.sequence_length or preset(config.preset).max_position_embeddings
    )


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 5000)), min_size=1, max_size=60),
    st.sampled_from([0.01, 0.1]),
    st.integers(1, 20_000),
)
def test_the_split_gives_enough_and_not_far_too_much(
    numbered: list[tuple[int, int]], share: float, least: int
) -> None:
    # Some documents are copies of others, and one of a hundred is held out by the smaller share.
    documents, sizes = (
        [(place(str(i).encode()), size) for i, size in numbered],
        [size for _, size in numbered],
    )
    split = choose_split(documents, share, least)
    total = sum(sizes)
    if split.tail:
        assert split.tail * total >= min(least, total / 4) * (1 - 1e-9)
        assert split.tail <= 0.25 + 1 / total
        assert split.share == 0
    else:
        held_out = sum(size for at, size in documents if at < split.share)
        assert held_out >= max(1, min(least, total / 4))
        assert held_out <= max(1, min(least, total / 4), share * total) + total / 8
        assert held_out < total
        assert split.share >= share
    whole = choose_split(documents, share, least, whole=True)
    assert whole.tail == 0
    assert whole.share >= share


@pytest.mark.parametrize("copies", [1, 50])
def test_a_file_that_the_share_would_hold_out_whole_is_split_at_its_end(tmp_path: Path, copies: int) -> None:
    """One file of a hundred has its hash below 1 %. It once left no text to train on, and so did copies of one text."""
    texts = (f"{words(2500)}{number}" for number in itertools.count())
    text = next(text for text in texts if (place(text.encode()) < 0.01) == (copies == 1))
    rows = "".join(json.dumps({"text": text}) + "\n" for _ in range(copies))
    (tmp_path / "a.jsonl").write_text(rows)
    index = prepare(
        [tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bpe:300", sequence_length=LENGTH, workers=1
    )
    assert 0 < index["held_out"]["tail"] <= 0.25
    check_later_commands(tmp_path / "out", LENGTH)


def test_many_documents_are_held_out_whole_and_by_the_share_asked_for() -> None:
    documents = [(place(str(i).encode()), 3000) for i in range(6000)]
    assert choose_split(documents, 0.01, validation_bytes(SEQUENCE_LENGTH)) == Split(0.01)


@given(st.text(alphabet="ab \n", max_size=200), st.floats(0.01, 0.9))
def test_a_tail_is_the_end_and_at_least_the_share(text: str, share: float) -> None:
    head, tail = cut_tail(text, share)
    assert head + tail == text
    assert len(tail) >= int(share * len(text))


def test_files_of_a_folder_are_one_domain_and_each_folder_in_it_another(tmp_path: Path) -> None:
    """Before, each of 142 files was a domain: a table of 142 rows, and validation in 142 parts."""
    corpus = tmp_path / "corpus"
    (corpus / "law" / "old").mkdir(parents=True)
    for number in range(12):
        (corpus / f"{number}.txt").write_text(words(100, number))
    (corpus / "law" / "a.txt").write_text(words(100))
    (corpus / "law" / "old" / "b.txt").write_text(words(101))
    (corpus / "rows.jsonl").write_text('{"text": "its own", "domain": "named"}\n{"text": "none named"}\n')

    def domains(*sources: Path, **options: Any) -> set[str]:
        options = options or {"validation": 0.1}
        made = prepare(
            list(sources), tmp_path / "out", tokenizer="bpe:257", overwrite=True, workers=1, **options
        )
        return set(made["domains"])

    assert domains(corpus) == {"corpus", "law", "named"}
    assert domains(*sorted(corpus.glob("*.txt"))) == {"corpus"}  # as a shell writes corpus/*.txt out
    assert domains(corpus / "1.txt") == {"1"}
    assert domains(corpus / "1.txt", corpus / "law" / "a.txt") == {"1", "a"}
    assert domains(corpus / "1.txt", validation_source=corpus / "2.txt") == {"corpus"}
    assert domains(corpus, validation_source=corpus / "2.txt") == {"corpus", "law", "named"}


def test_a_table_of_many_domains_is_short(tmp_path: Path) -> None:
    rows = [json.dumps({"text": words(3 + n, n), "domain": f"domain {n:03d}"}) for n in range(142)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    result = CliRunner().invoke(
        app,
        ["prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--tokenizer", "bpe:257", "--validation",
         "0.1"],
        env={"COLUMNS": "200"},
    )  # fmt: skip
    assert result.exit_code == 0
    assert result.output.count("domain ") == 1 + 10  # the heading and the largest ones
    assert "domain 141" in result.output
    assert re.search(r"132 others +│ +1\d\d ", result.output)
