"""Generation: a cache changes the time, not the text."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import pipeline

from grmoe.model import GrmoeForCausalLM

Build = Callable[..., GrmoeForCausalLM]
NEW = 8


def continue_greedily(
    model: GrmoeForCausalLM, ids: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The specification: the whole sequence again for every token."""
    mask = torch.ones_like(ids) if mask is None else mask
    for _ in range(NEW):
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=position, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return ids


def continue_by_beams(model: GrmoeForCausalLM, prompt: torch.Tensor, beams: int) -> torch.Tensor:
    """The same: of all continuations of the best texts by one token, the best."""
    texts, score = prompt[None], torch.zeros(1)
    for _ in range(NEW):
        total = score[:, None] + model(texts, use_cache=False).logits[:, -1].log_softmax(-1)
        score, place = total.flatten().topk(beams)
        texts = torch.cat([texts[place // total.shape[1]], place[:, None] % total.shape[1]], 1)
    return texts[0]


@pytest.mark.parametrize("alpha", [0.5, 1.0, 4.0])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"selection": "mass", "num_experts_per_tok": 3, "selection_tau": 0.7},
        {"selection": "dense"},
        {"router": "softmax"},
        {"router": "vmf"},
        {"router": "hash"},
        {"router": "switch", "router_options": {"capacity_factor": 4.0}},  # as many places as tokens
    ],
    ids=lambda c: c.get("router", c.get("selection", "topk")),
)
def test_cached_equals_uncached(
    build: Build, ids: torch.Tensor, alpha: float, changes: dict[str, object]
) -> None:
    model = build(**changes)
    model.set_alpha(alpha)
    expected = continue_greedily(model, ids)
    for cache in ("dynamic", "static"):
        out = model.generate(
            ids, max_new_tokens=NEW, do_sample=False, cache_implementation=cache, pad_token_id=0
        )
        assert torch.equal(out, expected), cache
    assert torch.equal(
        model.generate(ids, max_new_tokens=NEW, do_sample=False, use_cache=False, pad_token_id=0), expected
    )


@pytest.mark.parametrize("alpha", [1.0, 4.0])
def test_beams(build: Build, ids: torch.Tensor, alpha: float) -> None:
    model = build(selection="mass", num_experts_per_tok=3)
    model.set_alpha(alpha)
    options = {"max_new_tokens": NEW, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    expected = torch.stack([continue_by_beams(model, prompt, 3) for prompt in ids])
    for cache in (True, False):
        assert torch.equal(model.generate(ids, **options, use_cache=cache), expected), cache


@pytest.mark.parametrize("alpha", [1.0, 4.0])
def test_left_padding(build: Build, ids: torch.Tensor, alpha: float) -> None:
    """A padded prompt continues as it does alone."""
    model = build()
    model.set_alpha(alpha)
    padded, mask = ids.clone(), torch.ones_like(ids)
    for row, pads in enumerate((0, 3, 5)):
        padded[row, :pads], mask[row, :pads] = 0, 0
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    out = model.generate(padded, attention_mask=mask, **options)
    assert torch.equal(out, continue_greedily(model, padded, mask))
    for row, pads in enumerate((0, 3, 5)):
        alone = model.generate(ids[row : row + 1, pads:], **options)
        assert torch.equal(out[row, 9:], alone[0, 9 - pads :])


@pytest.mark.skipif(find_spec("optimum") is None, reason="a quantised cache needs optimum-quanto")
def test_quantised_cache(build: Build, ids: torch.Tensor) -> None:
    model = build()
    out = model.generate(
        ids,
        max_new_tokens=NEW,
        do_sample=False,
        cache_implementation="quantized",
        cache_config={"backend": "quanto", "nbits": 4, "q_group_size": 8},
        pad_token_id=0,
    )
    assert out.shape == (3, 9 + NEW)


def test_sampling_is_reproducible(build: Build, ids: torch.Tensor) -> None:
    model = build()
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        texts.append(model.generate(ids, max_new_tokens=NEW, do_sample=True, pad_token_id=0))
    assert torch.equal(*texts)


def test_pipeline(saved: tuple[Path, GrmoeForCausalLM]) -> None:
    folder, model = saved
    writer = pipeline("text-generation", model=str(folder))
    (result,) = writer("def main", max_new_tokens=5, do_sample=False)
    ids = writer.tokenizer("def main", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert result["generated_text"] == writer.tokenizer.decode(expected[0], skip_special_tokens=True)
