"""One way to read and tokenise text: `prepare`, `eval`, `analyze` and every measurement see the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from grmoe.analyze import analyze
from grmoe.data import TokenDataset, prepare
from grmoe.evaluate.texts import read_domains
from grmoe.probe.pieces import Pieces
from grmoe.probe.text import VALIDATION, open_stream, read_documents
from grmoe.probe.typed_windows import CONTEXT, covering_starts, typed_windows
from grmoe.probe.windows import read_windows
from grmoe.runs.open import LoadedModel

# A document that quotes the end-of-text token, one with a space in front, one in other alphabets.
DOCUMENTS = ["the old <|endoftext|> sailor met Anna", " def add(a, b):\n\treturn a", "naïve 雪 𝔘 x_1\r\n"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [{"text": text, "domain": f"d{i % 2}"} for i, text in enumerate(DOCUMENTS * 4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def prepared(corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> TokenDataset:
    """The corpus as `grmoe prepare` makes it, with the model's tokenizer."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    prepare([str(corpus)], tmp_path / "data", tokenizer=str(tmp_path / "tokenizer"), validation=0, workers=1)
    return TokenDataset(tmp_path / "data", "train")


def tokens_seen(loaded: LoadedModel, work: Any) -> list[int]:
    """All tokens that reach the model while `work` runs, in order."""
    seen: list[torch.Tensor] = []

    def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["input_ids"].flatten())

    hook = loaded.model.model.register_forward_pre_hook(keep, with_kwargs=True)
    work()
    hook.remove()
    tokens: list[int] = torch.cat(seen).tolist()
    return tokens


def test_every_command_sees_the_tokens_of_prepare(corpus: Path, prepared: TokenDataset, make: Any) -> None:
    loaded = make()
    want = prepared.read(0, prepared.tokens)
    assert (want == prepared.end_of_text).sum() == len(DOCUMENTS) * 4  # a quoted one ends nothing
    documents = list(read_documents(str(corpus), loaded))
    assert np.concatenate([document.ids for document in documents]).tolist() == want.tolist()
    assert [document.text for document in documents] == DOCUMENTS * 4
    stream = open_stream([str(corpus)], loaded, 10**6)
    assert stream.read(0, stream.tokens).tolist() == want.tolist()
    windows = read_windows(str(corpus), loaded, 8, 10**4).rows_WS
    assert windows[:, :-1].flatten().tolist() == want[: windows[:, :-1].numel()].tolist()
    # grmoe analyze
    seen = tokens_seen(loaded, lambda: analyze(loaded, [corpus], 10**6))
    assert seen == want[: len(seen)].tolist()
    assert len(want) - 32 < len(seen) <= len(want)
    # grmoe eval, by domain, after one end-of-text as context
    for text in read_domains([str(corpus)], loaded):
        own = [ids for domain, ids in prepared.iter_documents() if domain == text.domain]
        assert text.tokens[1:].tolist() == np.concatenate(own).tolist()


def test_prepared_tokens_and_their_files_are_one_text(
    corpus: Path, prepared: TokenDataset, make: Any
) -> None:
    loaded = make()
    files, folder = open_stream([str(corpus)], loaded, 10**6), open_stream([str(prepared.folder)], loaded, 1)
    assert files.tokens == folder.tokens
    domains = [
        [stream.domain_names[i] for i in stream.domains_of(3, stream.tokens)] for stream in (files, folder)
    ]
    assert domains[0] == domains[1]
    read = [list(read_documents(str(source), loaded)) for source in (corpus, prepared.folder)]
    for ours, theirs in zip(*read, strict=True):
        assert (ours.domain, ours.ids.tolist()) == (theirs.domain, theirs.ids.tolist())
        assert theirs.text is None


def test_an_equal_share_of_each_file(texts: list[Path], make: Any) -> None:
    stream = open_stream([str(path) for path in texts], make(), 200)
    assert stream.domain_names == ["prose", "code"]
    lone = [open_stream([str(path)], make(), 200).tokens for path in texts]
    assert stream.tokens == sum(lone)  # one document each, read whole


def test_what_short_files_lack_comes_from_longer_ones(make: Any, tmp_path: Path) -> None:
    """Twenty notes and two large files: an equal share of each would be less text than there is."""
    for i in range(20):
        (tmp_path / f"note{i:02}.txt").write_text("x")
    for name in ("long", "longer"):
        rows = [json.dumps({"text": f"{name} number {i}"}) for i in range(300)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    loaded = make()
    stream = open_stream([str(tmp_path)], loaded, 1000)
    assert 1000 <= stream.tokens < 1100  # each of the large files ends with a whole document
    text = loaded.tokenizer.decode(stream.read(0, stream.tokens).tolist())
    one, other = (text.count(f"{name} number") for name in ("long", "longer"))
    assert 0.7 < one / other < 1.5  # about equal tokens, in documents of nearly equal lengths
    assert open_stream([str(tmp_path)], loaded, 10**6).tokens == sum(
        len(document.ids) for document in read_documents(str(tmp_path), loaded)
    )


def test_rows_that_are_no_document_are_reported(tmp_path: Path, make: Any) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\nnot json\n{"text": " "}\n{"text": "two"}\n')
    reasons: list[str] = []
    found = list(read_documents(str(tmp_path / "rows.jsonl"), make(), reasons.append))
    assert [document.text for document in found] == ["one", "two"]
    assert reasons == ["invalid JSON", "no text"]


def test_mistakes_name_what_is_wrong(
    texts: list[Path], prepared: TokenDataset, tmp_path: Path, make: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    loaded = make()
    for source in (None, VALIDATION):
        with pytest.raises(
            ValueError, match=r"has no held-out text \(an exported model has none\): give --text"
        ):
            next(read_documents(source, loaded))
    with pytest.raises(ValueError, match="neither a file, nor a folder"):
        open_stream(["nowhere.txt"], loaded, 10)
    with pytest.raises(ValueError, match="tokens must be an integer >= 1, got 0"):
        open_stream([str(texts[0])], loaded, 0)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"text must hold a document, got none in .*empty\.txt"):
        open_stream([str(tmp_path / "empty.txt")], loaded, 10)
    prepare([str(texts[0])], tmp_path / "other", tokenizer="bpe:270", validation=0, workers=1)
    with pytest.raises(ValueError, match=r"other was prepared with another tokenizer than the model's"):
        open_stream([str(tmp_path / "other")], loaded, 10)
    with pytest.raises(ValueError, match="is outside the model's vocabulary of 300"):
        open_stream([str(texts[0])], make(vocab_size=300), 10)
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    without = LoadedModel(
        path=tmp_path, model=loaded.model, tokenizer=endless, tokenizer_folder=tmp_path, length=32
    )
    with pytest.raises(ValueError, match=r"has no end-of-text token \(eos_token\)"):
        open_stream([str(texts[0])], without, 10)


def test_typed_windows_are_the_stream_with_its_types(
    corpus: Path, make: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Wherever a window is cut, its tokens have the types they have in the whole text."""
    stream, pieces = open_stream([str(corpus)], make(), 10**6), Pieces(tokenizer)
    types = pieces.types(stream.read(0, stream.tokens))
    for length in (7, 32, stream.tokens + 5):
        starts = covering_starts(stream.tokens, 10**6, length)
        for start, window in zip(starts, typed_windows(stream, pieces, starts, length), strict=True):
            stop = min(start + length, stream.tokens)
            assert window.ids_S.tolist() == stream.read(start, stop).tolist()
            assert window.domains_S.tolist() == stream.domains_of(start, stop).tolist()
            assert window.types_S.tolist() == types[start:stop].tolist()
    assert max(len(document.ids) for document in read_documents(str(corpus), make())) < CONTEXT
