"""Malformed requests by the hundred, straight into the ASGI application: no 500, and the next answer is right."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from small_model import make_model, offline, options

from grmoe.serve.app import build
from grmoe.serve.server import make_service

Headers = list[tuple[bytes, bytes]]

JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3.5, 1e308, -0.0, 2**31, 2**63, -(2**63), 10**4000, float("nan"), float("inf"), "",
    "x", "0", "é€𝄞", "\x00\n", "y" * 300, "__class__", [], [[]], [None], [0], [-1], [256], [257], [True], ["a", 1],
    [[1], ["a"]], ["a", "b", "c", "d"], {}, {"a": 1}, {"type": "text"}, [{"role": "user", "content": "x"}],
    [{"role": "bad", "content": "x"}], [{"role": "", "content": []}], [{"role": "u", "content": [{"type": "text"}]}],
    {"include_usage": True}, {"include_usage": 1}, [[[1]]], "\N{REPLACEMENT CHARACTER}",
]  # fmt: skip
FIELDS = [
    "model", "alpha", "budget", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop",
    "stream", "stream_options", "return_token_ids", "user", "prompt", "messages", "echo", "logprobs", "top_logprobs",
    "best_of", "tools", "logit_bias", "suffix", "unknown", "\x00", "prompt ",
]  # fmt: skip
# Values that are right in themselves, and wrong with some others.
PLAUSIBLE: dict[str, list[Any]] = {
    "n": [1, 2, 3, 4], "logprobs": [0, 1, 5, True], "top_logprobs": [0, 2, 20], "echo": [True, False], "stream": [True],
    "max_tokens": [0, 1, 4, 5], "max_completion_tokens": [1, 2], "alpha": [0.5, 5, 5.1], "budget": [1, 1.7, 3.1],
    "prompt": ["é", [0, 256], ["a", "b"], [[1], [2, 3]], "x" * 127], "stop": ["a", ["a", "b"]], "seed": [-1, 7],
    "temperature": [0, 0.0001, 2], "top_p": [0.1, 1], "return_token_ids": [True],
    "stream_options": [{"include_usage": True}],
}  # fmt: skip
PATHS = ["/v1/completions", "/v1/chat/completions"]
OTHER_PATHS = [
    "/",
    "/v1",
    "/v1/models/x",
    "/v1/models/",
    "/v1/completions/",
    "//evil.example/",
    "/metrics",
    "/\x00",
    "/é",
]
HEADERS = [b"host", b"content-type", b"origin", b"authorization", b"content-length", b"accept"]
HEADER_JUNK = [b"", b"x", b"\xff\x80", b"\xb2", b"-1", b"9" * 5000, b"[::1", b"evil.example:0", b"a" * 999]
BROKEN = [
    b"", b"{", b"}", b"[]", b"3", b"null", b'"x"', b"\xff\xfe{\x00", b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "x"} x', b"[" * 5000, b'{"prompt":' * 300,
    b'{"prompt": "x", "prompt": 1}', b"\xef\xbb\xbf{}", b"x" * 25_000,
]  # fmt: skip


def request(draw: random.Random) -> tuple[str, str, Headers, bytes]:
    """(method, path, headers, body), wrong in one way or several."""
    path = draw.choice(PATHS)
    values: dict[str, Any] = {"max_tokens": 2} | (
        {"prompt": "x"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "x"}]}
    )
    for name in draw.sample([*PLAUSIBLE], 2):
        values[name] = draw.choice(PLAUSIBLE[name])
    for _ in range(draw.randint(0, 2)):
        values[draw.choice(FIELDS)] = draw.choice(JUNK)
    body = json.dumps(values).encode()
    method, headers = "POST", {b"host": b"localhost", b"content-type": b"application/json"}
    match draw.randrange(10):
        case 0:
            body = draw.choice(BROKEN)
        case 1:  # a byte changed, or the end missing
            at = draw.randrange(len(body))
            body = body[:at] + draw.choice([b"", bytes([draw.randrange(256)]) + body[at + 1 :]])
        case 2:
            headers[draw.choice(HEADERS)] = draw.choice(HEADER_JUNK)
        case 3:
            method, path = (
                draw.choice(["GET", "POST", "PUT", "OPTIONS", "HEAD", "DELETE"]),
                draw.choice(OTHER_PATHS),
            )
    return method, path, list(headers.items()), body


async def call(app: Any, method: str, path: str, headers: Headers, body: bytes) -> tuple[int, bytes]:
    """The status and the body that a server would send."""
    # In parts, as a network has it.
    parts = [body[:7], body[7:]] if len(body) > 7 else [body]
    sent: list[Any] = [
        {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)}
        for i, part in enumerate(parts)
    ]
    found: list[dict[str, Any]] = []

    async def receive() -> Any:
        return sent.pop(0) if sent else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        found.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    assert not found[-1].get("more_body")
    return found[0]["status"], b"".join(message.get("body", b"") for message in found[1:])


@pytest.mark.parametrize("seed", range(2))
def test_malformed_requests(folder: Path, seed: int) -> None:
    """Every response is a short error in OpenAI's form, or an answer where the request happens to be valid."""
    limits = {"max_new_tokens": 4, "max_choices": 3, "timeout": 30, "concurrency": 4}
    service = make_service(options(folder, **limits))
    app = build(service)
    draw = random.Random(seed)
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    valid = json.dumps(
        {"prompt": [9, 8], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    ).encode()
    expected = offline(make_model(), [9, 8], 1.5, 4)

    async def fuzz() -> dict[int, int]:
        seen: dict[int, int] = {}
        for i in range(200):
            asked = request(draw)
            status, body = await call(app, *asked)
            seen[status] = seen.get(status, 0) + 1
            assert status < 500, (asked, body)
            if status != 200 and asked[0] != "HEAD":
                error = json.loads(body)["error"]
                assert len(error["message"]) <= 300, asked
                assert "\n" not in error["message"], asked
            if i % 40 == 39:
                status, body = await call(app, "POST", PATHS[0], headers, valid)
                assert status == 200
                assert json.loads(body)["choices"][0]["token_ids"] == expected
        assert service.template is not None
        await service.template.close()
        return seen

    service.engine.start()
    try:
        seen = asyncio.run(fuzz())
    finally:
        service.engine.stop()
    assert seen[400] > 80
    assert seen[200] > 8  # some of it happens to be valid
    assert {403, 404, 413, 415} & set(seen)
