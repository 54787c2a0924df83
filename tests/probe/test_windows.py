"""Windows: where they begin, how long they are, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grmoe.probe.text import MemoryStream, TokenDocument, open_stream
from grmoe.probe.typed_windows import covering_starts
from grmoe.probe.windows import (
    MIN_WINDOWS,
    Text,
    batch_rows,
    cut_windows,
    default_tokens,
    read_windows,
    window_domains,
    window_length,
    window_starts,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@given(st.integers(0, 10_000), st.integers(0, 60), st.integers(1, 200))
def test_starts_are_spread_evenly_and_windows_do_not_overlap(total: int, count: int, length: int) -> None:
    starts = window_starts(total, count, length)
    places = total // length
    assert len(starts) == min(count, places)
    assert starts == sorted(set(starts))
    assert all(start % length == 0 and start + length <= total for start in starts)
    if starts:
        assert starts[0] == 0
        gaps = [(b - a) // length for a, b in zip(starts, [*starts[1:], places * length], strict=True)]
        assert max(gaps) - min(gaps) <= 1  # as even as whole windows allow
    if count >= places:
        assert starts == [i * length for i in range(places)]


@given(st.integers(1, 10_000), st.integers(1, 5_000), st.integers(1, 200))
def test_covering_starts_hold_the_tokens_asked_for(total: int, tokens: int, length: int) -> None:
    starts = covering_starts(total, tokens, length)
    if total < length:
        assert starts == [0]
    elif tokens <= total // length * length:
        assert tokens <= len(starts) * length < tokens + length
    else:
        assert len(starts) == total // length


def test_starts_by_hand() -> None:
    assert covering_starts(1000, 96, 32) == [0, 320, 640]
    assert covering_starts(100, 10_000, 32) == [0, 32, 64]
    assert covering_starts(20, 10_000, 32) == [0]
    with pytest.raises(ValueError, match="tokens must be an integer >= 1, got 0"):
        covering_starts(20, 0, 32)


def test_windows_are_the_stream_cut_at_the_starts(texts: list[Path], make: Any) -> None:
    loaded = make()
    stream = open_stream([str(texts[0])], loaded, 10**6)
    tokens = torch.from_numpy(stream.read(0, stream.tokens))
    text = read_windows(str(texts[0]), loaded, 16, 160)
    starts = window_starts(len(tokens) - 1, 10, 16)
    assert text.rows_WS.tolist() == [tokens[start : start + 17].tolist() for start in starts]
    assert torch.equal(text.rows_WS, cut_windows(stream, starts, 16))
    assert (text.name, text.length, text.tokens) == (str(texts[0]), 16, 160)


def test_a_window_has_the_domain_of_most_of_what_it_predicts() -> None:
    parts = (("a", 7), ("b", 6), ("a", 3), ("c", 5))
    stream = MemoryStream([TokenDocument(name, np.arange(count), None) for name, count in parts])
    # The first token of a window is not predicted: 1 … 6 are a, 6 is a and 7 … 10 are b, …
    assert window_domains(stream, [0, 5, 11, 15], 5) == ("a", "b", "a", "c")


@given(st.integers(1, 40), st.integers(1, 50))
def test_some_windows_are_spread_evenly_over_all_of_them(windows: int, wanted: int) -> None:
    """Texts come domain by domain: the first windows alone would be of one domain."""
    rows_WS = torch.arange(windows)[:, None].expand(windows, 5)
    domains = tuple("a" if w < windows / 2 else "b" for w in range(windows))
    some = Text("t", rows_WS, domains).some(4 * wanted)
    places = some.rows_WS[:, 0].tolist()
    count = min(windows, wanted)
    assert len(places) == count
    assert places[0] == 0
    assert all(windows // count <= b - a <= -(-windows // count) for a, b in pairwise([*places, windows]))
    assert some.domains_W == tuple(domains[place] for place in places)
    assert Text("t", rows_WS).some(4 * wanted).domains_W == ()


@given(st.integers(1, 40), st.integers(1, 5000))
def test_batches_are_all_rows_in_order_and_fit(windows: int, length: int) -> None:
    rows_WS = torch.arange(windows)[:, None].expand(windows, length + 1)
    batches = Text("t", rows_WS).batches(CPU)
    assert torch.equal(torch.cat(batches), rows_WS)
    assert all(len(batch) == 1 or batch.numel() <= 2048 for batch in batches)
    assert batch_rows(length, CUDA) >= batch_rows(length, CPU) >= 1


def test_length_is_the_model_s_own_unless_another_is_asked_for(make: Any) -> None:
    loaded = make(max_position_embeddings=64)  # trained on 32
    assert window_length(loaded) == 32
    assert window_length(loaded, 64) == 64
    with pytest.raises(ValueError, match="length must be at most the model's 64, got 65"):
        window_length(loaded, 65)
    with pytest.raises(ValueError, match="length must be an integer >= 1, got 0"):
        window_length(loaded, 0)


def test_defaults_follow_the_device() -> None:
    assert (default_tokens(32, CPU), default_tokens(32, CUDA)) == (8192, 131072)
    assert default_tokens(4096, CPU) == MIN_WINDOWS * 4096


def test_too_little_text_says_what_to_give(texts: list[Path], tmp_path: Path, make: Any) -> None:
    loaded = make()
    with pytest.raises(
        ValueError, match=r"at least 8 windows of 16 tokens, got 7 from .*: give more --tokens"
    ):
        read_windows(str(texts[0]), loaded, 16, 127)
    with pytest.raises(ValueError, match=r"got 0 from .*: give more --tokens, or a shorter --length"):
        read_windows(str(texts[0]), loaded, 16, 5)
    (tmp_path / "short.txt").write_text("the old sailor met Anna in Lisbon " * 3)
    with pytest.raises(ValueError, match=r"from .*short\.txt: give more text, or a shorter --length"):
        read_windows(str(tmp_path / "short.txt"), loaded, 16, 1000)
