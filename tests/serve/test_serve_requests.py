"""What a request may hold, and how a bad one is refused: the status, and a message with the field's name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grmoe.serve import Options
from grmoe.serve.errors import Invalid
from grmoe.serve.options import parse_range
from grmoe.serve.requests import ChatRequest, CompletionRequest, parse


def refusal(body: bytes | dict[str, Any], kind: Any = CompletionRequest) -> Invalid:
    def read() -> None:
        request = parse(body if isinstance(body, bytes) else json.dumps(body).encode(), kind)
        request.samplings()
        assert request.new_tokens() != 0, "checked by the service, because 0 is allowed with echo"
        assert request.alternatives is None

    with pytest.raises(Invalid) as caught:
        read()
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha", "1"), ("alpha", True), ("alpha", float("nan")), ("alpha", float("inf")), ("alpha", [1, 2]),
        ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "8"), ("max_tokens", True),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", 1e-9), ("top_p", 0), ("top_p", 1.1),
        ("seed", 2**63), ("seed", 0.5), ("stop", ["a"] * 17), ("stop", ""), ("stop", [1]), ("stop", "x" * 201),
        ("stream", "yes"), ("stream_options", {"x": 1}), ("model", 3), ("prompt", None), ("prompt", {"a": 1}),
        ("prompt", [1.5]), ("prompt", [True]), ("prompt", [1, "a"]), ("prompt", [[1], []]), ("prompt", [[[1]]]),
        ("n", 0), ("n", True), ("n", 1.0), ("logprobs", 6), ("logprobs", True), ("logprobs", -1), ("echo", 1),
        ("best_of", 2), ("best_of", True), ("presence_penalty", 0.5), ("presence_penalty", False),
        ("logit_bias", {"5": 1}), ("top_logprobs", 1), ("top_logprobs", False), ("alhpa", 1), ("messages", []),
    ],
)  # fmt: skip
def test_refused_by_name(field: str, value: Any) -> None:
    error = refusal({"prompt": "x"} | {field: value})
    assert error.param == field
    assert error.status == 400
    assert field in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, b'{"prompt": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}', b'{"prompt": "x", "\\ud800": 1}',
    ],
)  # fmt: skip
def test_refused_bodies(body: bytes) -> None:
    assert refusal(body).status == 400


def test_accepted() -> None:
    neutral = {
        "n": 1,
        "best_of": 1,
        "echo": False,
        "logprobs": None,
        "presence_penalty": 0.0,
        "logit_bias": {},
    }
    request = parse(
        json.dumps({"prompt": "x", "alpha": 2, "stop": "\n"} | neutral).encode(), CompletionRequest
    )
    assert (request.alpha, request.stop, request.samplings()[0].temperature) == (2.0, ["\n"], 1.0)
    tokens = parse(b'{"prompt": [1, 2], "seed": -5, "temperature": 0}', CompletionRequest)
    assert tokens.prompt == [[1, 2]]
    assert tokens.samplings()[0].seed == -5
    first, second = (parse(b'{"prompt": "x"}', CompletionRequest).samplings()[0].seed for _ in range(2))
    assert first != second  # without a seed nobody knows it
    chat = parse(b'{"messages": [{"role": "user", "content": "hi"}], "tools": null}', ChatRequest)
    assert chat.messages[0].content == "hi"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": "hi"},
    ],
)
def test_refused_messages(body: dict[str, Any]) -> None:
    assert refusal(body, ChatRequest).param == "messages"


def test_the_range_of_alpha() -> None:
    options = Options(folder=Path(), alpha=1.5, alpha_range=parse_range("0.5:5"))
    for alpha in (0.5, 5.0):
        options.check_alpha(alpha)
    for alpha in (0.49, 5.01, float("nan")):
        with pytest.raises(ValueError, match=r"between 0\.5 and 5"):
            options.check_alpha(alpha)
    with pytest.raises(ValueError, match=r"--alpha-range 2:5, got 1\.5"):
        replace(options, alpha_range=(2.0, 5.0))
    for text in ("5", "a:b", "", "1:2:3"):
        with pytest.raises(ValueError, match="alpha-range"):
            parse_range(text)
    for bad in ((5.0, 1.0), (-1.0, 2.0), (1.0, float("inf")), (1.0, float("nan"))):
        with pytest.raises(ValueError, match="alpha-range"):
            replace(options, alpha_range=bad)
