"""One rule turns a document into tokens, and `prepare` follows it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_corpus import make_documents, write_jsonl
from tokenizers import Tokenizer

from grmoe.data import TokenDataset, prepare
from grmoe.data.encoding import DocumentEncoder

QUOTING = "A document may quote <|endoftext|> and go on."


@pytest.mark.parametrize("workers", [1, 2])
def test_encoder_gives_the_tokens_that_prepare_writes(tmp_path: Path, workers: int) -> None:
    rows = [{"text": QUOTING, "domain": "prose"}, *make_documents(30)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    prepare([source], tmp_path / "out", tokenizer="bpe:300", validation=0, workers=workers)
    data = TokenDataset(tmp_path / "out", "train")
    tokenizer = Tokenizer.from_file(str(data.tokenizer_folder / "tokenizer.json"))
    encode = DocumentEncoder(tokenizer, data.end_of_text)
    written = [ids for _, ids in data.iter_documents()]
    assert len(written) == len(rows)
    for row, ids in zip(rows, written, strict=True):
        np.testing.assert_array_equal(encode(row["text"]), ids)


def test_special_tokens_in_a_text_are_plain_text(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", make_documents(30))
    prepare([source], tmp_path / "out", tokenizer="bpe:300", validation=0)
    data = TokenDataset(tmp_path / "out", "train")
    tokenizer = Tokenizer.from_file(str(data.tokenizer_folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    encode = DocumentEncoder(tokenizer, data.end_of_text)
    ids = encode(QUOTING).tolist()
    assert ids.count(data.end_of_text) == 1
    assert ids[-1] == data.end_of_text
    assert tokenizer.decode(ids[:-1]) == QUOTING
    # The caller's tokenizer keeps its own settings.
    assert tokenizer.encode_special_tokens is False
    assert tokenizer.truncation is not None
