"""Predicted gates, the meter and the speed, each on its own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_up import measured, point
from torch._dynamo.testing import CompileCounter

from grmoe.dial import meter as meter_module
from grmoe.dial import speed as speed_module
from grmoe.dial.gates import Gates
from grmoe.dial.meter import Meter
from grmoe.dial.setting import Setting, apply, k_per_layer, mass, top_k
from grmoe.dial.speed import _compiled, _shared, _speed, put, time_points
from grmoe.probe.gates import AffineGate
from grmoe.probe.losses import Measurement
from grmoe.probe.routing import layer_inputs
from grmoe.probe.timing import Times
from grmoe.probe.windows import Text
from grmoe.routing import Dense, TopK, routers
from grmoe.runs.open import LoadedModel


def made_up_gates(cap: int) -> Gates:
    generator = torch.Generator().manual_seed(0)
    gates = object.__new__(Gates)
    gates.cap = cap
    a, b = torch.randn(2, 2, 300, 6, generator=generator, dtype=torch.float64)
    gates.layers = [AffineGate(0.1 * a[i], b[i]) for i in range(2)]
    return gates


@pytest.mark.parametrize("cap", [2, 4, 6])
def test_predicted_experts_against_a_loop(cap: int) -> None:
    gates = made_up_gates(cap)
    for layer, alpha, tau in ((0, 1.0, 0.5), (1, 3.0, 0.9), (0, 0.2, 0.95)):
        count = 0
        gate = gates.layers[layer]
        for row in torch.softmax(gate.a_TN + alpha * gate.b_TN, -1).tolist():
            held, used = 0.0, 0
            for p in sorted(row, reverse=True):
                if used < cap and (used == 0 or held < tau):
                    held, used = held + p, used + 1
            count += used
        assert gates.experts(layer, alpha, tau) == pytest.approx(count / 300, abs=1e-12)


def test_the_bisections_end_at_the_edge() -> None:
    gates = made_up_gates(4)

    def mean(tau: float) -> float:
        return (gates.experts(0, 1.0, tau) + gates.experts(1, 2.0, tau)) / 2

    for aim in (1.3, 2.5, 3.6):
        tau = gates.tau_for((1.0, 2.0), aim)
        assert mean(tau) >= aim - 1e-12 > mean(tau - 1e-8)
        alpha = gates.alpha_for(1, 0.8, aim)
        assert gates.experts(1, alpha, 0.8) <= aim < gates.experts(1, alpha * (1 - 1e-6), 0.8)
    assert gates.tau_for((1.0, 2.0), 9.0) == pytest.approx(1.0)  # out of reach: all there are
    assert gates.alpha_for(0, 1e-9, 1.0) == pytest.approx(0.01)  # the ends of the range of α
    assert gates.alpha_for(0, 1.0, 0.5) == pytest.approx(100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_answers_are_those_of_a_bisection_on_the_host(dtype: torch.dtype) -> None:
    gates = made_up_gates(4)
    gates.layers = [AffineGate(g.a_TN.to(dtype), g.b_TN.to(dtype)) for g in gates.layers]
    alphas = (0.7, 2.0)

    def bisect(
        low: float, high: float, middle: Callable[[float, float], float], up: Callable[[float], bool]
    ) -> float:
        for _ in range(30):
            at = middle(low, high)
            low, high = (at, high) if up(at) else (low, at)
        return high

    for aim in torch.linspace(1.05, 3.9, 12).tolist():

        def few(tau: float, aim: float = aim) -> bool:
            return sum(gates.experts(i, a, tau) for i, a in enumerate(alphas)) / 2 < aim

        def many(alpha: float, aim: float = aim) -> bool:
            return gates.experts(1, alpha, 0.8) > aim

        tau = bisect(0.0, 1.0, lambda a, b: (a + b) / 2, few)
        assert gates.tau_for(alphas, aim) == pytest.approx(tau, abs=2e-7)
        alpha = bisect(1e-2, 1e2, lambda a, b: (a * b) ** 0.5, many)
        assert gates.alpha_for(1, 0.8, aim) == pytest.approx(alpha, rel=1e-6)


def test_a_meter_measures_each_setting_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    applied: list[Setting] = []
    start = top_k((1.0, 1.0), 2)
    monkeypatch.setattr(meter_module, "apply", lambda model, setting: applied.append(setting))
    monkeypatch.setattr(meter_module, "current", lambda config: start)
    monkeypatch.setattr(meter_module, "measure", lambda model, text: measured(1.5, 2.5))
    meter = Meter(SimpleNamespace(config=None), None, said.append)  # type: ignore[arg-type]
    assert meter.layers == 2
    assert meter.measure(start, "top-k") is meter.trained  # with the family it had first
    other = mass((1.0, 2.0), 0.5, 2)
    first = meter.measure(other, "per layer")
    assert meter.measure(other, "uniform") is first
    assert (first.family, first.experts_per_token, first.loss) == ("per layer", 1.5, 2.5)
    assert applied == [start, other]
    assert said == ["trained", "one α per layer"]

    def fail(model: object, text: object) -> Measurement:
        raise ValueError("the loss is NaN")

    monkeypatch.setattr(meter_module, "measure", fail)
    with pytest.raises(ValueError, match=r"the loss is NaN \(α 7, top-2\)"):
        meter.measure(top_k((7.0, 7.0), 2), "top-k")
    assert len(meter.points) == 2


def test_speed_is_tokens_over_the_median_time() -> None:
    own, trained = Times([[2.0], [4.0], [10.0]]), Times([[6.0], [4.0], [40.0]])
    speed = _speed(own, trained, 500)
    assert speed.tokens_per_second == pytest.approx(500 / 4.0 * 1000)
    # The middle 80 % of 2, 4, 10 ms: 2.4 to 8.8.
    assert speed.interval == pytest.approx((500 / 8.8 * 1e3, 500 / 2.4 * 1e3))
    # Ratios by round are 3, 1 and 4. The ratio of medians would be 1.5.
    assert speed.relative == pytest.approx(3.0)
    assert speed.relative_interval == pytest.approx((1.4, 3.8))
    turns = _speed(Times([[1.0, 2.0, 9.0]]), Times([[8.0, 3.0, 4.0]]), 10)
    assert turns.relative == pytest.approx(2.0)  # medians within a round


def test_settings_take_turns_and_each_is_timed_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, fast, slow = (point(e, 1.0, setting=top_k((1.0,), k)) for e, k in ((2, 2), (1, 1), (3, 3)))
    applied: list[int] = []
    warmed: list[int] = []
    turns: list[tuple[int, int]] = []
    batches: list[tuple[int, ...]] = []
    said: list[str] = []

    class Model:
        device = torch.device("cpu")
        resets = 0

        def __call__(self, input_ids: torch.Tensor, **options: Any) -> None:
            batches.append(tuple(input_ids.shape))
            assert options == {"use_cache": False, "logits_to_keep": 1}

        def reset_routing_metrics(self) -> None:
            self.resets += 1

    class FakeTimer:
        host_ms = None

        def __init__(self, device: torch.device) -> None: ...

        def turn(self, run: Callable[[], object], host_ms: float) -> list[float]:
            run()
            turns.append((applied[-1], len(said)))
            return [float(applied[-1])]

    def warm(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
        warmed.append(applied[-1])
        return run

    monkeypatch.setattr(speed_module, "apply", lambda model, setting: applied.append(setting.cap))
    monkeypatch.setattr(speed_module, "Timer", FakeTimer)
    monkeypatch.setattr(speed_module, "warmed_up", warm)
    model: Any = Model()
    text = Text("t", torch.zeros(100, 33, dtype=torch.long))
    found = time_points(model, text, [fast, trained, slow, fast], trained, rounds=3, step=said.append)
    assert warmed == [2, 1, 3]  # the trained setting first, each of them once
    assert turns == [(k, round) for round in (1, 2, 3) for k in (2, 1, 3)]
    assert said == ["speed"] * 4
    assert set(batches) == {(32, 32)}  # 1024 tokens
    assert model.resets == 1
    assert {p.setting.cap: s.relative for p, s in found.items()} == {2: 1.0, 1: 2.0, 3: pytest.approx(2 / 3)}
    assert found[fast].tokens_per_second == pytest.approx(1024 / 1.0 * 1e3)


SHARED = [
    top_k((1.0, 1.0), 2), top_k((1.0, 1.0), 1), mass((1.0, 3.0), 0.4, 2), k_per_layer((1.0, 1.0), (1, 2)),
    mass((0.5, 0.5), 0.9, 3), top_k((2.0, 2.0), 3),
]  # fmt: skip
RANKED = mass((1.0, 1.0), 0.5, 2, ((1.0, 2.0, 0.5, 1.0),) * 2)


def test_settings_share_one_compiled_model_and_compute_what_they_compute_alone(
    loaded: LoadedModel, text: Text
) -> None:
    """With room for the largest. In a graph, then, nothing is fixed that differs."""
    torch.compiler.reset()
    model = loaded.model
    router = routers(model)[1].eval()
    x = layer_inputs(model, text.some(64).inputs_WS)[1]
    counter = CompileCounter()
    compiled = torch.compile(router, backend=counter, fullgraph=True)
    places = [router.budget.tau.data_ptr() for router in routers(model)]
    with torch.no_grad():
        for setting in (*SHARED, *reversed(SHARED)):
            apply(model, setting)
            alone = router(x)
            put(model, setting, 3)
            assert {r.selection for r in routers(model)} == {TopK(3)}
            together = compiled(x)
            assert torch.equal(together.selected, alone.selected)
            torch.testing.assert_close(together.weights, alone.weights)
        assert counter.frame_count == 1
        assert len({_shared(setting) for setting in SHARED}) == 1
        put(model, RANKED, 3)
        compiled(x)
        assert counter.frame_count == 2  # gate × norm has a gate of its own
    assert _shared(RANKED) != _shared(SHARED[0])
    assert [router.budget.tau.data_ptr() for router in routers(model)] == places  # filled in place
    dense = Setting((1.0, 1.0), "dense", None, 4)
    assert _shared(dense) not in {_shared(SHARED[0]), _shared(Setting((1.0, 1.0), "threshold", 0.2, 4))}
    put(model, dense, 3)
    assert {r.selection for r in routers(model)} == {Dense()}


def test_a_model_that_does_not_compile_is_timed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        def call(**_: Any) -> None:
            raise RuntimeError("no compiler found\nmore")

        return call

    model: Any = SimpleNamespace()
    monkeypatch.setattr(torch, "compile", broken)
    with pytest.warns(
        UserWarning, match="speed is that of the eager model, it does not compile: no compiler found$"
    ):
        assert _compiled(model, torch.zeros(1, 1)) == (model, "eager, CUDA graph")
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: lambda **_: None)
    assert _compiled(model, torch.zeros(1, 1))[1] == "compiled, CUDA graph"
