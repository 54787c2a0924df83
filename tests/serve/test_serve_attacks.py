"""Clients that mean no good: large and wrong bodies, silent connections, foreign pages, names that are not ours."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from live import running, slow_down, until
from small_model import make_model, offline, options

from grmoe.serve.access import Access
from grmoe.serve.errors import Invalid
from grmoe.serve.requests import ChatRequest, CompletionRequest, parse
from grmoe.serve.server import make_service
from grmoe.serve.service import Service

MEGABYTE = 1 << 20
JSON = {"content-type": "application/json"}
GREEDY = {"temperature": 0, "return_token_ids": True, "max_tokens": 4}


@pytest.fixture(scope="module")
def service(folder: Path) -> Service:
    return make_service(
        options(folder, name="our/model", max_body=MEGABYTE, allowed_hosts=("Proxy.example",))
    )


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    with running(service) as found:
        yield found


def repeated(before: str, item: str, after: str) -> bytes:
    """A body of a megabyte: many wrong items."""
    count = (MEGABYTE - 200) // (len(item) + 1)
    return f"{before}{','.join([item] * count)}{after}".encode()


LARGE = {
    "prompts": (CompletionRequest, repeated('{"prompt": [', "{}", "]}")),
    "tokens": (CompletionRequest, repeated('{"prompt": [[', "true", "]]}")),
    "stops": (CompletionRequest, repeated('{"prompt": "x", "stop": [', "1", "]}")),
    "messages": (ChatRequest, repeated('{"messages": [', "0", "]}")),
    "parts": (ChatRequest, repeated('{"messages": [{"role": "user", "content": [', "{}", "]}]}")),
    "valid messages": (ChatRequest, repeated('{"messages": [', '{"role":"a","content":""}', "]}")),
    "fields": (CompletionRequest, json.dumps({str(i): 1 for i in range(80_000)}).encode()),
    "fields inside": (
        CompletionRequest,
        json.dumps({"prompt": "x", "stream_options": {str(i): 1 for i in range(80_000)}}).encode(),
    ),
    "a long name": (CompletionRequest, json.dumps({"prompt": "x", "x" * 900_000: 1}).encode()),
    "a long role": (ChatRequest, json.dumps({"messages": [{"role": "x" * 900_000, "content": ""}]}).encode()),
    "deep": (CompletionRequest, b'{"prompt": ' + b"[" * 900_000),
    "a neutral field": (CompletionRequest, repeated('{"prompt": "x", "tools": [', "1", "]}")),
}


@pytest.mark.parametrize("case", LARGE)
def test_a_wrong_megabyte_is_refused_at_once(case: str) -> None:
    """It was checked item by item, with an error for each: seconds in which nothing else was answered. And the message
    repeated what was sent."""
    kind, body = LARGE[case]
    assert len(body) < 1.1 * MEGABYTE
    start = time.perf_counter()
    with pytest.raises(Invalid) as caught:
        parse(body, kind)
    assert time.perf_counter() - start < 0.5  # 1 to 4 s before; here about 0.05
    assert len(caught.value.message) <= 300
    assert len(caught.value.param or "") <= 64
    assert "\n" not in caught.value.message


def test_messages_are_short(client: httpx.Client) -> None:
    """Whatever a client puts into a path, a name or a header."""
    long = "y" * 9000
    found = [
        client.get(f"/{long}"),
        client.get(f"/v1/models/{long}"),
        client.post("/v1/completions", json={"prompt": "x", "model": long}),
        client.post("/v1/completions", json={"prompt": [10**300]}),
        client.post("/v1/completions", content=b"{}", headers={"content-type": long}),
        client.get("/v1/models", headers={"host": long}),
        client.get("/v1/models", headers={"origin": long}),
    ]
    assert [response.status_code for response in found] == [404, 404, 404, 400, 415, 403, 403]
    for response in found:
        assert len(response.content) < 500
        assert set(response.json()) == {"error"}


def test_a_large_batch_costs_little(client: httpx.Client) -> None:
    """Prompts are counted before they are encoded."""
    start = time.perf_counter()
    response = client.post("/v1/completions", json={"prompt": ["a"] * 200_000})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert time.perf_counter() - start < 2


# -- names, pages and content types ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "localhost:9"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "proxy.example:443"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "10.1.2.3"}, 403),
        ({"host": ""}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_names_and_pages(client: httpx.Client, headers: dict[str, str], status: int) -> None:
    """Any Host and any Origin was answered: a web page could use a server on 127.0.0.1."""
    assert client.get("/v1/models", headers=headers).status_code == status
    response = client.post("/v1/completions", json=GREEDY | {"prompt": "x"}, headers=headers)
    assert response.status_code == status
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert client.get("/health", headers=headers).status_code == 200  # of a load balancer


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_other_content_types(client: httpx.Client, kind: str) -> None:
    """These are what a page may send without asking first."""
    response = client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind})
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]
    good = {"content-type": "Application/JSON; charset=utf-8"}
    body = json.dumps(GREEDY | {"prompt": "x"}).encode()
    assert client.post("/v1/completions", content=body, headers=good).status_code == 200


def test_no_redirects(client: httpx.Client) -> None:
    """A trailing slash led to whatever the Host header named."""
    for path in ("/v1/completions/", "/v1/models/", "/health/"):
        for method in ("GET", "POST"):
            response = client.request(method, path, json={"prompt": "x"}, headers={"host": "proxy.example"})
            assert response.status_code in (404, 405)
            assert "location" not in response.headers


def test_an_allowed_page(folder: Path) -> None:
    """Its browser asks first, and it gets the headers that let it read the answer. Others do not."""
    page, other = "http://localhost:3000", "http://localhost:3001"
    service = make_service(options(folder, allowed_origins=(page,)))
    with running(service) as client:
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        may = client.options("/v1/completions", headers={"origin": page, **ask})
        assert (may.status_code, may.headers["access-control-allow-origin"]) == (200, page)
        answer = client.post("/v1/completions", json=GREEDY | {"prompt": "x"}, headers={"origin": page})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page)
        for response in (
            client.options("/v1/completions", headers={"origin": other, **ask}),
            client.post("/v1/completions", json=GREEDY | {"prompt": "x"}, headers={"origin": other}),
        ):
            assert response.status_code == 403
            assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("host", "more", "good", "bad"),
    [
        ("127.0.0.1", (), ["127.0.0.1:1", "localhost"], ["192.168.0.2", "a.example"]),
        ("192.168.0.2", (), ["192.168.0.2:80", "LOCALHOST"], ["192.168.0.3"]),
        ("0.0.0.0", (), ["192.168.0.2:80", "[fe80::1]:80", socket.gethostname()], ["a.example", "1.2.3.4.example"]),
        ("::", ("a.example",), ["10.0.0.1", "a.example"], ["b.example"]),
        ("127.0.0.1", ("*",), ["anything"], []),
    ],
)  # fmt: skip
def test_hosts(folder: Path, host: str, more: tuple[str, ...], good: list[str], bad: list[str]) -> None:
    """On every network any address is a name of the server: no page can have an address as its name."""
    access = Access(lambda *_: None, options(folder, host=host, allowed_hosts=more), bool, lambda *_: None)  # type: ignore[arg-type, return-value]

    def check(name: str) -> None:
        access.check({"type": "http", "method": "GET", "headers": [(b"host", name.encode())]})

    for name in good:
        check(name)
    for name in bad:
        with pytest.raises(Invalid, match="is not served here; allow it with --allow-host"):
            check(name)


def test_the_model_by_its_name(client: httpx.Client) -> None:
    """`--name`, and `models.retrieve` of OpenAI's clients."""
    [listed] = client.get("/v1/models").json()["data"]
    assert listed["id"] == "our/model"
    assert client.get("/v1/models/our/model").json() == listed
    assert client.get("/v1/models/our%2Fmodel").json() == listed
    missing = client.get("/v1/models/small")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    answer = client.post("/v1/completions", json=GREEDY | {"prompt": "x", "model": "our/model"}).json()
    assert answer["model"] == "our/model"
    assert client.post("/v1/completions", json={"prompt": "x", "model": "small"}).status_code == 404


# -- connections -----------------------------------------------------------------------------------------------


def connect(client: httpx.Client, sent: bytes = b"") -> socket.socket:
    """A connection that has sent this."""
    found = socket.create_connection(("127.0.0.1", client.base_url.port or 0), timeout=10)
    found.sendall(sent)
    return found


def received(connection: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    found = b""
    try:
        while part := connection.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


STALLED = {
    "nothing": b"",
    "headers": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n",
    "body": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 99\r\n\r\n{",
    "kept alive": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


def test_silent_connections_give_way(folder: Path) -> None:
    """1024 of them kept everyone out, /health too. Now one more closes the oldest that is silent. Those with a whole
    request stay, however many arrive after them."""
    service = make_service(options(folder, connections=6))
    slow_down(service, 0.02)
    body = json.dumps(GREEDY | {"prompt": [1, 2, 3], "max_tokens": 20}).encode()
    head = STALLED["body"].replace(b"99", b"%d\r\nConnection: close" % len(body))[:-1]
    with running(service) as client, ExitStack() as stack:
        computed = stack.enter_context(connect(client, head + body))
        until(lambda: len(service.engine.running) == 1)
        crowd = [stack.enter_context(connect(client, sent)) for sent in [*STALLED.values()] * 4]
        until(lambda: service.connections() == 6)
        with httpx.Client(base_url=client.base_url) as fresh:
            assert fresh.get("/health").status_code == 200
            answer = fresh.post("/v1/completions", json=GREEDY | {"prompt": [7]})
            assert answer.json()["choices"][0]["token_ids"] == offline(make_model(), [7], 1.5, 4)
        assert service.connections() <= 6
        assert not any(received(each) for each in crowd[:3])  # closed without an answer
        answered = received(computed).partition(b"\r\n\r\n")[2]
        tokens = json.loads(answered)["choices"][0]["token_ids"]
        assert tokens == offline(make_model(), [1, 2, 3], 1.5, 20)


def test_health_is_answered_when_all_connections_are_busy(folder: Path) -> None:
    service = make_service(options(folder, connections=2, concurrency=1))
    slow_down(service, 0.05)
    body = json.dumps({"prompt": "x", "max_tokens": 100, "temperature": 0}).encode()
    sent = STALLED["body"].replace(b"99", b"%d" % len(body))[:-1] + body
    with running(service) as client, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connect(client, sent))
        until(lambda: len(service.engine.running) + len(service.engine.waiting) == 2)
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 200
        assert client.get("/v1/models").status_code == 503


def test_slow_headers_are_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They could stay for ever, the first ones and those after an answer. A byte now and then does not help. A
    connection without a further request ends too."""
    monkeypatch.setattr("grmoe.serve.connections._KEEP_ALIVE", 0.2)
    service = make_service(options(folder, header_timeout=0.2))
    start = time.monotonic()
    with running(service) as client:
        for sent in (b"", STALLED["headers"], STALLED["kept alive"] + STALLED["headers"]):
            with connect(client, sent) as slow:
                if sent.startswith(b"GET"):
                    assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200")
                    slow.sendall(b"X")
                with suppress(OSError):
                    while time.monotonic() < start + 10:
                        time.sleep(0.02)
                        slow.sendall(b"x")
        with connect(client, STALLED["kept alive"]) as idle:
            assert received(idle).startswith(b"HTTP/1.1 200")
        # An ordinary request has time for its answer.
        assert client.post("/v1/completions", json=GREEDY | {"prompt": "x"}).status_code == 200
    assert time.monotonic() - start < 10


def test_a_body_without_end_is_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of one byte, which take long to read. Others are answered meanwhile, and after its 413 it ends."""
    monkeypatch.setattr("grmoe.serve.connections._ON_ITS_WAY", 10_000)
    head = STALLED["body"].replace(b"Content-Length: 99", b"Transfer-Encoding: chunked").rstrip(b"{")
    part, sent = b"1\r\nx\r\n" * 2000, 0
    service = make_service(options(folder, max_body=10_000))
    with running(service) as client, connect(client, head) as endless, suppress(OSError):
        while sent < 10 * MEGABYTE:
            endless.sendall(part)
            sent += len(part)
            start = time.monotonic()
            assert client.get("/health").status_code == 200
            assert time.monotonic() - start < 1
    assert sent < MEGABYTE


def test_a_body_just_too_long_gets_its_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by its headers alone, before any of it has arrived. All of it may follow, for each request anew."""
    monkeypatch.setattr("grmoe.serve.connections._ON_ITS_WAY", 1000)
    head = STALLED["body"].replace(b"Content-Length: 99", b"Content-Length: 10500").rstrip(b"{")
    with running(make_service(options(folder, max_body=10_000))) as client, connect(client, head) as large:
        for _ in range(3):
            answer = b""
            while not answer.endswith(b"}"):
                part = large.recv(1 << 16)
                assert part, "cut off"
                answer += part
            assert answer.startswith(b"HTTP/1.1 413")
            for size in (10_300, 200):
                large.sendall(b"x" * size)
                time.sleep(0.02)  # so that the server reads the parts one by one
            large.sendall(head)


def test_a_server_that_is_told_to_stop_waits_for_nobody_for_long(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that never ends, and a template that never ends: after the grace both are cut."""
    monkeypatch.setattr("grmoe.serve.server._LAST_WORDS", 0.3)
    service = make_service(options(folder, grace=0.2, timeout=60))
    template = service.template
    assert template is not None
    template.setup["template"] = (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    chat = {"messages": [{"role": "user", "content": "x"}]}
    with ThreadPoolExecutor(1) as pool:
        with running(service) as client:
            url = str(client.base_url)
            chatting = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=chat, timeout=30)
            until(lambda: template.process is not None)
            body = connect(client, STALLED["body"])
            until(lambda: service.connections() == 2)
            assert client.get("/health").status_code == 200
            start = time.monotonic()
        assert time.monotonic() - start < 4
        assert chatting.result().status_code == 503
        with body:
            assert received(body) == b""
