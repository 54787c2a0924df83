"""Text to measure on, as windows of one length: from prepared tokens, or from files through the model's tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from grmoe import checks
from grmoe.data import TokenDataset
from grmoe.data.documents import Document, Position, Reader
from grmoe.data.shards import INDEX
from grmoe.data.sources import find_units
from grmoe.runs.folder import CONFIG, saved_config
from grmoe.runs.open import LoadedModel

LEAST = 8  # windows: a standard error of fewer says nothing


@dataclass(frozen=True)
class Text:
    name: str
    rows_WS: Tensor  # int64, (windows, length + 1): inputs [:, :-1], targets [:, 1:]

    @property
    def tokens(self) -> int:
        return len(self.rows_WS) * (self.rows_WS.shape[1] - 1)


def window_length(opened: LoadedModel) -> int:
    """What a run was trained on; of an exported folder, as much as its positions allow."""
    longest = opened.model.config.max_position_embeddings
    if not (opened.path / CONFIG).is_file():
        return longest
    return saved_config(opened.path).data.sequence_length or longest


def default_tokens(length: int, on_gpu: bool) -> int:
    """Of each text; never fewer than the windows that are asked for."""
    return max(2**17 if on_gpu else 2**13, LEAST * length)


def read_text(source: str | None, opened: LoadedModel, length: int, tokens: int) -> Text:
    """At most `tokens` tokens of `source`; None is the validation text of a run.

    Of a prepared folder the held-out split (of one without, all of it), as windows spread evenly over it. Of files
    (.txt, .jsonl, .parquet) the first documents.
    """
    longest = opened.model.config.max_position_embeddings
    checks.require(
        checks.positive_int("length", length) <= longest,
        f"length must be at most the model's {longest}, got {length}",
    )
    count = checks.positive_int("tokens", tokens) // length
    if source is None:
        name, rows = "validation", _spread(opened.held_out(), length, count)
    elif (found := _prepared(source)) is not None:
        _same_tokenizer(found, opened)
        name, rows = source, _spread(found, length, count)
    else:
        name, rows = source, _first(source, opened, length, count)
    checks.require(
        len(rows) >= LEAST,
        f"text must hold at least {LEAST} windows of {length} tokens, got {len(rows)} from {name}: "
        + (
            "give more --tokens, or a shorter --length"
            if count < LEAST
            else "give more text, or a shorter --length"
        ),
    )
    return Text(name, torch.from_numpy(rows))


def _prepared(source: str) -> TokenDataset | None:
    if not (Path(source) / INDEX).is_file():
        return None
    held_out = TokenDataset(source, "validation")
    return held_out if held_out.tokens else TokenDataset(source, "train")


def _same_tokenizer(data: TokenDataset, opened: LoadedModel) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(data.tokenizer_folder)
    checks.require(
        theirs.get_vocab() == opened.tokenizer.get_vocab(),
        f"text must be prepared with the model's own tokenizer, got {data.folder} with another; "
        "files of text are tokenised here",
    )


def _spread(data: TokenDataset, length: int, count: int) -> NDArray[np.int64]:
    """Neighbouring windows are alike: those far apart say more about the text."""
    there = data.num_windows(length)
    chosen = [i * there // count for i in range(count)] if there > count else range(there)
    rows = [data.read(w * length, (w + 1) * length + 1) for w in chosen]
    return np.stack(rows) if rows else np.empty((0, length + 1), dtype=np.int64)


def _first(source: str, opened: LoadedModel, length: int, count: int) -> NDArray[np.int64]:
    units = find_units([source])
    ids: list[int] = []
    reader = Reader(units, [None] * len(units), 0.0, "text", "domain", strict=False)
    for row in reader.read(Position()):
        if isinstance(row, Document):
            ids += opened.tokenizer.encode(row.text, add_special_tokens=False)
            ids.append(opened.tokenizer.eos_token_id)
        if len(ids) > count * length:
            break
    full = min(count, max(0, len(ids) - 1) // length)
    rows = [ids[w * length : (w + 1) * length + 1] for w in range(full)]
    return np.array(rows, dtype=np.int64).reshape(full, length + 1)
