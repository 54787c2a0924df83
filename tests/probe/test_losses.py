"""Losses, routing figures and comparisons, against plain PyTorch on the model's logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from grmoe import head
from grmoe.probe.losses import (
    Increase,
    Measurement,
    increase,
    increase_by_domain,
    measure,
    verdict,
    window_losses,
    within,
)
from grmoe.probe.routing import recorded, routing_figures
from grmoe.probe.windows import MIN_WINDOWS, Text
from grmoe.routing import Routing, build_router


def measurement(losses: list[float], domains: tuple[str, ...] = ()) -> Measurement:
    return Measurement(
        losses_W=torch.tensor(losses, dtype=torch.float64),
        domains_W=domains,
        layer_experts=(2.0, 1.0),
        entropy=1.0,
        effective_experts_entropy=2.7,
        effective_experts_inverse=2.5,
    )


def random_text(windows: int, length: int, vocabulary: int) -> Text:
    draw = torch.Generator().manual_seed(windows)
    return Text("random", torch.randint(0, vocabulary, (windows, length + 1), generator=draw))


@pytest.mark.parametrize("options", [{}, {"selection": "mass", "selection_tau": 0.6}, {"router": "softmax"}])
def test_losses_are_the_cross_entropy_of_the_logits(make: Any, options: dict[str, Any]) -> None:
    model = make(**options).model
    text = random_text(70, 32, model.config.vocab_size)  # 70 rows: two batches
    assert len(text.batches(model.device)) == 2
    found = measure(model, text)
    model.reset_routing_metrics()
    with torch.no_grad(), recorded(model) as seen:
        logits = model(text.rows_WS[:, :-1]).logits
    want_WS = torch.nn.functional.cross_entropy(
        logits.double().transpose(1, 2), text.rows_WS[:, 1:], reduction="none"
    )
    assert found.losses_W.dtype == torch.float64
    assert torch.allclose(found.losses_W, want_WS.mean(-1), rtol=1e-5)
    assert found.loss == pytest.approx(float(want_WS.mean()), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    # Routing, from what the routers returned.
    experts = [float(routing.selected.sum(-1).double().mean()) for routing in seen]
    gates = [routing.probs.double() for routing in seen]
    entropies = [float(-torch.xlogy(g, g).sum(-1).mean()) for g in gates]
    assert found.layer_experts == pytest.approx(experts)
    assert found.experts_per_token == pytest.approx(sum(experts) / 2)
    assert found.entropy == pytest.approx(sum(entropies) / 2, rel=1e-5)
    assert found.effective_experts_entropy == pytest.approx(sum(map(math.exp, entropies)) / 2, rel=1e-5)
    inverse = [float((1 / g.square().sum(-1)).mean()) for g in gates]
    assert found.effective_experts_inverse == pytest.approx(sum(inverse) / 2, rel=1e-5)


def test_measuring_starts_from_nothing_and_leaves_nothing(make: Any) -> None:
    model = make().model
    text = random_text(8, 16, model.config.vocab_size)
    with torch.no_grad():
        model(torch.randint(0, 300, (4, 32)))  # counts that are not the text's
    first = measure(model, text)
    assert all(router.tokens == 0 for router in model.routing_metrics())
    with torch.no_grad():
        model(text.rows_WS[:, :-1])
    for name, value in vars(routing_figures(model)).items():
        assert getattr(first, name) == pytest.approx(value)
    assert torch.equal(measure(model, text).losses_W, first.losses_W)


def test_starved_experts_are_counted_by_layer_and_by_both_rules() -> None:
    """A flag says that there is one. Where there always is, only their number tells models apart."""
    T, N = 1000, 4
    received = [(1000, 965, 30, 5), (1000, 940, 50, 10), (500, 500, 500, 500), (1000, 1000, 0, 0)]
    routers = [build_router("softmax", 8, N) for _ in received]
    model = nn.ModuleList(routers)
    for router, counts in zip(routers, received, strict=True):
        selected = torch.arange(T).unsqueeze(-1) < torch.tensor(counts)
        probs, zero = torch.full((T, N), 1 / N), torch.zeros(())
        weights = torch.where(selected, probs, 0.0)
        router.counter.add(
            Routing(logits=probs.log(), probs=probs, selected=selected, weights=weights, aux_loss=zero)
        )
    found = routing_figures(model)
    # Of a fair load of 500, exactly a tenth is enough; so is exactly 1 % of the tokens.
    assert found.starved == (2, 1, 0, 2)
    assert found.starved_paper == (1, 0, 0, 2)
    for layer, router in enumerate(routers):
        metrics = router.counter.read()
        assert (found.starved[layer] > 0, found.starved_paper[layer] > 0) == (
            metrics.collapsed,
            metrics.collapsed_paper,
        )
        router.reset_metrics()
    assert routing_figures(model).starved == (0, 0, 0, 0)


def test_a_window_s_loss_does_not_depend_on_the_others(make: Any) -> None:
    model = make().model
    rows_WS = random_text(6, 16, model.config.vocab_size).rows_WS
    with torch.no_grad():
        together = window_losses(model, rows_WS)
        alone = torch.cat([window_losses(model, row[None]) for row in rows_WS])
    assert torch.allclose(together, alone, rtol=1e-5)


def window_losses_reference(model: Any, rows_WS: torch.Tensor) -> torch.Tensor:
    """One window at a time, as its mean."""
    found = []
    for row_S in rows_WS:
        logits_SV = model(row_S[None, :-1]).logits[0].float()
        found.append(torch.nn.functional.cross_entropy(logits_SV, row_S[1:]))
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1, 5, 16, 50, 10**6])  # tokens; a window has 16 of them
def test_parts_of_the_logits_give_the_loss_of_one_window_at_a_time(
    make: Any, monkeypatch: pytest.MonkeyPatch, at_once: int, dtype: torch.dtype
) -> None:
    model = make().model.to(dtype)
    rows_WS = random_text(6, 16, model.config.vocab_size).rows_WS
    most: list[int] = []
    real = head.token_losses_reference

    def note(x_TD: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        most.append(len(x_TD))
        return real(x_TD, *rest)

    monkeypatch.setattr(head, "LOGITS", {"cpu": at_once * model.config.vocab_size + 1})
    monkeypatch.setattr(head, "token_losses_reference", note)
    with torch.no_grad():
        found = window_losses(model, rows_WS)
        wanted = window_losses_reference(model, rows_WS)
    assert max(most) == min(at_once, 96)
    assert sum(most) == 96
    # bf16: the layers round differently in a batch of another size.
    assert torch.allclose(found, wanted.double(), rtol=1e-6 if dtype == torch.float32 else 1e-2)


def test_a_target_that_does_not_count_costs_nothing() -> None:
    g = torch.Generator().manual_seed(0)
    x_TD, weight_VD = torch.randn(7, 8, generator=g), torch.randn(11, 8, generator=g)
    target_T = torch.tensor([3, head.IGNORED, 0, 10, head.IGNORED, 1, 2])
    found = head.token_losses(x_TD.requires_grad_(), weight_VD, target_T)
    assert not found.requires_grad
    log_p_TV = torch.log_softmax(x_TD.detach().double() @ weight_VD.double().T, -1)
    wanted = [-float(row[t]) if t >= 0 else 0.0 for row, t in zip(log_p_TV, target_T, strict=True)]
    assert found.tolist() == pytest.approx(wanted, rel=1e-5)
    assert float(found.sum()) == pytest.approx(
        float(head.next_token_loss_reference(x_TD.detach(), weight_VD, target_T, torch.tensor(1))), rel=1e-6
    )


def test_a_loss_that_is_not_finite_is_refused(make: Any) -> None:
    model = make().model
    text = random_text(8, 16, model.config.vocab_size)
    with torch.no_grad():
        model.lm_head.weight[0] = math.nan
    with pytest.raises(ValueError, match="the loss on random is NaN or Inf"):
        measure(model, text)


losses = st.lists(st.tuples(st.floats(0.1, 8), st.floats(-0.5, 0.5)), min_size=2, max_size=30)


@given(losses)
def test_increase_is_its_formula(pairs: list[tuple[float, float]]) -> None:
    base, measured = [a for a, _ in pairs], [a + d for a, d in pairs]
    found = increase(measurement(measured), measurement(base))
    delta = [m - b for m, b in zip(measured, base, strict=True)]
    n, mean = len(delta), sum(delta) / len(delta)
    error = 1.645 * math.sqrt(sum((d - mean) ** 2 for d in delta) / (n - 1) / n)
    assert found.value == pytest.approx(math.exp(mean) - 1, abs=1e-12)
    assert found.low == pytest.approx(math.exp(mean - error) - 1, abs=1e-9)
    assert found.high == pytest.approx(math.exp(mean + error) - 1, abs=1e-9)
    ratio = measurement(measured).perplexity / measurement(base).perplexity
    assert found.value == pytest.approx(ratio - 1, rel=1e-6, abs=1e-9)


def test_a_paired_band_ignores_how_windows_differ() -> None:
    base = measurement([1.0, 5.0, 2.0, 7.0])
    assert increase(base, base) == Increase(0.0, 0.0, 0.0)
    shifted = increase(measurement([1.1, 5.1, 2.1, 7.1]), base)
    assert shifted.low == pytest.approx(shifted.high)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-0.5, 0.5)), min_size=2, max_size=60))
def test_the_increase_of_a_domain_is_that_of_its_windows(windows: list[tuple[str, float]]) -> None:
    domains = tuple(name for name, _ in windows)
    base = measurement([2.0] * len(windows), domains)
    found = increase_by_domain(measurement([2.0 + d for _, d in windows], domains), base)
    losses = {name: [2.0 + d for other, d in windows if other == name] for name in dict.fromkeys(domains)}
    enough = {name: values for name, values in losses.items() if len(values) >= MIN_WINDOWS}
    assert list(found) == list(enough)
    for name, values in enough.items():
        alone = increase(measurement(values), measurement([2.0] * len(values)))
        assert (found[name].value, found[name].high) == pytest.approx((alone.value, alone.high))


def test_a_promise_holds_on_the_whole_text_and_on_each_domain() -> None:
    whole, exact = Increase(0.005, 0.002, 0.01), Increase(0.01, -0.02, 0.05)
    assert within(0.01, whole, {})
    assert within(0.01, whole, {"code": exact})  # of a domain the increase counts, not its upper end
    assert not within(0.01, whole, {"wiki": whole, "code": Increase(0.0101, 0.0, 0.02)})
    assert not within(0.0099, whole, {})
    assert within(0.02, whole, {"code": exact}, margin=2)  # a domain needs no margin
    assert not within(0.02, whole, {}, margin=2.01)
    assert not within(0.02, whole, {"code": Increase(0.021, 0.0, 0.03)}, margin=1)


@pytest.mark.parametrize(
    ("grown", "said"),
    [
        (Increase(0.005, 0.0, 0.009), "kept"),
        (Increase(0.01, 0.0, 0.01), "kept"),
        (Increase(0.005, 0.0, 0.02), "kept, but the interval reaches past the limit"),
        (Increase(0.02, 0.015, 0.03), "missed by 1.00 points"),
        (Increase(0.02, 0.005, 0.03), "missed by 1.00 points, within its noise"),
    ],
)
def test_verdicts(grown: Increase, said: str) -> None:
    assert verdict(grown, 0.01) == said
