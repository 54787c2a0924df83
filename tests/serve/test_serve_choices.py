"""Several prompts, `n`, log-probabilities and `echo`: each answer is the one it would be alone, and its
log-probabilities are those of the model offline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from live import events, running, slow_down, until
from small_model import CURVE, EOS, make_model, make_tokenizer, offline, options

from grmoe.model import GrmoeForCausalLM
from grmoe.serve.sampling import Sampling
from grmoe.serve.scores import Score, ScoreWriter, TokenTexts
from grmoe.serve.server import make_service
from grmoe.serve.service import Service

PROMPTS = [[1, 2, 3], [200] * 9, list(range(30, 50))]
GREEDY = {"temperature": 0, "return_token_ids": True}
TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def service(folder: Path) -> Service:
    return make_service(options(folder, max_choices=12, max_new_tokens=60, max_prompt=90))


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    with running(service) as found:
        yield found


def ask(client: httpx.Client, chat: bool = False, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def logprobs(model: GrmoeForCausalLM, ids: list[int]) -> torch.Tensor:
    """Row i: log-probabilities of token i + 1, by one forward pass of the model."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("setting", [{"alpha": 3.0}, {"budget": 2.0}], ids=["alpha", "budget"])
def test_logprobs_equal_the_offline_model(client: httpx.Client, setting: dict[str, float]) -> None:
    """Of prompts and answers, in one batch, with alternatives."""
    model = make_model(budget_curve=CURVE)
    model.set_alpha(3.0) if "alpha" in setting else model.set_budget(2.0)
    found = ask(client, prompt=PROMPTS, max_tokens=5, echo=True, logprobs=2, **GREEDY, **setting)
    for prompt, choice in zip(PROMPTS, found["choices"], strict=True):
        ids = prompt + choice["token_ids"]
        assert choice["text"] == TOKENIZER.decode(ids)
        given = choice["logprobs"]
        expected = logprobs(model, ids)
        own = expected[torch.arange(len(ids) - 1), ids[1:]]
        assert given["token_logprobs"][0] is given["top_logprobs"][0] is None
        assert given["token_logprobs"][1 : len(ids)] == pytest.approx(own.tolist(), abs=1e-4)
        assert given["tokens"][: len(ids)] == [TOKENIZER.decode([token]) for token in ids]
        for i, top in enumerate(given["top_logprobs"][1 : len(ids)]):
            assert max(top.values()) == pytest.approx(expected[i].max().item(), abs=1e-4)
            assert given["token_logprobs"][i + 1] in top.values()
    other = ask(client, prompt=PROMPTS, max_tokens=5, echo=True, logprobs=0, **GREEDY)
    assert (
        other["choices"][0]["logprobs"]["token_logprobs"] != found["choices"][0]["logprobs"]["token_logprobs"]
    )
    assert found["usage"]["budget"] == setting.get("budget")


def test_an_evaluation_client_gets_its_sums(
    client: httpx.Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-evaluation-harness sends token ids with echo and leaves out the last entry, which is the answer's: so the
    end of text must have one too."""
    model = make_model()
    model.set_alpha(1.5)
    body = {"prompt": PROMPTS, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    for ends in (service.engine.ends, set(range(EOS + 1))):
        monkeypatch.setattr(service.engine, "ends", ends)
        for prompt, choice in zip(PROMPTS, ask(client, **body)["choices"], strict=True):
            context = 2
            given = choice["logprobs"]["token_logprobs"]
            assert len(given) == len(choice["logprobs"]["top_logprobs"]) == len(prompt) + 1
            expected = logprobs(model, prompt)[
                torch.arange(context - 1, len(prompt) - 1), prompt[context:]
            ].sum()
            assert sum(given[context:-1]) == pytest.approx(float(expected), abs=1e-4)
    alone = ask(client, **body | {"max_tokens": 0})
    assert [choice["text"] for choice in alone["choices"]] == [TOKENIZER.decode(prompt) for prompt in PROMPTS]
    assert alone["usage"]["completion_tokens"] == 0
    assert alone["usage"]["experts_per_token"] >= 1
    lengths = [len(choice["logprobs"]["tokens"]) for choice in alone["choices"]]
    assert lengths == [len(prompt) for prompt in PROMPTS]


def test_n_answers_of_several_prompts(client: httpx.Client) -> None:
    """Answer k of a prompt is the one with the seed plus k, alone. A prompt counts once."""
    texts = ["ab", "xyz"]
    body = {"max_tokens": 9, "temperature": 1.1, "budget": 1.5, "return_token_ids": True}
    found = ask(client, prompt=texts, n=3, seed=40, **body)
    model = make_model(budget_curve=CURVE)
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    for index, choice in enumerate(found["choices"]):
        sampling = Sampling(1.1, 1.0, 40 + index % 3)
        prompt = TOKENIZER(texts[index // 3]).input_ids
        assert choice["token_ids"] == offline(model, prompt, 1.0, 9, sampling, budget=1.5)
    assert len({choice["text"] for choice in found["choices"]}) > 3
    assert found["usage"]["prompt_tokens"] == 5
    assert found["usage"]["total_tokens"] == 5 + found["usage"]["completion_tokens"]


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_of_several_answers_is_the_whole_in_pieces(client: httpx.Client, chat: bool) -> None:
    body: dict[str, Any] = {"n": 2, "seed": 3, "max_tokens": 12, "return_token_ids": True}
    body |= {"stop": ["q"]}
    if chat:
        body |= {"messages": [{"role": "user", "content": "hé"}], "logprobs": True, "top_logprobs": 2}
    else:
        body |= {"prompt": ["añ€", "b"], "echo": True, "logprobs": 2}
    whole = ask(client, chat, **body)
    asked = body | {"stream_options": {"include_usage": True}}
    parts = events(client, "/v1/chat/completions" if chat else "/v1/completions", asked)
    assert parts[-1]["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        mine = [c for part in parts for c in part["choices"] if c["index"] == index]
        scores = [c["logprobs"] for c in mine if c["logprobs"] is not None]
        if chat:
            text, joined = choice["message"]["content"], [c["delta"].get("content", "") for c in mine]
            assert [entry for each in scores for entry in each["content"]] == choice["logprobs"]["content"]
        else:
            text, joined = choice["text"], [c["text"] for c in mine]
            for kind, values in choice["logprobs"].items():
                assert [value for each in scores for value in each[kind]] == values
        assert "".join(joined) == text
        assert [token for c in mine for token in c["token_ids"]] == choice["token_ids"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]


def test_logprobs_of_a_chat(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    found = ask(client, True, messages=messages, max_tokens=6, logprobs=True, top_logprobs=3, **GREEDY)
    [choice] = found["choices"]
    model = make_model()
    model.set_alpha(1.5)
    prompt = TOKENIZER("<user>hi<assistant>").input_ids
    expected = logprobs(model, prompt + choice["token_ids"])[len(prompt) - 1 :]
    for row, entry in zip(expected, choice["logprobs"]["content"], strict=False):
        best = row.topk(3)
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(
            best.values.tolist(), abs=1e-4
        )
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]  # greedy
        assert entry["bytes"] is None or bytes(entry["bytes"]).decode() == entry["token"]
    plain = ask(client, True, messages=messages, max_tokens=6, logprobs=False, **GREEDY)
    assert plain["choices"][0]["logprobs"] is None


def test_no_alternatives_are_still_logprobs(client: httpx.Client) -> None:
    """`logprobs: 0` was taken for "none": the answer came without them, and without a word."""
    [choice] = ask(client, prompt="abc", max_tokens=3, logprobs=0, **GREEDY)["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == 3
    [choice] = ask(client, prompt="abc", max_tokens=3, **GREEDY)["choices"]
    assert choice["logprobs"] is None


@pytest.mark.parametrize("first", ["añ€𝄞b", "plain", ""])
def test_text_offsets(first: str) -> None:
    """Where each token begins in the text, also if a character has several tokens; piece by piece or at once."""
    tokens = [*TOKENIZER(first + "ñx").input_ids, EOS]
    text, starts, at = first + "ñx", [], 0
    for character in text:
        starts += [at] * len(character.encode())
        at += 1
    starts.append(at)  # the end of text has none
    scores = [Score(token, -1.0, []) for token in tokens]
    texts = TokenTexts(TOKENIZER)
    assert ScoreWriter(texts, chat=False).add(scores)["text_offset"] == starts
    writer = ScoreWriter(texts, chat=False)
    pieces = [writer.add(scores[:3]), *(writer.add([score]) for score in scores[3:])]
    assert [offset for piece in pieces for offset in piece["text_offset"]] == starts


class ByteTexts(TokenTexts):
    """Texts of tokens that are bytes of UTF-8, some of them the end of one character and the start of the next."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces, self.special = pieces, frozenset()

    def alone(self, token: int) -> str:
        return self.together([token])

    def together(self, tokens: list[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")


@pytest.mark.parametrize(
    ("pieces", "starts"),
    [
        ([b"a ", b"\xe6\x97", b"\xa5\xe6", b"\x9c\xac", b"\xe8", b"\xaa\x9e b"], [0, 2, 2, 3, 4, 4, 7]),
        # No token of five ends a character: \xa5\xe6 ends one and begins the next.
        (
            [b"\xe6", b"\x97", b"\xa5\xe6", b"\x9c", b"\xac\xe8", b"\xaa", b"\x9e", b"c"],
            [0, 0, 0, 1, 1, 2, 2, 3, 4],
        ),
        (
            [b"\xf0", b"\xf0", b"\xf0", b"\xf0", b"ab", b"c"],
            [0, 0, 0, 0, 4, 6, 7],
        ),  # bytes that are no character
    ],
)
def test_text_offsets_of_tokens_that_cross_characters(pieces: list[bytes], starts: list[int]) -> None:
    """The last number is where a next token would begin: the length of the text."""
    writer = ScoreWriter(ByteTexts(pieces), chat=False)
    scores = [Score(token, -1.0, []) for token in range(len(pieces))]
    assert [*writer.add(scores)["text_offset"], writer.offset] == starts


def test_a_prompt_that_fills_the_context_is_scored(folder: Path) -> None:
    model = make_model()
    prompt = [5] * model.config.max_position_embeddings
    with running(make_service(options(folder))) as client:
        [choice] = ask(client, prompt=prompt, max_tokens=0, echo=True, logprobs=0)["choices"]
        assert len(choice["logprobs"]["tokens"]) == len(prompt)
        response = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        assert f"at most {len(prompt) - 1} tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": ["a"] * 13}, "prompt", "at most 12, got 13 prompts"),
        ({"prompt": ["a"] * 4, "n": 4}, "n", "at most 12, got 4 prompts with n = 4"),
        ({"prompt": "a", "n": 10**9}, "n", "at most 12"),
        ({"prompt": ["a", ""]}, "prompt", "at least one token"),
        ({"prompt": [[1], [2, 257]]}, "prompt", "between 0 and 256, got 257"),
        ({"prompt": ["a", "x" * 91]}, "prompt", "at most 90 tokens, got 91"),
        ({"prompt": "a", "max_tokens": 61}, "max_tokens", "at most 60, got 61"),
        ({"prompt": "a", "max_completion_tokens": 61}, "max_tokens", "at most 60, got 61"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "0 is allowed with echo only"),
        ({"prompt": "a", "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "give one"),
    ],
)  # fmt: skip
def test_limits(client: httpx.Client, body: dict[str, Any], param: str, words: str) -> None:
    response = client.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]


def test_one_limit_by_two_names(client: httpx.Client) -> None:
    """`max_tokens` and `max_completion_tokens`, in completions and in chats."""
    messages = [{"role": "user", "content": "hi"}]
    limits = {"max_tokens": 2}, {"max_completion_tokens": 2}, {"max_tokens": 2, "max_completion_tokens": 2}
    for chat, body in ((False, {"prompt": "abc"}), (True, {"messages": messages})):
        for limit in limits:
            assert ask(client, chat, **body, **limit, **GREEDY)["usage"]["completion_tokens"] == 2


def test_too_many_logprobs(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small body can ask for a large answer."""
    from grmoe.serve.errors import Invalid
    from grmoe.serve.requests import CompletionRequest, parse

    monkeypatch.setattr("grmoe.serve.service.MAX_ENTRIES", 100)
    body = b'{"prompt": [[1, 2, 3, 4, 5], [6]], "echo": true, "logprobs": 3, "max_tokens": %d}'

    async def jobs(tokens: int) -> int:
        request = parse(body % tokens, CompletionRequest)
        return len(await service.completion_jobs(request, asyncio.Queue()))

    assert asyncio.run(jobs(9)) == 2  # 4 · (5 + 9 + 1 + 9) = 96
    with pytest.raises(Invalid, match="at most 100 numbers per request, got 104"):
        asyncio.run(jobs(10))


def test_many_prompts_leave_room_for_others(folder: Path) -> None:
    """A request that comes later is not behind all prompts of one that came before. The queue counts requests."""
    service = make_service(options(folder, concurrency=2, queue=1))
    slow_down(service, 0.01)
    with running(service) as client, ThreadPoolExecutor(2) as pool:
        body = GREEDY | {"max_tokens": 8}
        many = pool.submit(ask, client, prompt=[[i] for i in range(1, 6)], **body)
        until(lambda: len(service.engine.running) == 2)
        assert len(ask(client, prompt=[5], **body)["choices"]) == 1
        assert not many.done()
        assert [c["token_ids"] for c in many.result()["choices"]] == [
            offline(make_model(), [i], 1.5, 8) for i in range(1, 6)
        ]
