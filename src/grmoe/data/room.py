"""Is there enough text for the commands that come after `grmoe prepare`?"""

from __future__ import annotations

from typing import Any

from grmoe.checks import require
from grmoe.data.splitting import training_tokens, validation_bytes, validation_tokens
from grmoe.tables import counted

_SHORTEST = 16  # tokens per sequence: below, there is nothing to learn


def lacks_room(index: dict[str, Any], sequence_length: int) -> str:
    """What is missing for sequences of this length; empty if nothing is."""
    needs = {"train": training_tokens(sequence_length), "validation": validation_tokens(sequence_length)}
    for split, need in needs.items():
        if (found := index["splits"][split]["tokens"]) < need:
            purpose = "a batch of training needs" if split == "train" else "eval and dial need"
            return f"the {split} split has {found:,} tokens, and {purpose} {need:,}"
    return ""


def check_room(index: dict[str, Any], sequence_length: int | None, validates: bool) -> None:
    """Raise if the text is too short, with a length of sequences that it is long enough for. None: any length.

    validates: some text must be held out.
    """
    why = next(iter(index["first_skipped"].values()), "give more text")
    require(index["splits"]["train"]["tokens"] > 0, f"no document is left to train on; {why}")
    held_out = index["splits"]["validation"]["tokens"] > 0
    require(held_out or not validates, f"no document is left to validate on; {why}")
    missing = "" if sequence_length is None else lacks_room(index, sequence_length)
    if sequence_length is None or not missing:
        return
    fitting = _other_length(index, sequence_length)
    advice = f", or prepare it for shorter sequences: --sequence-length {fitting}" if fitting else ""
    # Skipped rows may be the reason, and the summary that has them is not printed.
    if rows := sum(index["skipped"].values()):
        advice += f"; {counted(rows, 'row')} skipped: {'; '.join(index['first_skipped'].values())}"
    raise ValueError(
        f"too little text for sequences of {sequence_length:,} tokens: {missing}; "
        f"give at least {_least_kilobytes(index, sequence_length):,} kB of text{advice}"
    )


def _least_kilobytes(index: dict[str, Any], sequence_length: int) -> int:
    """Text of this kind that has room for both splits. At most a quarter of it is held out."""
    size, tokens = _total(index)
    need = max(training_tokens(sequence_length) / 0.75, validation_tokens(sequence_length) / 0.25)
    return round(1.1 * need * size / tokens / 1000) + 1  # more text may have fewer tokens per byte


def _total(index: dict[str, Any]) -> tuple[int, int]:
    """(bytes, tokens) of both splits."""
    sizes = [index["splits"][split] for split in ("train", "validation")]
    return sum(split["bytes"] for split in sizes), sum(split["tokens"] for split in sizes)


def longest_sequence(index: dict[str, Any], sequence_length: int) -> int | None:
    """The longest sequences that the prepared text has room for: as asked, or a smaller power of two."""
    lengths = [sequence_length, *_shorter(sequence_length)]
    return next((length for length in lengths if not lacks_room(index, length)), None)


def _other_length(index: dict[str, Any], sequence_length: int) -> int | None:
    """The longest sequences that the same text has room for if it is split for them. None if there are none."""
    size, tokens = _total(index)
    for length in _shorter(sequence_length):
        # Other text will be held out, so its number of tokens is an estimate: leave a tenth to spare.
        held_out = 0.9 * tokens * min(0.25, validation_bytes(length) / size)
        if held_out >= validation_tokens(length) and 0.9 * (tokens - held_out) >= training_tokens(length):
            return length
    return None


def _shorter(sequence_length: int) -> list[int]:
    powers = (1 << n for n in reversed(range(sequence_length.bit_length())))
    return [length for length in powers if _SHORTEST <= length < sequence_length]
