"""The server over real connections, in a thread of this process: answers, refusals, limits, clients that leave."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
from live import events, running, slow_down, until
from small_model import CURVE, make_model, make_tokenizer, offline, options

from grmoe.routing import LayerNumbers
from grmoe.serve.errors import Invalid
from grmoe.serve.server import make_service
from grmoe.serve.service import Service

ALPHAS = (0.5, 1.5, 4.0)
GREEDY = {"temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def service(folder: Path) -> Service:
    return make_service(options(folder))


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    with running(service) as found:
        yield found


def test_concurrent_clients_at_their_own_alpha(client: httpx.Client) -> None:
    model = make_model()
    prompts = [[(7 * i + j) % 256 for j in range(1 + i % 9)] for i in range(12)]
    expected = [offline(model, p, ALPHAS[i % 3], 12 + i) for i, p in enumerate(prompts)]

    def ask(i: int) -> list[int]:
        body = GREEDY | {"prompt": prompts[i], "alpha": ALPHAS[i % 3], "max_tokens": 12 + i}
        if i % 2:
            return [t for e in events(client, "/v1/completions", body) for t in e["choices"][0]["token_ids"]]
        response = client.post("/v1/completions", json=body)
        assert response.json()["usage"]["alpha"] == ALPHAS[i % 3]
        found: list[int] = response.json()["choices"][0]["token_ids"]
        return found

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == expected


def test_32_clients_at_four_budgets(folder: Path) -> None:
    """They arrive at different times and share batches. Every answer is the offline one at its own budget."""
    service = make_service(options(folder, concurrency=32))
    generator = service.engine.generator
    batches: list[list[float | None]] = []
    step = generator._step_together

    def noted() -> None:
        batches.append([sequence.budget for sequence in generator.batch])
        step()

    generator._step_together = noted  # type: ignore[method-assign]
    clients, budgets = range(32), (1.0, 1.25, 1.5, 2.0)
    draw = random.Random(0)
    prompts = [[draw.randrange(256) for _ in range(draw.randint(1, 40))] for _ in clients]
    delays = [draw.uniform(0, 0.1) for _ in clients]
    # The earlier a client arrives, the longer is its answer, so that all of them run at the same time.
    lengths = [44 - sorted(delays).index(delay) for delay in delays]
    together = threading.Barrier(len(clients))

    def ask(i: int) -> tuple[list[int], dict[str, Any]]:
        body = GREEDY | {"prompt": prompts[i], "max_tokens": lengths[i], "budget": budgets[i % 4]}
        together.wait()
        time.sleep(delays[i])
        if i % 8 < 4:
            whole = client.post("/v1/completions", json=body).json()
            return whole["choices"][0]["token_ids"], whole["usage"]
        *pieces, last = events(client, "/v1/completions", body | {"stream_options": {"include_usage": True}})
        return [token for piece in pieces for token in piece["choices"][0]["token_ids"]], last["usage"]

    with running(service) as client, ThreadPoolExecutor(len(clients)) as pool:
        answers = list(pool.map(ask, clients))
        metrics = client.get("/metrics").text
    model = make_model(budget_curve=CURVE)
    different = 0
    for i, (tokens, usage) in enumerate(answers):
        assert usage["budget"] == budgets[i % 4]
        assert tokens == offline(model, prompts[i], 1.0, lengths[i], budget=budgets[i % 4])
        if i < 8:
            different += tokens != offline(model, prompts[i], 1.0, lengths[i], budget=budgets[i % 4 - 1])
    assert different > 3  # otherwise nothing was shown about budgets
    assert max(map(len, batches)) > 16
    assert sum(set(batch) == set(budgets) for batch in batches) > 8
    experts = [[usage["experts_per_token"] for _, usage in answers[i::4]] for i in range(4)]
    assert experts[0] == [1.0] * 8
    assert [fmean(each) for each in experts] == sorted(fmean(each) for each in experts)
    for budget in budgets:
        assert f'grmoe_requests_total{{budget="{budget:g}",outcome=' in metrics


def test_budgets_that_are_refused(client: httpx.Client) -> None:
    for body, message in (
        ({"budget": 4}, "budget must be from 1 to 3 experts per token, the calibrated range, got 4"),
        ({"budget": 1.5, "alpha": 1}, "give alpha or budget, not both"),
    ):
        refused = client.post("/v1/completions", json={"prompt": "x"} | body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "budget")
        assert message in refused.json()["error"]["message"]


def test_a_server_without_a_curve_says_what_to_run(folder: Path, tmp_path: Path) -> None:
    """And one with a default budget uses it; a rule that cannot be mixed with budgets is refused."""
    make_tokenizer().save_pretrained(tmp_path)
    make_model(selection="topk").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Run `grmoe dial` first"):
        make_service(options(tmp_path, alpha=None, budget=1.5))
    service = make_service(options(folder, alpha=None, budget=1.5))
    assert service.numbers()[1] == 1.5
    assert service.numbers()[0] == tuple(service.config.layer_numbers(1.5))
    assert service.numbers(alpha=2.0) == (tuple(LayerNumbers(0.6, 2.0, 2) for _ in range(2)), None)
    make_model(selection="dense", num_experts_per_tok=4, budget_curve=CURVE).save_pretrained(tmp_path)
    dense = make_service(options(tmp_path))
    dense.check_policy(None)
    with pytest.raises(Invalid, match="cannot be served together; start with or without --budget"):
        dense.check_policy(1.5)


def test_a_stream_is_the_whole_in_pieces(client: httpx.Client) -> None:
    body = GREEDY | {"prompt": "héllo", "max_tokens": 40, "alpha": 3}
    whole = client.post("/v1/completions", json=body).json()
    parts = events(client, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert "".join(p["choices"][0]["text"] for p in parts[:-1]) == whole["choices"][0]["text"]
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == whole["usage"]
    assert parts[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert len({p["id"] for p in parts}) == 1
    # Mass selection: a sharper gate computes fewer experts.
    blunt = client.post("/v1/completions", json=body | {"alpha": 0.5}).json()
    assert whole["usage"]["experts_per_token"] < blunt["usage"]["experts_per_token"]


def test_stop_seed_and_default_alpha(client: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 40, "temperature": 1.2, "seed": 7, "top_p": 0.9}
    first, second = (client.post("/v1/completions", json=body).json()["choices"][0] for _ in range(2))
    assert first == second
    other = client.post("/v1/completions", json=body | {"seed": 8}).json()["choices"][0]
    assert other["text"] != first["text"]
    stop = first["text"][10:12]
    cut = client.post("/v1/completions", json=body | {"stop": [stop]}).json()["choices"][0]
    assert cut["text"] == first["text"][: first["text"].find(stop)]
    assert cut["finish_reason"] == "stop"
    assert client.post("/v1/completions", json=body).json()["usage"]["alpha"] == 1.5


def test_chat(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    body = GREEDY | {"messages": messages, "max_tokens": 12}
    whole = client.post("/v1/chat/completions", json=body).json()
    prompt = make_tokenizer()("<user>hi<assistant>").input_ids
    assert whole["choices"][0]["token_ids"] == offline(make_model(), prompt, 1.5, 12)
    parts = events(client, "/v1/chat/completions", body)
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(p["choices"][0]["delta"].get("content", "") for p in parts)
    assert text == whole["choices"][0]["message"]["content"]
    bad = client.post("/v1/chat/completions", json={"messages": [{"role": "bad", "content": ""}]})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "messages")


def test_chat_without_a_template(
    client: httpx.Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "template", None)
    bad = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert bad.status_code == 400
    assert "/v1/completions" in bad.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({"prompt": "x", "alpha": 9}, 400, "alpha", "between 0.5 and 5"),
        ({"prompt": "x", "model": "gpt"}, 404, "model", "small"),
        ({"prompt": ""}, 400, "prompt", "at least one token"),
        ({"prompt": [300]}, 400, "prompt", "between 0 and 256"),
        ({"prompt": [-1]}, 400, "prompt", "between 0 and 256"),
        ({"prompt": "x" * 128}, 400, "prompt", "at most 127"),
        ({"prompt": "x", "max_tokens": 128}, 400, "max_tokens", "at most 127"),
        ({"prompt": "x" * 100, "max_tokens": 100}, 400, "max_tokens", "fit into 128"),
        ({"prompt": "x" * 30_000}, 413, None, "20000 bytes"),
        ({"prompt": "x", "top_k": 4}, 400, "top_k", "unknown field"),
    ],
)
def test_refusals(client: httpx.Client, body: dict[str, Any], status: int, param: str, words: str) -> None:
    response = client.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert client.get("/health").status_code == 200


def test_a_long_body_without_its_length(client: httpx.Client) -> None:
    parts = (b"x" * 1000 for _ in range(100))
    response = client.post("/v1/completions", content=parts, headers={"content-type": "application/json"})
    assert response.status_code == 413


def test_other_routes(client: httpx.Client) -> None:
    about = client.get("/v1/models").json()["data"][0]
    assert about["id"] == "small"
    assert about["budget"] == {"default": None, "low": 1.0, "high": 3.0}
    assert about["alpha"] == {"default": 1.5, "low": 0.5, "high": 5.0}
    assert client.get("/ready").json() == {"status": "ready"}
    assert client.get("/nothing%0ahere").status_code == 404
    assert client.get("/v1/completions").status_code == 405
    client.post("/v1/completions", json={"prompt": "x", "alpha": 4.5, "max_tokens": 3})
    metrics = client.get("/metrics").text
    assert 'grmoe_completion_tokens_total{alpha="4.5"} 3' in metrics
    assert "grmoe_running 0" in metrics


@pytest.mark.parametrize(("budget", "alpha"), [(1.0, 1.0), (2.0, None)], ids=["one α", "one per layer"])
def test_the_default_budget_and_its_alpha(folder: Path, budget: float, alpha: float | None) -> None:
    """At a budget each layer may have its own α. Clients get a number or null; before, they got a list."""
    with running(make_service(options(folder, alpha=None, budget=budget))) as client:
        about = client.get("/v1/models").json()["data"][0]
        assert about["budget"] == {"default": budget, "low": 1.0, "high": 3.0}
        assert about["alpha"] == {"default": alpha, "low": 0.5, "high": 5.0}
        usage = client.post("/v1/completions", json=GREEDY | {"prompt": "x"}).json()["usage"]
        assert (usage["budget"], usage["alpha"]) == (budget, alpha)


def test_a_crowd_too_large_waits_or_is_told_to(folder: Path) -> None:
    service = make_service(options(folder, concurrency=1, queue=1))
    slow_down(service, 0.02)
    with running(service) as client, ThreadPoolExecutor(3) as pool:
        body = GREEDY | {"prompt": "x", "max_tokens": 30}
        first = pool.submit(client.post, "/v1/completions", json=body)
        until(lambda: len(service.engine.running) == 1)
        second = pool.submit(client.post, "/v1/completions", json=body)
        until(lambda: len(service.engine.waiting) == 1)
        third = client.post("/v1/completions", json=body)
        assert third.status_code == 429
        assert third.headers["retry-after"] == "1"
        assert third.json()["error"]["type"] == "rate_limit_error"
        assert first.result().json()["choices"] == second.result().json()["choices"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("waiting", [True, False])
def test_a_client_that_leaves_frees_its_place(folder: Path, stream: bool, waiting: bool) -> None:
    service = make_service(options(folder, concurrency=1))
    slow_down(service, 0.05)
    engine = service.engine
    with running(service) as client, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "x", "max_tokens": 120, "temperature": 0, "stream": stream}
        if waiting:  # behind somebody who takes long
            pool.submit(client.post, "/v1/completions", json=body | {"max_tokens": 20})
            until(lambda: len(engine.running) == 1)
        with httpx.Client(base_url=client.base_url, timeout=0.3) as leaving, suppress(httpx.ReadTimeout):
            if stream and not waiting:
                with leaving.stream("POST", "/v1/completions", json=body) as response:
                    next(response.iter_raw())
            else:
                leaving.post("/v1/completions", json=body | {"stream": stream})
        if waiting:
            until(lambda: len(engine.waiting) == 0, 1.0)
            assert len(engine.running) == 1
        else:
            until(lambda: len(engine.running) == 0, 1.0)  # 120 tokens would take 6 s


@pytest.mark.parametrize("stream", [True, False])
def test_time_runs_out(folder: Path, stream: bool) -> None:
    service = make_service(options(folder, timeout=0.3))
    slow_down(service, 0.05)
    with running(service) as client:
        body = {"prompt": "x", "max_tokens": 120, "temperature": 0, "stream": stream}
        response = client.post("/v1/completions", json=body)
        assert "more than 0.3 s" in response.text
        assert response.status_code == (200 if stream else 504)
        assert "[DONE]" not in response.text
        until(lambda: not service.engine.running, 1.0)


def test_the_key(folder: Path) -> None:
    service = make_service(options(folder, api_key="secret"))
    with running(service) as client:
        for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "secret"}):
            response = client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert response.status_code == 401
            assert "secret" not in response.text
        good = {"authorization": "Bearer secret"}
        assert client.post("/v1/completions", json={"prompt": "x"}, headers=good).status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("graphs", [False, True])
def test_what_cannot_be_computed_fails_alone(folder: Path, graphs: bool) -> None:
    """Out of memory while prompts are read: the others get their answers, also those that were read with it."""
    service = make_service(options(folder, graphs=graphs))
    start = service.engine.generator.start

    def failing(sequences: Any) -> None:
        if [13] in [sequence.prompt for sequence in sequences]:
            raise torch_memory_error()
        start(sequences)

    service.engine.generator.start = failing  # type: ignore[method-assign]
    with running(service) as client, ThreadPoolExecutor(4) as pool:
        asked = [[i] for i in (1, 13, 2, 13)]
        body = GREEDY | {"max_tokens": 20, "alpha": 1.0}
        found = list(pool.map(lambda p: client.post("/v1/completions", json=body | {"prompt": p}), asked))
        assert [r.status_code for r in found] == [200, 500, 200, 500]
        assert "not enough memory" in found[1].json()["error"]["message"]
        assert found[2].json()["choices"][0]["token_ids"] == offline(make_model(), [2], 1.0, 20)


def torch_memory_error() -> RuntimeError:
    return RuntimeError("DefaultCPUAllocator: not enough memory")


def test_closing(folder: Path) -> None:
    """A server that is told to stop takes nothing new, says so, and ends what is left with an error."""
    service = make_service(options(folder))
    slow_down(service, 0.05)
    with ThreadPoolExecutor(1) as pool, running(service) as client:
        body = {"prompt": "x", "max_tokens": 120, "temperature": 0}
        long = pool.submit(client.post, "/v1/completions", json=body)
        until(lambda: len(service.engine.running) == 1)
        service.engine.close("the server is shutting down")
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json=body).status_code == 503
        service.engine.stop()
        assert long.result().status_code == 503
        assert client.get("/health").status_code == 503


@pytest.mark.parametrize("stream", [True, False])
def test_grace_runs_out(folder: Path, stream: bool) -> None:
    """An answer that is not done in time ends with an error of its own, not with a cut connection."""
    service = make_service(options(folder, grace=0.2))
    slow_down(service, 0.05)
    body = {"prompt": "x", "max_tokens": 120, "temperature": 0, "stream": stream}
    with ThreadPoolExecutor(1) as pool:
        with running(service) as client:
            long = pool.submit(httpx.post, f"{client.base_url}/v1/completions", json=body, timeout=30)
            until(lambda: len(service.engine.running) == 1)
            start = time.monotonic()
        assert time.monotonic() - start < 4  # 120 tokens would take 6 s
        assert "shutting down" in long.result().text
        assert long.result().status_code == (200 if stream else 503)
