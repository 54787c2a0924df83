"""Token streams and their perplexity against plain arithmetic."""

from __future__ import annotations

import gzip
import json
import lzma
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grmoe.evaluate import Plan
from grmoe.evaluate import run as evaluate
from grmoe.evaluate.perplexity import Perplexity, count_windows, measure_text, windows
from grmoe.evaluate.texts import DomainText, read_domains
from grmoe.head import IGNORED
from grmoe.routing import routers
from grmoe.runs.open import LoadedModel, open_model


@pytest.fixture
def loaded(run: Path) -> LoadedModel:
    return open_model(run)


def text_of(tokens: np.ndarray) -> DomainText:
    return DomainText(text="t", domain="d", tokens=tokens, documents=1, words=1, bytes=1)


@given(st.integers(3, 200), st.integers(1, 40), st.data())
def test_every_token_is_scored_once_with_its_context(count: int, length: int, data: st.DataObject) -> None:
    stride, batch = data.draw(st.integers(1, length)), data.draw(st.integers(1, 5))
    tokens = np.arange(1000, 1000 + count)
    scored, rows = [], 0
    for inputs, targets in windows(tokens, length, stride, batch):
        assert inputs.shape == targets.shape
        assert inputs.shape[0] <= batch
        rows += len(inputs)
        for x, y in zip(inputs, targets, strict=True):
            kept = np.flatnonzero(y != IGNORED)
            assert (y[kept] == x[kept] + 1).all()  # the next token
            if x[0] > 1000:
                assert kept[0] == length - stride  # the context of the first token scored
            scored += y[kept].tolist()
    assert scored == tokens[1:].tolist()
    assert rows == count_windows(text_of(tokens), length, stride)


@pytest.mark.parametrize("stride", [32, 20, 1])
def test_measure_is_the_sum_of_single_predictions(loaded: LoadedModel, stride: int) -> None:
    text = read_domains(["validation"], loaded, limit=90)[0]
    value = measure_text(loaded.model, text, 32, stride, batch=3)
    nll, scored = 0.0, 0
    ids = torch.from_numpy(text.tokens)
    with torch.no_grad():
        for begin in range(0, len(ids) - 1, stride):
            window = ids[begin : begin + 33]
            log_probs = loaded.model(window[None, :-1]).logits[0].double().log_softmax(-1)
            for place in range(len(window) - 1):
                if begin + place >= scored:
                    nll -= log_probs[place, window[place + 1]].item()
                    scored += 1
    assert scored == value.tokens == 90
    assert value.nll == pytest.approx(nll, rel=1e-5)  # fp32 sums in another order


def test_the_routers_losses_are_no_part_of_it(loaded: LoadedModel) -> None:
    """Also where the configuration asks for router logits, with which the model's loss includes them."""
    text = read_domains(["validation"], loaded, limit=90)[0]
    plain = measure_text(loaded.model, text, 32, 32, batch=3)
    loaded.model.config.output_router_logits = True
    for router in routers(loaded.model):
        router.losses = lambda routing: routing.probs.new_ones(())  # type: ignore[method-assign]
    assert measure_text(loaded.model, text, 32, 32, batch=3) == plain


def test_a_run_s_split_has_its_prepared_counts_and_its_logged_loss(loaded: LoadedModel, run: Path) -> None:
    assert loaded.data is not None
    texts = read_domains(["validation"], loaded)
    index = loaded.data.index["splits"]["validation"]["domains"]
    assert {t.domain: (len(t.tokens) - 1, t.bytes, t.documents) for t in texts} == {
        name: (d["tokens"], d["bytes"], d["documents"]) for name, d in index.items()
    }
    logged = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    domains = [line for line in logged if line["kind"] == "validation"][-1]["domains"]
    for text in texts:
        loss = measure_text(loaded.model, text, 32, 32, 8).loss
        # Training's validation starts without the end-of-text in front, so windows are shifted by one token.
        assert loss == pytest.approx(domains[text.domain], rel=0.02)


def test_texts_in_every_form_are_one_text(
    loaded: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = ["one two three", "vier fünf\nsechs <|endoftext|> 七"]
    rows = "".join(json.dumps({"text": text, "domain": "d"}) + "\n" for text in documents).encode()
    (tmp_path / "plain.jsonl").write_bytes(rows + b"\nnot json\n")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(rows))
    (tmp_path / "rows.jsonl.xz").write_bytes(lzma.compress(rows))
    names = [str(tmp_path / name) for name in ("plain.jsonl", "rows.jsonl.gz", "rows.jsonl.xz")]
    found = read_domains(names, loaded)
    assert [text.text for text in found] == names
    assert capsys.readouterr().err == f"{names[0]}: skipped 1 row (1 invalid JSON)\n"
    end = loaded.tokenizer.eos_token_id
    for text in found:
        assert text.tokens.tolist() == found[0].tokens.tolist()
        assert (text.documents, text.words, text.domain) == (2, 8, "d")
        assert text.bytes == sum(len(document.encode()) for document in documents)
        # A quoted end-of-text ends nothing: there is one in front, and one after each document.
        assert (text.tokens == end).sum() == 3
        assert text.tokens[[0, -1]].tolist() == [end, end]
    (tmp_path / "a.txt").write_text("one two")
    assert {text.domain for text in read_domains([str(tmp_path)], loaded)} == {tmp_path.name, "d"}


def test_a_cut_text_counts_what_is_left(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three four five six")
    (whole,) = read_domains([str(tmp_path / "a.txt")], loaded)
    (cut,) = read_domains([str(tmp_path / "a.txt")], loaded, limit=4)
    assert cut.tokens.tolist() == whole.tokens[:5].tolist()
    text = loaded.tokenizer.decode(cut.tokens[1:])
    assert (cut.words, cut.bytes) == (len(text.split()), len(text.encode()))


def test_definitions() -> None:
    value = Perplexity(nll=20.0, tokens=10, words=5, bytes=40, documents=1)
    assert value.perplexity == math.exp(2)
    assert value.word_perplexity == math.exp(4)
    assert value.byte_perplexity == math.exp(0.5)
    assert value.bits_per_byte == pytest.approx(math.log2(value.byte_perplexity))
    both = value + Perplexity(nll=1.0, tokens=1, words=1, bytes=1, documents=1)
    assert (both.nll, both.tokens, both.words, both.bytes, both.documents) == (21.0, 11, 6, 41, 2)


def test_bits_per_byte_do_not_depend_on_the_tokenizer() -> None:
    """A uniform model of bytes and one of pairs of bytes are the same model of text."""
    single = Perplexity(nll=8 * math.log(256), tokens=8, words=1, bytes=8, documents=1)
    pairs = Perplexity(nll=4 * math.log(256**2), tokens=4, words=1, bytes=8, documents=1)
    assert single.perplexity != pytest.approx(pairs.perplexity)
    assert single.bits_per_byte == pytest.approx(8)
    assert pairs.bits_per_byte == pytest.approx(8)


@pytest.mark.parametrize("content", ["", "  \n"])
def test_empty_texts_are_refused(loaded: LoadedModel, tmp_path: Path, content: str) -> None:
    (tmp_path / "empty.txt").write_text(content)
    with pytest.raises(ValueError, match=r"empty\.txt must hold a document"):
        read_domains([str(tmp_path / "empty.txt")], loaded)


def test_a_single_token_is_no_text(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("one")
    with pytest.raises(ValueError, match="at least two tokens"):
        read_domains([str(tmp_path / "short.txt")], loaded, limit=1)


def test_windows_are_as_trained_and_stay_within_the_model(run: Path, tmp_path: Path) -> None:
    def lengths(**options: int) -> tuple[int, int]:
        found = evaluate(Plan(model=run, out=tmp_path, tokens=70, **options)).evaluation
        return found.length, found.stride

    assert lengths() == (32, 32)
    assert lengths(length=64, stride=16) == (64, 16)
    with pytest.raises(ValueError, match="at most the model's 64, got 65"):
        lengths(length=65)
    with pytest.raises(ValueError, match="stride must be at most the length of a window, 16, got 17"):
        lengths(length=16, stride=17)
