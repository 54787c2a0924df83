"""The dial exactly at its limits: a target that is just met, ties, how much text each stage reads, certificates."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_up import a_check

from grmoe.dial import Plan, Target, certify, gates, save, saving, speed
from grmoe.dial.certify import LayerCertificate
from grmoe.dial.frontier import best_within, frontier, gains, top_k_points
from grmoe.dial.gates import Gates
from grmoe.dial.meter import Family, Point
from grmoe.dial.search import _tau
from grmoe.dial.setting import Setting, current, mass, top_k
from grmoe.dial.speed import time_points
from grmoe.dial.tables import check_line
from grmoe.dial.target import _beyond, choose, meets
from grmoe.probe.gates import AffineGate
from grmoe.probe.losses import Measurement, increase
from grmoe.probe.windows import Text


def point(experts: float, loss: float | list[float], family: Family = "uniform", cap: int = 2) -> Point:
    losses = torch.tensor(loss if isinstance(loss, list) else [loss] * 8, dtype=torch.float64)
    measured = Measurement(
        losses_W=losses, layer_experts=(experts,), entropy=1.0, effective_experts_entropy=2.0,
        effective_experts_inverse=2.0,
    )  # fmt: skip
    return Point(mass((experts,), 0.5, cap), family, measured)


def no_speed(_: Point) -> None:
    return None


# ------------------------------------------------------------------------------------------------------ targets


def test_a_target_that_is_met_exactly_is_met() -> None:
    trained = point(2.0, 1.0, "trained")
    assert meets(Target("experts", 1.5), point(1.5, 9.0), trained, no_speed)
    assert not meets(Target("experts", 1.5), point(math.nextafter(1.5, 2), 9.0), trained, no_speed)
    worse = point(1.0, 1.0 + 2**-6)  # the same in every window: no error
    limit = math.expm1(2**-6)
    assert meets(Target("perplexity", limit, 1), worse, trained, no_speed)
    assert not meets(Target("perplexity", math.nextafter(limit, 0), 1), worse, trained, no_speed)
    assert meets(Target("perplexity", 4 * limit, 4), worse, trained, no_speed)
    assert not meets(Target("perplexity", math.nextafter(4 * limit, 0), 4), worse, trained, no_speed)
    assert meets(Target("perplexity", 1e-300), trained, trained, no_speed)
    for value, met in ((1.25, True), (1.2500001, False)):
        assert meets(Target("throughput", value), worse, trained, lambda _: 1.25) is met
    assert not meets(Target("throughput", 1e-9), worse, trained, no_speed)  # not timed


def test_the_upper_end_of_the_interval_counts() -> None:
    trained = point(2.0, [1.0] * 4, "trained")
    noisy = point(1.0, [1.0, 1.1, 1.0, 1.1])
    error = 1.645 * math.sqrt(0.01 / 3) / 2
    high = math.expm1(0.05 + error)
    assert meets(Target("perplexity", high * (1 + 1e-9), 1), noisy, trained, no_speed)
    assert not meets(Target("perplexity", high * (1 - 1e-9), 1), noisy, trained, no_speed)


def test_a_setting_that_breaks_the_promise_on_one_domain_is_not_chosen() -> None:
    domains = ("wiki",) * 24 + ("code",) * 8

    def cost(experts: float, wiki: float, code: float) -> Point:
        found = point(experts, [2.0 + wiki] * 24 + [2.0 + code] * 8)
        return replace(found, measured=replace(found.measured, domains_W=domains))

    trained, few, more = cost(2.0, 0.0, 0.0), cost(1.0, 0.002, 0.012), cost(1.1, 0.001, 0.009)
    target = Target("perplexity", 0.01, 1)
    assert increase(few.measured, trained.measured).high < 0.01  # on average it is kept
    assert choose(target, [trained, few, more], trained, no_speed) is more


def test_ties_are_broken_by_the_other_number() -> None:
    trained = point(2.0, 1.0, "trained")
    same_experts = [point(1.5, 1.3), point(1.5, 1.1), point(1.5, 1.2)]
    assert choose(Target("perplexity", 9.0), [trained, *same_experts], trained, no_speed) is same_experts[1]
    same_loss = [point(1.9, 1.0), point(1.7, 1.0), point(1.8, 1.0)]
    assert choose(Target("experts", 2.0), same_loss, trained, no_speed) is same_loss[1]
    assert frontier([*same_loss, *same_experts]) == [same_experts[1], same_loss[1]]


def test_beyond_the_chosen_point_lie_other_points() -> None:
    best = [point(1 + i / 4, 3.0 - i) for i in range(4)]
    assert _beyond(Target("experts", 2.0), best[1], best) == [best[2], best[3]]
    assert _beyond(Target("perplexity", 2.0), best[2], best) == [best[1], best[0]]  # nearest first


def test_gains_have_paired_errors() -> None:
    base, better = point(1.5, [2.0, 3.0, 4.0, 5.0]), point(1.5, [1.9, 2.7, 3.9, 4.7], "per layer")
    (gain,) = gains([base, better])
    deviation = math.sqrt(4 * 0.01 / 3)  # of 0.1, 0.3, 0.1, 0.3 around 0.2
    assert gain.experts_per_token == 1.5
    assert gain.gain == pytest.approx(0.2)
    assert gain.error == pytest.approx(1.645 * deviation / 2)
    assert best_within([base], 1.5) is base
    assert best_within([base], 1.49) is None


def test_the_trained_setting_is_a_top_k_only_if_it_selects_so() -> None:
    tops = [point(1.0, 2.0, "top-k"), point(2.0, 1.0, "top-k")]
    by_mass = point(1.7, 1.0, "trained")
    by_count = Point(top_k((1.0,), 2), "trained", by_mass.measured)
    assert top_k_points([*tops, by_mass, point(1.5, 1.0)], by_mass) == tops
    assert top_k_points([by_count, *tops], by_count) == [by_count, *tops]


def test_a_check_that_is_met_exactly_is_kept() -> None:
    assert check_line(Target("experts", 1.5), a_check()).endswith(": kept")
    missed = check_line(Target("experts", 1.5), a_check(missed_by=0.001))
    assert missed.endswith(": missed by 0.001 experts per token")


# ------------------------------------------------------------------------------------------------------- settings


def test_settings_in_words_and_in_fields() -> None:
    even, uneven = mass((2.0, 2.0), 0.123456, 3), mass((2.0, 0.33333333), 0.5, 3)
    assert even.tau == 0.1235
    assert uneven.alphas == (2.0, 0.3333)
    assert (even.uniform, uneven.uniform) == (True, False)
    assert even.fields == {
        "alpha": 2.0, "selection": "mass", "selection_tau": 0.1235, "num_experts_per_tok": 3,
    }  # fmt: skip
    assert uneven.fields["alpha"] == [2.0, 0.3333]
    assert top_k((1.5,), 2).fields["alpha"] == 1.5  # a single layer
    assert [str(s) for s in (even, uneven, top_k((1.0,), 2), Setting((1.5,), "dense", None, 4))] == [
        "α 2, mass 0.123, cap 3", "α [2, 0.333], mass 0.5, cap 3", "α 1, top-2", "α 1.5, dense",
    ]  # fmt: skip
    for selection, tau in (("mass", 0.4), ("threshold", 0.4), ("topk", None), ("dense", None)):
        config: Any = SimpleNamespace(
            alphas=[1.0, 2.0], selection=selection, selection_tau=0.4, num_experts_per_tok=3
        )
        assert current(config) == Setting((1.0, 2.0), selection, tau, 3)


def test_the_tau_that_selects_the_same_experts() -> None:
    assert _tau(mass((1.0,), 0.4, 2), 2) == 0.4
    assert _tau(mass((1.0,), 0.4, 2), 3) is None
    assert [_tau(top_k((1.0,), k), 3) for k in (1, 2, 3)] == [0.0, None, 1.0]
    assert _tau(top_k((1.0,), 1), 1) == 1.0
    assert _tau(Setting((1.0,), "dense", None, 3), 3) == 1.0
    assert _tau(Setting((1.0,), "threshold", 0.4, 3), 3) is None


def test_defaults_of_the_dial() -> None:
    plan = Plan(model="m", target=Target("experts", 1.5))
    rest = {name: value for name, value in vars(plan).items() if name not in ("model", "target")}
    assert rest == {
        "text": None, "checks": (), "tokens": None, "length": None, "cap": None, "checkpoint": "best",
        "beside": (), "folder": None, "timed": True,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- gates


def even_gates(cap: int, experts: int = 4) -> Gates:
    """Both layers give every expert exactly 1/experts at every α."""
    made = object.__new__(Gates)
    made.cap = cap
    zero = torch.zeros(3, experts, dtype=torch.float64)
    made.layers = [AffineGate(zero, zero)] * 2
    return made


def test_experts_that_hold_tau_exactly_are_enough() -> None:
    assert [even_gates(4).experts(0, 1.0, tau) for tau in (0.1, 0.25, 0.26, 0.5, 0.75, 0.76, 1.0)] == [
        1, 1, 2, 2, 3, 4, 4,
    ]  # fmt: skip
    assert even_gates(2).experts(0, 1.0, 1.0) == 2


def test_tau_and_alpha_where_every_gate_is_flat() -> None:
    made = even_gates(4)
    # Three experts hold 0.75, so the first τ that needs a fourth lies just above it.
    assert made.tau_for((1.0, 2.0), 4.0) == pytest.approx(0.75, abs=1e-8)
    assert made.experts(0, 1.0, made.tau_for((1.0, 2.0), 4.0)) == 4
    # At τ = 0.75 exactly three are needed: a mean that is met counts as met.
    assert made.tau_for((1.0, 2.0), 3.0) == pytest.approx(0.5, abs=1e-8)
    assert made.alpha_for(1, 0.5, 2.0) == pytest.approx(0.01)  # met at every α: the smallest


def test_how_much_text_each_stage_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    text = Text("t", torch.zeros(5000, 2, dtype=torch.long))  # windows of one token: no rounding

    def note(model: Any, ids: torch.Tensor) -> list[Any]:
        read.append(ids.numel())
        return []

    monkeypatch.setattr(gates, "affine_gates", note)
    monkeypatch.setattr(certify, "layer_inputs", note)
    monkeypatch.setattr(certify, "moe_layers", lambda model: [])
    model: Any = SimpleNamespace(config=SimpleNamespace(moe_layers=[]))
    Gates(model, text, 2)
    assert certify.certify(model, text) == []
    assert read == [2048, 1024]
    sizes: list[int] = []
    monkeypatch.setattr(speed, "Timer", lambda device: None)
    monkeypatch.setattr(speed, "apply", lambda model, setting: None)
    monkeypatch.setattr(speed, "_speed", lambda times, trained, tokens, how: sizes.append(tokens))
    monkeypatch.setattr(speed, "warmed_up", lambda run, device: run)
    for device in ("cpu", "meta"):
        fake: Any = SimpleNamespace(device=torch.device(device), reset_routing_metrics=lambda: None)
        time_points(fake, text, [], point(1.0, 1.0), rounds=0)
    assert sizes == [1024, 1024]
    assert speed.TOKENS == {"cuda": 16384, "cpu": 1024}
    assert speed.ROUNDS == 9


def test_a_model_is_written_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[Any] = []
    stubs: dict[str, Any] = {
        "card_section": lambda result: "section",
        "save_results": lambda loaded, kind, body, out, card, **_: told.append((kind, body, card)) or out / "numbers",
        "draw": lambda result, path: path,
        "model_card": lambda loaded, name, sections: (name, sections),
        "write_model": lambda loaded, folder, card: told.append(card) or folder,
    }  # fmt: skip
    for name, stub in stubs.items():
        monkeypatch.setattr(saving, name, stub)
    result: Any = SimpleNamespace(loaded="loaded", body="body")
    places = {"Numbers": tmp_path / "numbers", "Figure": tmp_path / "pareto.png"}
    assert save(result, tmp_path) == places
    assert told == [("dial", "body", "section")]
    assert save(result, tmp_path, write=True) == places | {"Model": tmp_path / "model"}
    assert told[2:] == [("model", {"dial": "section"})]


# ----------------------------------------------------------------------------------------------------- certificates


class MadeUpLayer:
    """Two tokens, three experts. Every number of the certificate is another one."""

    experts = "experts"
    counted = True

    def __init__(self, exact: list[float], holds: list[bool]) -> None:
        self.exact, self.holds = torch.tensor(exact), torch.tensor(holds)
        self.router = self
        probs = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5]])
        computed = torch.tensor([[True, False, False], [True, True, True]])
        self.routing = SimpleNamespace(logits="logits", probs=probs, computed=computed)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        self.counted = False
        yield
        self.counted = True

    def run(self, x: torch.Tensor) -> tuple[str, Any]:
        assert not self.counted
        return "y", self.routing

    def compute(self, x: torch.Tensor, routing: Any) -> torch.Tensor:
        assert routing is self.routing
        return torch.tensor([[3.0, 4.0], [0.0, 1.0]])

    def truncation(self, x: Any, routing: Any, y: Any, gains: Any = None, exact: bool = False) -> Any:
        assert (routing, y) == (self.routing, "y")
        if exact:
            return SimpleNamespace(bound=self.exact)
        assert gains == "gains of experts"
        return SimpleNamespace(
            bound=torch.tensor([4.0, 12.0]), dropped=torch.tensor([0.5, 0.0]), holds=self.holds
        )


def test_a_certificate_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "output_gains", lambda experts: f"gains of {experts}")
    lower, upper = (SimpleNamespace(bound=torch.tensor(v)) for v in ([0.5, 0.75], [1.0, 2.0]))
    monkeypatch.setattr(certify, "entropy_bounds", lambda logits: SimpleNamespace(lower=lower, upper=upper))
    x_TD = torch.zeros(2, 2)
    layer: Any = MadeUpLayer([0.5, 1.5], [True, True])
    found = certify._certify(layer, 7, x_TD)
    entropy = (math.log(2) + 1.5 * math.log(2)) / 2  # of (½, ½) and of (¼, ¼, ½)
    assert found == LayerCertificate(
        layer=7, tokens=2, experts_per_token=2.0, dropped_mean=0.25, dropped_max=0.5, entropy_lower=0.625,
        entropy=pytest.approx(entropy), entropy_upper=1.5, output=3.0, exact=1.0, bound=8.0, holds=True, looseness=8.0,
    )  # fmt: skip
    nothing: Any = MadeUpLayer([0.0, 0.0], [True, False])
    found = certify._certify(nothing, 7, x_TD)
    assert math.isnan(found.looseness)  # nothing is dropped
    assert not found.holds  # one token without the hypothesis is enough
