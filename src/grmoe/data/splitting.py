"""What is held out for validation: whole documents, or the end of every document where there are few of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

# Later commands read the validation split in windows of the training's length. `grmoe dial` and `grmoe eval` need eight
# of them (`grmoe.probe.windows.MIN_WINDOWS`). A step of training needs a batch of windows.
VALIDATION_WINDOWS = 8
TRAINING_WINDOWS = 32
SEQUENCE_LENGTH = 1024  # of most models; others are shorter
CPU_LENGTH = 128  # what `grmoe train` takes on a CPU by default
SHARE = 0.01  # of the documents
_FEW_DOCUMENTS = 10
_LARGEST_SHARE = 0.25  # of a small corpus, however many tokens later commands need
_BYTES_PER_TOKEN = 8  # more than text has, so that the bytes held out give enough tokens with any tokenizer


@dataclass(frozen=True)
class Split:
    """Which text is held out."""

    share: float = 0.0
    """Share of the documents, chosen by their hash."""
    tail: float = 0.0
    """If positive: this share of every document, its end, and no whole document."""

    def holds_out(self, raw: bytes) -> bool:
        """Whether a document is for validation. Depends on its text alone: it stays the same when others are added."""
        return place(raw) < self.share


def place(raw: bytes) -> float:
    """A hash of a document, in [0, 1)."""
    digest = hashlib.blake2b(raw, digest_size=8, person=b"grmoe-validation").digest()
    return int.from_bytes(digest, "little") / 2**64


def validation_tokens(sequence_length: int) -> int:
    """The least that later commands need. One more than their windows, because the first token is no target."""
    return VALIDATION_WINDOWS * sequence_length + 1


def training_tokens(sequence_length: int) -> int:
    """One batch of `grmoe train` with its default size."""
    return TRAINING_WINDOWS * sequence_length + 1


def validation_bytes(sequence_length: int) -> int:
    """Text that gives `validation_tokens` with any tokenizer."""
    return _BYTES_PER_TOKEN * validation_tokens(sequence_length)


def sequence_length_of(least: int) -> int | None:
    """The sequence length of `validation_bytes`; None for 0 bytes, where a share was asked for."""
    return (least // _BYTES_PER_TOKEN - 1) // VALIDATION_WINDOWS if least else None


def choose_split(
    documents: Sequence[tuple[float, int]], share: float, least: int = 1, whole: bool = False
) -> Split:
    """The split of a corpus of `documents`, given as (place, bytes).

    The share asked for, if it holds out `least` bytes (or a quarter of the corpus, if that is less). Otherwise a larger
    share. If whole documents would hold out far too much, because they are few or one is long: the end of every
    document, unless they must stay `whole`.
    """
    total = sum(size for _, size in documents)
    enough = max(1.0, min(least, _LARGEST_SHARE * total))
    as_asked = _held_out(documents, share)
    if as_asked >= enough and (whole or not is_far_too_much(as_asked, total, share, least)):
        return Split(share)
    wanted, held_out, last = max(enough, share * total), 0, 0.0
    for at, size in sorted(documents):
        held_out, last = held_out + size, at
        if held_out >= wanted:
            break
    larger = float(f"{1.01 * last:.3g}")  # above `last`, and short enough to read
    # Counted again: copies of a document have the same place, and another one may lie just above `last`.
    too_much = is_far_too_much(_held_out(documents, larger), total, share, least)
    few = len(documents) < _FEW_DOCUMENTS or too_much or larger < share
    return Split(tail=wanted / total) if few and not whole else Split(larger)


def is_far_too_much(held_out: int, total: int, share: float, least: int) -> bool:
    """Whether it is an eighth of the corpus more than needed, or leaves nothing to train on. All in bytes."""
    wanted = max(1.0, min(least, _LARGEST_SHARE * total), share * total)
    return held_out > wanted + total / 8 or held_out >= total


def _held_out(documents: Sequence[tuple[float, int]], share: float) -> int:
    """Bytes of the documents that a share holds out."""
    return sum(size for at, size in documents if at < share)
