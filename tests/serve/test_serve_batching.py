"""Answers of a crowd are those of `generate` for each alone: α, near ties, sampling, joining and leaving."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from small_model import CURVE, EOS, make_model, offline

from grmoe.model.choices_grmoe import SLOT_ROUTERS
from grmoe.routing import ROUTERS, LayerNumbers, Routing, build_router
from grmoe.routing.selection import NO_LIMIT, Dense, Mass, Selection, Threshold, TopK
from grmoe.serve.batching import MAX_TIES, BatchGenerator, Sequence, can_batch, set_numbers, why_not_batch
from grmoe.serve.near_ties import MARGIN, USUAL_LOGIT, choosing_gate, clear_experts
from grmoe.serve.sampling import Sampling, TokenSampler

ALPHAS = (0.5, 1.0, 3.0)


@dataclass
class Asked:
    prompt: list[int]
    alpha: float
    tokens: int
    sampling: Sampling
    arrives: int  # at which step
    budget: float | None = None


def crowd(seed: int, count: int, temperatures: tuple[float, ...] = (0.0,)) -> list[Asked]:
    draw = random.Random(seed)
    return [
        Asked(
            [draw.randrange(256) for _ in range(draw.randint(1, 20))],
            draw.choice(ALPHAS),
            draw.randint(1, 24),
            Sampling(draw.choice(temperatures), draw.choice((1.0, 0.8)), draw.randrange(1000)),
            draw.randint(0, 12),
        )
        for _ in range(count)
    ]


def together(generator: BatchGenerator, asked: list[Asked]) -> list[list[int]]:
    """Everybody joins at their step and leaves when done."""
    config = generator.model.config
    sequences: dict[int, Sequence] = {}
    running: list[int] = []
    for step in range(100):
        if running:
            generator.step([sequences[i] for i in running])
        new = []
        for i, ask in enumerate(asked):
            if ask.arrives == step:
                numbers = config.layer_numbers(ask.budget)
                if ask.budget is None:
                    numbers = [n._replace(alpha=ask.alpha) for n in numbers]
                sampler = TokenSampler(ask.sampling)
                sequences[i] = Sequence(prompt=ask.prompt, numbers=tuple(numbers), sampler=sampler)
                new.append(sequences[i])
                running.append(i)
        for group in [new] if new and generator.takes(new) else [[sequence] for sequence in new]:
            generator.start(group)
        running = [
            i
            for i in running
            if len(sequences[i].tokens) < asked[i].tokens and sequences[i].tokens[-1] != EOS
        ]
    return [[t for t in sequences[i].tokens if t != EOS] for i in range(len(asked))]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"selection": "topk", "num_experts_per_tok": 2},
        {"router": "softmax", "router_kappa": None},
        {"router": "vmf"},
        {"router": "hash", "router_kappa": None, "selection": "topk", "num_experts_per_tok": 1},
        {"router": "switch", "router_kappa": None, "selection": "topk", "num_experts_per_tok": 1},
        {"num_key_value_heads": 1, "shared_experts": 1, "identity_experts": 1, "moe_every": 1},
    ],
    ids=["mass", "topk", "softmax", "vmf", "hash", "switch", "all layers, identity"],
)
def test_answers_equal_generate(changes: dict[str, Any]) -> None:
    model = make_model(**changes)
    asked = crowd(1, 9)
    expected = [offline(model, a.prompt, a.alpha, a.tokens) for a in asked]
    generator = BatchGenerator(model, together=can_batch(model))
    assert together(generator, asked) == expected
    assert generator.together == (changes.get("router") != "switch")
    if generator.together and changes.get("router") != "hash":  # otherwise nothing was shown about α
        other = [offline(model, a.prompt, 2.0, a.tokens) for a in asked[:4]]
        assert other != expected[:4]


def test_a_rotary_embedding_that_looks_across_rows_is_not_batched() -> None:
    """Beyond 32 tokens `longrope` has other frequencies: a long answer would change the short ones beside it."""
    rope = {"rope_theta": 1e4, "original_max_position_embeddings": 32}
    long = rope | {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    model = make_model(rope_parameters=long)
    asked = [Asked(list(range(length)), 1.0, 12, Sampling(), 0) for length in (60, 5, 2)]
    expected = [offline(model, a.prompt, a.alpha, a.tokens) for a in asked]
    assert "'longrope'" in why_not_batch(model)
    assert together(BatchGenerator(model, together=can_batch(model)), asked) == expected
    assert together(BatchGenerator(model, together=True), asked) != expected
    assert not can_batch(make_model(rope_parameters=rope | {"rope_type": "dynamic", "factor": 4.0}))
    assert can_batch(make_model(rope_parameters=rope | {"rope_type": "linear", "factor": 4.0}))


def test_four_budgets_at_once_equal_generate() -> None:
    """Budgets below, at and above the trained one, and α among them: each answer is that of its own budget."""
    model = make_model(selection="topk", budget_curve=CURVE)  # mass: see the server's test
    asked = crowd(5, 10)
    for i, ask in enumerate(asked):
        ask.budget = (1.0, 1.4, 2.0, 2.7, None)[i % 5]
    expected = [offline(model, a.prompt, a.alpha, a.tokens, budget=a.budget) for a in asked]
    generator = BatchGenerator(model, together=can_batch(model))
    assert generator.together
    assert together(generator, asked) == expected
    other = [offline(model, a.prompt, a.alpha, a.tokens, budget=3.0) for a in asked[:4]]
    assert other != expected[:4]  # otherwise nothing was shown about budgets


@pytest.mark.parametrize("selection", ["topk", "mass"])
def test_weights_with_an_alpha_of_their_own_are_batched(selection: str) -> None:
    model = make_model(weight_alpha=[1.0, 2.0], selection=selection, budget_curve=CURVE)
    asked = crowd(6, 8)
    for i, ask in enumerate(asked):
        ask.budget = (1.25, None)[i % 2]
    expected = [offline(model, a.prompt, a.alpha, a.tokens, budget=a.budget) for a in asked]
    generator = BatchGenerator(model, together=can_batch(model))
    assert generator.together
    assert together(generator, asked) == expected
    plain = make_model(selection=selection, budget_curve=CURVE)
    other = [offline(plain, a.prompt, a.alpha, a.tokens, budget=a.budget) for a in asked[:4]]
    assert other != expected[:4]  # otherwise nothing was shown about weight_alpha


def test_budgets_with_a_bias_are_batched() -> None:
    bias = [[1.0, -1.0, 0.5, 0.0], [-0.5, 0.5, 1.5, -1.5]]
    model = make_model(budget_curve=[CURVE[0] | {"bias": bias}, *CURVE[1:]])
    asked = crowd(6, 8)
    for i, ask in enumerate(asked):
        ask.budget = (1.0, 1.25, None)[i % 3]
    expected = [offline(model, a.prompt, a.alpha, a.tokens, budget=a.budget) for a in asked]
    generator = BatchGenerator(model, together=can_batch(model))
    assert generator.together
    assert together(generator, asked) == expected
    plain = make_model(budget_curve=CURVE)
    assert [offline(plain, a.prompt, a.alpha, a.tokens, budget=a.budget) for a in asked] != expected


@pytest.mark.parametrize("name", ["grassmann", "softmax", "vmf"])
def test_the_gate_that_chose_follows_from_that_of_the_weights(name: str) -> None:
    torch.manual_seed(0)
    options = {"rank": 4} if name == "grassmann" else {}
    router = build_router(name, 16, 4, selection=TopK(2), **options).eval()
    router.log_prior.uniform_()
    x = torch.randn(3, 5, 16)
    numbers = [LayerNumbers(NO_LIMIT, alpha, 2) for alpha in ALPHAS]
    set_numbers([router], [(n,) for n in numbers])
    chose = router(x).probs
    assert torch.equal(choosing_gate(router, router(x)), chose)
    router.budget.biased = True
    router.budget.set_bias([3.0, -1.0, 0.5, 0.0])
    ranked = choosing_gate(router, router(x))
    assert torch.equal(
        ranked.topk(2).indices.sort().values, router(x).selected.nonzero()[:, -1].view(3, 5, 2)
    )
    assert (ranked - chose).abs().max() > 0.01
    router.budget.biased = False
    router.budget.set_weight_alpha(0.7)
    routing = router(x)
    torch.testing.assert_close(choosing_gate(router, routing), chose, rtol=1e-5, atol=1e-6)
    assert (routing.probs - chose).abs().max() > 0.01
    assert clear_experts(router, routing).all()
    router.budget.set_weight_alpha(0.0)
    assert not clear_experts(router, router(x)).any()  # uniform weights say nothing about the choice
    router.budget.set_weight_alpha(1.0)
    router.alpha_value = torch.tensor(1e-5)
    assert not clear_experts(router, router(x)).any()  # the choice is nearly a tie, the weights are not


def test_a_choice_that_cannot_be_seen_is_computed_alone() -> None:
    likelihood = {"router_options": {"dial": "likelihood"}}
    assert can_batch(make_model(**likelihood))
    assert "weight_alpha with the dial 'likelihood'" in why_not_batch(
        make_model(weight_alpha=1.0, **likelihood)
    )


@pytest.mark.parametrize("batched", [True, False])
def test_sampled_answers_equal_generate(batched: bool) -> None:
    model = make_model()
    asked = crowd(2, 9, temperatures=(0.0, 0.7, 1.3))
    expected = [offline(model, a.prompt, a.alpha, a.tokens, a.sampling) for a in asked]
    assert together(BatchGenerator(model, together=batched), asked) == expected


def test_alone_in_bf16() -> None:
    """In 16 bits every answer is computed by itself, in turns with others."""
    model = make_model()
    torch.nn.Module.to(model, torch.bfloat16)
    asked = crowd(3, 5)
    expected = [offline(model, a.prompt, a.alpha, a.tokens) for a in asked]
    assert together(BatchGenerator(model, together=False), asked) == expected


def test_ties_are_computed_again() -> None:
    """Two tokens with the same row of the head tie to the last bit; a batch may break the tie the other way."""
    model = make_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[128:256] = model.lm_head.weight[:128]
    asked = crowd(4, 7)
    expected = [offline(model, a.prompt, a.alpha, a.tokens) for a in asked]
    generator = BatchGenerator(model, together=True)
    assert together(generator, asked) == expected
    assert generator.recomputed > 0
    # With ties all along a sequence ends up by itself: the effort is bounded.
    assert max(a.tokens for a in asked) > MAX_TIES
    assert generator.recomputed <= MAX_TIES * len(asked)


@pytest.mark.parametrize(
    "name", [n for n in ROUTERS if n not in ("expert_choice", *SLOT_ROUTERS, "hash", "switch")]
)
def test_one_budget_for_each_sequence(name: str) -> None:
    torch.manual_seed(0)
    options = {"rank": 4} if name == "grassmann" else {}
    router = build_router(name, 16, 4, selection=TopK(3), **options).eval()
    x = torch.randn(3, 5, 16)
    numbers = [LayerNumbers(0.5, 0.5, 3), LayerNumbers(NO_LIMIT, 1.0, 2), LayerNumbers(0.25, 4.0, 1)]
    set_numbers([router], [(n,) for n in numbers])
    router.backend = "triton"  # with one number per sequence, the kernel or what replaces it
    mixed = router(x)
    router.backend = "reference"
    for row, n in enumerate(numbers):
        set_numbers([router], [(n,)])
        assert router.alpha_value.ndim == router.budget.tau.ndim == router.budget.cap.ndim == 0
        assert (float(router.budget.tau), router.alpha, router.cap) == n[:3]
        alone = router(x)  # the same shape: not a test of rounding
        for name_ in ("logits", "probs", "weights", "selected"):
            assert torch.equal(getattr(mixed, name_)[row], getattr(alone, name_)[row])


@pytest.mark.parametrize(
    ("selection", "probs", "clear"),
    [
        (TopK(2), [0.4, 0.3, 0.2, 0.1], True),
        (TopK(2), [0.4, 0.25, 0.25 - MARGIN / 2, 0.1], False),
        (TopK(2), [0.35, 0.35, 0.2, 0.1], True),  # a tie among the kept changes nothing
        (Mass(0.7), [0.4, 0.35, 0.15, 0.1], True),
        (Mass(0.75 - MARGIN / 4), [0.4, 0.35, 0.15, 0.1], False),  # one expert more or less
        (Mass(0.7, cap=1), [0.4, 0.4 - MARGIN / 2, 0.1, 0.1], False),
        (Threshold(0.2), [0.4, 0.3, 0.2 + MARGIN / 8, 0.1], False),
        (Threshold(0.2), [0.4, 0.3, 0.25, 0.05], True),
        (Dense(), [0.25, 0.25, 0.25, 0.25], True),
        (TopK(2), [float("nan")] * 4, False),
    ],
)
def test_clear_experts(selection: Selection, probs: list[float], clear: bool) -> None:
    router = build_router("softmax", 8, 4, selection=selection)
    p = torch.tensor([[probs]])
    routing = Routing(logits=p.log(), probs=p, selected=selection(p), weights=p, aux_loss=torch.zeros(()))
    assert clear_experts(router, routing).tolist() == [clear]


def test_large_logits_need_a_wider_margin() -> None:
    """Rounding moves a gate by a share of its logits: of raw tokens they may be hundreds."""
    router = build_router("grassmann", 8, 4, rank=2, scaling="raw", selection=TopK(2))
    p = torch.tensor([[[0.4, 0.25 + 2 * MARGIN, 0.25, 0.1 - 2 * MARGIN]]])
    for shift, clear in ((0.0, True), (USUAL_LOGIT, True), (4 * USUAL_LOGIT, False)):
        routing = Routing(
            logits=p.log() + shift, probs=p, selected=TopK(2)(p), weights=p, aux_loss=torch.zeros(())
        )
        assert clear_experts(router, routing).tolist() == [clear]


def test_a_choice_is_clear_if_it_leads() -> None:
    logits = torch.zeros(8)
    logits[3], logits[5] = 1.0, 1.0 - MARGIN / 2
    assert TokenSampler(Sampling()).choose(logits) == (3, False)
    logits[5] = 0.9
    assert TokenSampler(Sampling()).choose(logits) == (3, True)
    # A token has one draw of noise, however often it is computed; the next token has another.
    sampler = TokenSampler(Sampling(1.0, 1.0, seed=5))
    assert sampler.choose(logits) == sampler.choose(logits)
    before = sampler.noise_V
    sampler.advance()
    sampler.choose(logits)
    assert not torch.equal(before, sampler.noise_V)  # type: ignore[arg-type]


def test_an_edge_of_top_p_that_decides_is_not_clear() -> None:
    probs = torch.tensor([0.5, 0.3, 0.2])
    # top_p keeps {0}, or with a slightly higher edge {0, 1}. Token 1 would be drawn if it were kept.
    sampler = TokenSampler(Sampling(1.0, 0.5, seed=0))
    sampler.noise_V = torch.tensor([1.0, 0.01, 1.0])
    assert sampler.choose(probs.log())[1] is False
    sampler.noise_V = torch.tensor([1.0, 10.0, 1.0])
    assert sampler.choose(probs.log()) == (0, True)
