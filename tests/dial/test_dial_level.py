"""Even loads: the bias, and a dial that uses it."""

from __future__ import annotations

import pytest
import torch

from grmoe.dial import level
from grmoe.dial.level import EVEN, Levels, even_bias
from grmoe.dial.meter import Meter, Point
from grmoe.dial.setting import Setting, apply, k_per_layer, mass, top_k
from grmoe.dial.target import Target
from grmoe.probe.losses import measure
from grmoe.probe.windows import Text
from grmoe.routing.selection import NO_LIMIT, largest
from grmoe.runs.open import LoadedModel

N = 6


def spread(logits_TN: torch.Tensor, tau: float, cap: int) -> float:
    chosen_TN = largest(torch.softmax(logits_TN, -1), torch.tensor(tau), torch.tensor(cap))
    load_N = chosen_TN.double().mean(0)
    return float(load_N.std(correction=0) / load_N.mean())


@pytest.mark.parametrize(("tau", "cap"), [(NO_LIMIT, 1), (NO_LIMIT, 3), (0.5, 3), (0.3, 2)])
def test_the_bias_evens_out_the_load(tau: float, cap: int) -> None:
    torch.manual_seed(0)
    logits_TN = 1.5 * torch.randn(4000, N) + torch.linspace(-1.0, 1.0, N)
    bias_N = even_bias(logits_TN, tau, cap)
    assert spread(logits_TN, tau, cap) > 0.15
    assert 0.02 < spread(logits_TN + bias_N, tau, cap) <= EVEN + 1e-6  # no further than needed
    assert float(bias_N.mean()) == pytest.approx(0.0, abs=1e-6)


def even_bias_reference(logits_TN: torch.Tensor, tau: float, cap: int) -> torch.Tensor:
    """Step by step, looking at the load in each of them."""
    bias_N = best_N = torch.zeros(logits_TN.shape[-1])
    least = torch.inf
    for step in range(level.STEPS):
        load_N = largest(torch.softmax(logits_TN + bias_N, -1), tau, cap).float().mean(0)
        excess_N = len(load_N) * load_N / load_N.sum() - 1
        found = float(excess_N.square().mean().sqrt())
        if found < least:
            least, best_N = found, bias_N
        if found <= EVEN:
            break
        bias_N = bias_N - level.RATE * level.DECAY**step * excess_N
    return best_N - best_N.mean()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tokens", [7, 3000])  # with a few tokens no load is ever even
def test_looking_seldom_changes_nothing(seed: int, tokens: int) -> None:
    torch.manual_seed(seed)
    logits_TN = torch.randn(tokens, N) + seed * torch.linspace(-0.5, 0.5, N)
    for tau, cap in ((NO_LIMIT, 1), (0.5, 3)):
        assert torch.equal(even_bias(logits_TN, tau, cap), even_bias_reference(logits_TN, tau, cap))


def test_a_setting_is_levelled_once(loaded: LoadedModel, text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    levels, setting = Levels(loaded.model, text), top_k((1.0, 1.0), 1)
    first = levels(setting)
    monkeypatch.setattr(level, "even_bias", lambda *_: pytest.fail("levelled again"))
    assert levels(setting) is first


def test_an_even_load_needs_no_bias() -> None:
    logits_TN = torch.eye(N).repeat(50, 1) * 3
    assert not even_bias(logits_TN, NO_LIMIT, 1).any()


def test_a_setting_with_an_even_load_stays(
    loaded: LoadedModel, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(level, "EVEN", 3.0)
    meter, levels = Meter(loaded.model, text), Levels(loaded.model, text)
    chosen = meter.measure(mass((1.0, 1.0), 0.5, 2), "uniform")
    assert levels(chosen.setting) == chosen.setting
    assert levels.within(Target("perplexity", 5.0), meter, chosen) is chosen
    assert len(meter.points) == 2  # nothing was measured again


@pytest.mark.parametrize(
    "setting",
    [
        top_k((1.0, 1.0), 1),
        mass((1.0, 2.0), 0.6, 3),
        k_per_layer((1.0, 1.0), (1, 2)),
        top_k((1.0, 1.0), 1, ((0.3, 5.0, 1.0, 2.0), (1.0, 1.0, 0.2, 3.0))),
    ],
    ids=str,
)
def test_in_a_model(loaded: LoadedModel, text: Text, setting: Setting) -> None:
    model = loaded.model
    for router_layer in model.model.layers:
        if hasattr(router_layer.mlp, "router"):  # an untrained gate is even enough; this one is not
            router_layer.mlp.router.log_prior.copy_(torch.tensor([1.0, 0.0, -1.0, 0.5]))
    levelled = Levels(model, text)(setting)
    assert levelled == Levels(model, text)(levelled)
    apply(model, setting)
    before = measure(model, text)
    apply(model, levelled)
    after = measure(model, text)
    assert before.load_cv > 0.3
    assert after.load_cv < 0.1
    assert after.min_load > 0.7
    if setting.selection == "topk":
        assert after.experts_per_token == before.experts_per_token


def test_other_rules_stay(loaded: LoadedModel, text: Text) -> None:
    for selection in ("dense", "threshold"):
        setting = Setting((1.0, 1.0), selection, 0.3, 4)
        assert Levels(loaded.model, text)(setting) is setting


def test_tau_gives_way_where_an_even_load_would_break_the_target(
    loaded: LoadedModel, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter, levels = Meter(loaded.model, text), Levels(loaded.model, text)
    chosen = meter.measure(mass((1.0, 1.0), 0.5, 2), "uniform")
    fewest = meter.measure(top_k((1.0, 1.0), 1), "top-k")
    allowed: set[float | None] = {0.5}
    monkeypatch.setattr(level, "MAX_COST", 1.0)
    monkeypatch.setattr(level, "meets", lambda _, point, *__: point.setting.tau in allowed)

    def even(kind: str, point: Point = chosen) -> Setting:
        return levels.within(Target(kind, 1.5), meter, point).setting  # type: ignore[arg-type]

    assert even("perplexity") == levels(chosen.setting)
    allowed |= {0.515, 0.485}
    allowed.remove(0.5)
    assert even("perplexity") == levels(mass((1.0, 1.0), 0.515, 2))  # more experts, a lower loss
    assert even("experts") == levels(mass((1.0, 1.0), 0.485, 2))
    allowed.clear()
    allowed.add(0.6)  # a fifth further
    assert even("perplexity") == chosen.setting  # takes 5 % more experts
    monkeypatch.setattr(level, "MAX_MORE", 1.0)
    assert even("perplexity") == levels(mass((1.0, 1.0), 0.6, 2))
    allowed.clear()
    assert even("experts") == chosen.setting
    assert even("throughput") == levels(chosen.setting)  # the same experts per token take the same time
    assert even("experts", fewest) == fewest.setting
    assert even("experts", meter.trained) == meter.trained.setting
    assert levels.measure(meter, chosen).setting == levels(chosen.setting)
    monkeypatch.setattr(level, "MAX_COST", -1.0)  # an even load costs more than that
    assert even("throughput") == chosen.setting
    assert levels.measure(meter, chosen) is chosen
