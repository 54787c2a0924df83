"""lm-evaluation-harness as a client of the server: its log-likelihoods and answers are those of the model offline.

It needs the harness with its client: pip install "lm-eval[api]".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from live import running
from small_model import CURVE, EOS, make_model, make_tokenizer, offline, options

from grmoe.serve.server import make_service

pytest.importorskip("lm_eval", reason='pip install "lm-eval[api]"')
for needed in ("tenacity", "aiohttp", "requests"):
    pytest.importorskip(needed, reason='pip install "lm-eval[api]"')

CONTEXT = 128
BUDGET = 1.25
TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with running(make_service(options(folder, alpha=None, budget=BUDGET, max_new_tokens=60))) as client:
        yield str(client.base_url)


def connect(address: str, folder: Path, chat: bool = False, **more: Any) -> Any:
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    if chat:
        return LocalChatCompletion(base_url=f"{address}/v1/chat/completions", model="small", **more)
    more = {"tokenizer": str(folder), "max_length": CONTEXT, "batch_size": 3} | more
    return LocalCompletionsAPI(base_url=f"{address}/v1/completions", model="small", **more)


def instances(kind: str, *arguments: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]  # type: ignore[arg-type]


def log_likelihood(tokens: list[int], context: int) -> tuple[float, bool]:
    """Of tokens[context:], by one forward pass, and whether each of them is the most probable."""
    model = make_model(budget_curve=CURVE)
    model.set_budget(BUDGET)
    with torch.no_grad():
        logp_SV = model(torch.tensor([tokens])).logits[0].log_softmax(-1)[context - 1 : -1]
    wanted = torch.tensor(tokens[context:])
    chosen = logp_SV.gather(1, wanted[:, None])
    return float(chosen.sum()), bool((logp_SV.argmax(-1) == wanted).all())


@pytest.mark.parametrize(
    "more", [{}, {"num_concurrent": 3, "batch_size": 1}], ids=["batches", "side by side"]
)
def test_log_likelihoods_are_those_of_the_model(address: str, folder: Path, more: dict[str, int]) -> None:
    """Also of text that is longer than the context, without a context, and of the model's own greedy answer."""
    model = make_model(budget_curve=CURVE)
    own = TOKENIZER.decode(offline(model, TOKENIZER("import").input_ids, 1.0, 3, budget=BUDGET))
    asked = [("ab", " cd"), ("x" * 200, "yz"), ("", "word"), ("import", own), ("grüße", " 東京")]
    found = connect(address, folder, **more).loglikelihood(instances("loglikelihood", *asked))
    for (context, continuation), (value, greedy) in zip(asked, found, strict=True):
        before, after = TOKENIZER(context).input_ids or [EOS], TOKENIZER(continuation).input_ids
        tokens = (before + after)[-(CONTEXT - 1) :]  # the harness leaves room for one token
        expected, is_greedy = log_likelihood(tokens, len(tokens) - len(after))
        assert value == pytest.approx(expected, abs=1e-4)
        assert greedy == is_greedy
    assert found[3][1]


def test_the_log_likelihood_of_a_long_text(address: str, folder: Path) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    text = "".join(f"def f{i}(): pass\n" for i in range(20))
    client = connect(address, folder)
    (found,) = client.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
    windows = get_rolling_token_windows(TOKENIZER(text).input_ids, EOS, client.max_length - 1, 1)
    parts = [log_likelihood(c + t, len(c))[0] for c, t in map(make_disjoint_window, windows)]
    assert len(parts) == 3
    assert found == pytest.approx(sum(parts), abs=1e-3)


@pytest.mark.parametrize("chat", [False, True])
def test_greedy_answers_are_those_of_the_model(address: str, folder: Path, chat: bool) -> None:
    client, model = connect(address, folder, chat), make_model(budget_curve=CURVE)
    settings = {"until": ["q", "zz"], "max_gen_toks": 20, "temperature": 0.0, "do_sample": False}
    texts = ["import os", "def f(", "x = 1"]
    messages = [[{"role": "user", "content": text}] for text in texts]
    given = [client.apply_chat_template(m) for m in messages] if chat else texts
    found = client.generate_until(instances("generate_until", *((g, settings) for g in given)))
    for text, message, answer in zip(texts, messages, found, strict=True):
        prompt = TOKENIZER.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids = TOKENIZER(str(prompt) if chat else text).input_ids
        whole = TOKENIZER.decode(offline(model, ids, 1.0, 20, budget=BUDGET))
        assert answer == whole.split("q")[0].split("zz")[0]
