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


def choose_split(
    documents: Sequence[tuple[float, int]], share: float, least: int = 1, whole: bool = False
) -> Split:
    """The split of a corpus of `documents`, given as (place, bytes).

    The share asked for, if it holds out `least` bytes (or a quarter of the corpus, if that is less). Otherwise a larger
    share. If whole documents would hold out far too much, because they are few or one is long: the end of every
    document, unless they must stay `whole`.
    """
    total = sum(size for _, size in documents)
    enough = min(least, _LARGEST_SHARE * total)
    if sum(size for at, size in documents if at < share) >= max(1, enough):
        return Split(share)
    wanted, held_out, last = max(1.0, enough, share * total), 0, 0.0
    for at, size in sorted(documents):
        held_out, last = held_out + size, at
        if held_out >= wanted:
            break
    few = len(documents) < _FEW_DOCUMENTS or held_out > wanted + total / 8
    if few and not whole:
        return Split(tail=wanted / total)
    return Split(float(f"{1.01 * last:.3g}"))  # above `last`, and short enough to read
