"""What the fused gate's kernel is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grmoe.kernels import runtime
from grmoe.routing import Dense, Mass, Threshold, TopK
from grmoe.routing.budget import Budget
from grmoe.routing.elastic import Elastic
from grmoe.routing.fused import GateOperands, fused_gate

pytest.importorskip("triton")

N, D = 4, 16


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(1))


def test_what_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def gate(x_TD: Tensor, *_: Any, **options: Any) -> list[Tensor]:
        given.update(options, tokens=len(x_TD))
        return [torch.zeros(len(x_TD), N)] * 4 + [torch.zeros(())]

    monkeypatch.setattr("grmoe.kernels.gate.gate", gate)
    operands, one = GateOperands(torch.zeros(N, D), torch.zeros(N)), torch.tensor(1.0)
    for policy, mode, room in (
        (Dense(), runtime.DENSE, N), (TopK(N), runtime.LARGEST, N), (TopK(1, True), runtime.LARGEST, 1),
        (Mass(0.7, cap=2), runtime.LARGEST, 2), (Threshold(0.3), runtime.ABOVE, 3),
    ):  # fmt: skip
        given.clear()
        budget = Budget(policy, N)
        fused_gate(tokens(5, 7), operands, one, budget)
        assert (given["mode"], given["max_experts"], given["renormalize"]) == (mode, room, policy.renormalize)
        assert given["tau"] is budget.tau  # not a copy: a captured graph must see changes
        assert given["cap"] is budget.cap
        assert (given["length"], given["tokens"], given["weight_alpha"]) == (7, 35, None)
        assert "key" not in given
    budget.set_weight_alpha(0.5)
    with torch.no_grad():
        fused_gate(tokens(6), operands, one, budget)
    assert given["weight_alpha"] is budget.weight_alpha
    fused_gate(tokens(6), operands, one, budget)
    assert given["weight_alpha"] is not budget.weight_alpha  # it may be set before the backward
    assert given["weight_alpha"] == budget.weight_alpha
    assert given["length"] == 6  # one sequence
    budget = Budget(TopK(2), N)
    budget.layer = 4
    for unit, layer, code in (
        ("token", 5, runtime.PER_TOKEN), ("sequence", 5, runtime.PER_SEQUENCE), ("layer", 5, runtime.PER_STEP),
        ("step", 0, runtime.PER_STEP),
    ):  # fmt: skip
        for rule, drawn in (("mass", runtime.MASS), ("count", runtime.COUNT)):
            budget.elastic = Elastic(unit, rule)  # type: ignore[arg-type]
            fused_gate(tokens(5, 7), operands, one, budget, training=True)
            assert (given["layer"], given["unit"], given["elastic"]) == (layer, code, drawn)
            assert given["key"] is budget.key
            assert given["first_row"] is budget.first_row
    with pytest.raises(ValueError, match="k must be at most the number of experts 4, got 5"):
        fused_gate(tokens(5), operands, one, Budget(TopK(N + 1), N))
