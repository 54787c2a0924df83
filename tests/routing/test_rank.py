"""Experts chosen by gate × mean output norm, and weighted by the gate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grmoe.routing import GrassmannRouter, Mass, Selection, SoftmaxRouter, TopK, fused
from grmoe.routing.budget import Budget
from grmoe.routing.selection import NO_LIMIT

D, N = 16, 6
NORMS = [0.3, 5.0, 1.0, 2.0, 0.1, 1.0]


def make(selection: Selection, norms: list[float] | None = NORMS, by_norm: bool = True) -> GrassmannRouter:
    router = GrassmannRouter(D, N, 4, selection=selection, generator=torch.Generator().manual_seed(0))
    router.backend = "reference"
    router.budget.set_norms(norms)
    router.budget.set_numbers(float(router.budget.tau), int(router.budget.cap), by_norm)
    return router.eval()


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "selection", [TopK(1), TopK(3), Mass(0.6, cap=4), Mass(0.4), TopK(2, renormalize=True)], ids=str
)
def test_against_a_loop(selection: Any) -> None:
    routing = make(selection)(tokens(200))
    tau = selection.tau if isinstance(selection, Mass) else NO_LIMIT
    most = selection.max_experts(N)
    differs = 0
    for row, gate in enumerate(routing.probs.double().tolist()):
        shares = [g * n for g, n in zip(gate, NORMS, strict=True)]
        whole, held, kept = sum(shares), 0.0, []
        for e in sorted(range(N), key=lambda e: -shares[e]):
            if len(kept) < most and (not kept or held < tau * whole):
                held += shares[e]
                kept.append(e)
        assert routing.selected[row].nonzero().flatten().tolist() == sorted(kept)
        scale = sum(gate[e] for e in kept) if selection.renormalize else 1.0
        wanted = torch.tensor([gate[e] / scale if e in kept else 0.0 for e in range(N)])
        torch.testing.assert_close(routing.weights[row], wanted)
        differs += set(kept) != set(sorted(range(N), key=lambda e: -gate[e])[: len(kept)])
    assert differs > 20  # norms change the choice of many tokens


def test_without_the_rank_or_with_equal_norms_the_gate_chooses() -> None:
    x = tokens(200)
    plain = make(Mass(0.5, cap=3), norms=None, by_norm=False)(x)
    off = make(Mass(0.5, cap=3), by_norm=False)(x)
    equal = make(Mass(0.5, cap=3), norms=[7.0] * N)(x)
    for name in ("logits", "probs", "weights", "selected"):
        assert torch.equal(getattr(off, name), getattr(plain, name))
        assert torch.equal(getattr(equal, name), getattr(plain, name))


def test_the_scale_of_the_norms_is_nothing() -> None:
    x = tokens(200)
    found = [make(Mass(0.5, cap=3), norms=[s * n for n in NORMS])(x).selected for s in (1.0, 64.0)]
    assert torch.equal(*found)


def test_one_rank_for_each_sequence() -> None:
    x = tokens(2, 50)
    router = make(TopK(2))
    router.budget.by_norm = torch.tensor([1.0, 0.0]).view(-1, 1, 1)
    mixed = router(x)
    for row, by_norm in enumerate((True, False)):
        assert torch.equal(mixed.selected[row], make(TopK(2), by_norm=by_norm)(x).selected[row])
    assert not torch.equal(make(TopK(2))(x).selected, make(TopK(2), by_norm=False)(x).selected)


def test_with_an_alpha_of_the_weights_both_hold() -> None:
    x = tokens(100)
    router = make(TopK(2))
    router.alpha = 3.0
    router.budget.set_weight_alpha(1.0)
    found = router(x)
    router.budget.set_weight_alpha(None)
    assert torch.equal(found.selected, router(x).selected)
    router.alpha = 1.0
    torch.testing.assert_close(found.probs, router(x).probs)


def test_the_fused_gate_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "fuses", lambda *_: True)
    x, router = tokens(3), SoftmaxRouter(D, N)
    asked: list[str] = []

    def operands() -> None:
        asked.append("operands")

    for norms, wanted in ((None, ["operands"]), (NORMS, [])):
        asked.clear()
        router.budget.set_norms(norms)
        assert fused.try_fused(x, operands, router.alpha_value, router.budget, False, None) is None
        assert asked == wanted


def test_norms_are_checked_and_needed() -> None:
    budget = Budget(TopK(2), N)
    with pytest.raises(ValueError, match="by_norm needs the norms of the experts: call set_norms"):
        budget.set_numbers(NO_LIMIT, 1, by_norm=True)
    assert int(budget.cap) == 2
    with pytest.raises(ValueError, match="norms must be one for each of 6 experts, got 2"):
        budget.set_norms([1.0, 2.0])
    budget.set_norms(NORMS)
    budget.set_numbers(NO_LIMIT, 1, by_norm=True)
    assert float(budget.by_norm) == 1.0
    budget.reset(None)
    assert (budget.ranks_apart, float(budget.by_norm)) == (False, 0.0)
