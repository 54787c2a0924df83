"""Which settings the search of `grmoe dial` measures."""

from __future__ import annotations

import pytest
import torch
from made_up import NotingGates, SmoothMeter, point

from grmoe.dial import search as search_module
from grmoe.dial.meter import RULES
from grmoe.dial.rules import expected_rules
from grmoe.dial.search import (
    Option,
    Sensitivity,
    _bases,
    _prices,
    _top_ks,
    combine,
    expected,
    halfway,
    search,
)
from grmoe.dial.setting import Setting, mass, top_k


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> NotingGates:
    monkeypatch.setattr(search_module, "expert_norms", lambda *_: ((1.0, 2.0, 0.5, 1.0),))
    return NotingGates()


def test_the_grid_has_five_counts_between_one_and_the_cap(gates: NotingGates) -> None:
    meter = SmoothMeter(1)
    assert search(meter, gates, 4) == []  # with one layer there is nothing to set layer by layer
    aims = [1.24, 1.75, 2.35, 2.95, 3.55]
    # Three of them by mass, at every α.
    assert [a for a, _ in gates.tau_asked] == [(a,) for a in (0.5, 1.0, 2.0, 5.0) for _ in range(3)]
    assert [e for _, e in gates.tau_asked] == pytest.approx(4 * aims[::2])
    # All of them by weight, and six between, at the trained α: the curve of budgets is made of them.
    assert {a for a, _ in gates.weight_asked} == {(1.0,)}
    between = [1.09, 1.48, 2.05, 2.65, 3.25, 3.79]
    assert [e for _, e in gates.weight_asked] == pytest.approx(sorted([*aims, *between]))
    families = [p.family for p in meter.points.values()]
    assert [families.count(f) for f in ("trained", "top-k", "uniform", "per layer")] == [1, 4, 23, 0]
    kinds = [s.selection for s, family in meter.asked if family == "uniform"]
    assert kinds == ["mass"] * 12 + ["at_least"] * 11
    assert [families.count(f) for f in ("k per layer", "gate × norm")] == [0, 6]
    assert gates.alpha_asked == []


def test_the_trained_alpha_and_the_target_join_the_grid(gates: NotingGates) -> None:
    meter = SmoothMeter(1, trained=top_k((3.0,), 4))
    search(meter, gates, 4, experts=1.5)
    assert {a for a, _ in gates.tau_asked} == {(0.5,), (1.0,), (2.0,), (5.0,), (3.0,)}
    assert [e for _, e in gates.tau_asked if e == 1.5] == [1.5] * 5
    assert len(gates.tau_asked) == 5 * (3 + 1)
    assert [e for _, e in gates.weight_asked][-1] == 1.5
    assert {a for a, _ in gates.weight_asked} == {(3.0,)}
    top = [s for s, family in meter.asked if family == "top-k"]
    assert top == [top_k((3.0,), k) for k in (1, 2, 3, 4)]
    # A target that no setting between the ends can aim at is left out.
    gates.tau_asked.clear()
    gates.weight_asked.clear()
    for outside in (1.0, 4.0, 5.0):
        search(SmoothMeter(1), gates, 4, experts=outside)
    assert len(gates.tau_asked) == 3 * 4 * 3
    assert len(gates.weight_asked) == 3 * 11


def test_renormalised_weights_are_cut_by_mass(gates: NotingGates) -> None:
    """A weight that is dropped goes to the others there."""
    meter = SmoothMeter(1)
    meter.renormalizes = True  # type: ignore[method-assign, misc]
    search(meter, gates, 4)
    assert gates.weight_asked == []
    assert len(gates.tau_asked) == 4 * 3 + 11
    assert {s.selection for s, _ in meter.asked} == {"mass", "topk"}


@pytest.mark.parametrize("layers", [2, 7])
def test_the_number_announced_is_the_number_measured(
    layers: int, gates: NotingGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly so where no setting comes twice: here the combinations are new."""
    new = iter(range(100, 10_000))
    monkeypatch.setattr(
        search_module, "combine", lambda _, count: [(float(next(new)),) * layers for _ in range(count)]
    )
    meter = SmoothMeter(layers)
    found = search(meter, gates, 4, experts=2.2)
    rules = [p for p in meter.points.values() if p.family in RULES]
    assert len(meter.points) - len(rules) == expected(layers, 4) - expected_rules(layers, 4)
    assert len(rules) <= expected_rules(layers, 4)  # tests/dial/test_dial_rules.py
    assert len(found) == 2
    assert len(gates.alpha_asked) == 2 * layers * 4
    families = [p.family for p in meter.points.values()]
    assert families.count("per layer") == 2 * (4 * layers + 6)


def test_single_layers_are_aimed_from_few_experts_to_nearly_all(gates: NotingGates) -> None:
    meter = SmoothMeter(3)
    for sensitivity in search(meter, gates, 4):
        tau = sensitivity.base.setting.tau
        asked = [(layer, experts) for layer, t, experts in gates.alpha_asked if t == tau]
        assert [layer for layer, _ in asked] == [0] * 4 + [1] * 4 + [2] * 4
        assert [experts for _, experts in asked] == pytest.approx([1.3, 2.2, 3.1, 3.85] * 3)
        # Changes are of the sum over layers, relative to the base.
        for i, options in enumerate(sensitivity.layers):
            assert len(options) == 5
            for option in options[1:]:
                alphas = list(sensitivity.base.setting.alphas)
                alphas[i] = option.alpha
                there = meter.points[mass(tuple(alphas), tau or 0, 4)]
                more = there.experts_per_token - sensitivity.base.experts_per_token
                assert option.experts == pytest.approx(3 * more)
                assert option.loss == pytest.approx(-more)


def test_at_most_eight_top_ks() -> None:
    assert [_top_ks(cap) for cap in (2, 3, 8)] == [[1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert _top_ks(16) == [1, 2, 4, 6, 8, 10, 12, 14, 16]
    assert expected(2, 7) + 1 == expected(2, 8) == expected(2, 9) == expected(2, 64)
    assert expected_rules(2, 7) == expected_rules(2, 64)


def test_two_experts_are_enough_to_choose_from_and_the_first_layer_names_the_alpha(
    gates: NotingGates,
) -> None:
    search(SmoothMeter(2, trained=top_k((3.0, 7.0), 2)), gates, 2)
    assert {a for a, _ in gates.tau_asked} == {(a, a) for a in (0.5, 1.0, 2.0, 5.0, 3.0)}
    assert [a for a, _ in gates.weight_asked] == [
        (3.0, 7.0)
    ] * 11  # the curve, at the trained α of each layer


def test_bases_are_spread_evenly_along_the_uniform_frontier() -> None:
    meter = SmoothMeter(2)

    def bases(count: int, experts: float | None = None) -> list[float]:
        points = [point(1 + i, 10.0 - i) for i in range(count)]
        points += [point(1.5, 99.0), point(0.5, 0.1, "per layer"), point(0.6, 0.1, "top-k")]
        meter.points = {p.setting: p for p in points}
        return [p.experts_per_token for p in _bases(meter, experts)]

    assert bases(8) == [3, 7]
    assert bases(4) == [2, 4]
    assert bases(2) == [1, 2]
    assert bases(1) == [1]
    assert bases(8, experts=5.2) == [5, 6]
    assert bases(8, experts=1.0) == [1, 2]


def random_layers(seed: int) -> list[list[Option]]:
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(4):
        cost, loss = torch.randn(2, 4, generator=generator).tolist()
        layers.append([Option(1.0, 0.0, 0.0)] + [Option(2.0 + i, cost[i], loss[i]) for i in range(4)])
    return layers


@pytest.mark.parametrize("seed", range(4))
def test_every_best_combination_is_found(seed: int) -> None:
    """At any price of an expert: the prices tried leave none out. From few experts to many, or the other way."""
    layers = random_layers(seed)
    base = point(2.0, 1.0, setting=mass((1.0,) * 4, 0.5, 4))
    found = combine(Sensitivity(base, layers), 1000)
    best = {
        tuple(min(options, key=lambda o: o.loss + price * o.experts).alpha for options in layers)
        for price in torch.cat([torch.linspace(1e-3, 5, 2000), torch.logspace(0.7, 4, 200)]).double().tolist()
    }
    assert best - {base.setting.alphas} <= set(found)
    assert base.setting.alphas not in found
    experts = [
        sum(next(o.experts for o in layer if o.alpha == a) for a, layer in zip(alphas, layers, strict=True))
        for alphas in found
    ]
    assert experts == sorted(experts, reverse=True)
    few = combine(Sensitivity(base, layers), 3)
    places = [found.index(alphas) for alphas in few]
    assert places[0] == 0
    gaps = [b - a for a, b in zip(places, [*places[1:], len(found)], strict=True)]
    assert max(gaps) - min(gaps) <= 1
    assert combine(Sensitivity(base, layers), len(found)) == found


def test_the_base_itself_is_not_measured_again() -> None:
    options = [Option(1.0, 0.0, 0.0), Option(2.0, -1.0, 3.0), Option(3.0, 1.0, -0.5)]
    base = point(2.0, 1.0, setting=mass((1.0, 1.0), 0.5, 4))
    # A price of an expert below 0.5 buys more in both layers, one above 3 fewer. Between them the base is best.
    assert combine(Sensitivity(base, [options] * 2), 9) == [(3.0, 3.0), (2.0, 2.0)]


def test_prices_lie_between_the_turns() -> None:
    layers = [[Option(1.0, 0.0, 0.0), Option(2.0, -1.0, 3.0), Option(3.0, 1.0, 1.0)]]
    # The third gives way to the second at 1, the first at 3. The third is never better than the first.
    assert _prices(layers) == [0.5, 2.0, 7.0]
    assert _prices([[Option(1.0, 0.0, 0.0)]]) == [1.0]


def test_the_way_between_is_geometric_in_alpha_and_linear_in_tau() -> None:
    a, b = mass((1.0, 16.0), 0.4, 2), mass((16.0, 1.0), 0.8, 2)
    assert halfway(a, b) == mass((4.0, 4.0), 0.6, 2)
    # Top-1 joins any cap: it is τ = 0.
    assert halfway(top_k((1.0, 16.0), 1), a) == mass((1.0, 16.0), 0.2, 2)
    dense = Setting((1.0, 16.0), "dense", None, 2)
    assert halfway(dense, a) == mass((1.0, 16.0), 0.7, 2)
    assert halfway(a, mass((0.0, 1.0), 0.8, 2)) is None  # no geometric mean with zero
    assert halfway(mass((1.0, 0.0), 0.8, 2), a) is None
    assert halfway(a, mass((1.0, 16.0), 0.4, 3)) is None
