"""The dispatcher alone: any selection of any process gives what all experts in one process give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from grmoe.experts import Dispatch, ExpertWeights
from grmoe.experts.reference import reference_experts
from grmoe.parallel.experts import ExpertParallel
from grmoe.parallel.world import ParallelConfig, World

D, I, N = 8, 12, 6
CASES = 24


def tokens(case: int, rank: int) -> dict[str, Tensor]:
    """What one process routes: from nothing at all to every expert for every token, evenly or not."""
    rng = torch.Generator().manual_seed(100 * case + rank)
    T = int(torch.randint(1, 9, (), generator=rng))
    share_N = torch.rand(N, generator=rng) * (case % 4) / 2  # every fourth case selects nothing anywhere
    if case % 3 == 1:
        share_N[N // 2 :] = 0.0  # the last process gets no row
    if case % 5 == 2 and rank == 0:
        share_N.zero_()  # the first process sends none
    selected_TN = torch.rand(T, N, generator=rng) < share_N
    weights_TN = torch.where(selected_TN, torch.rand(T, N, generator=rng), 0.0)
    x_TD, seen_TD = torch.randn(T, D, generator=rng), torch.randn(T, D, generator=rng)
    return {"x": x_TD, "weights": weights_TN, "selected": selected_TN, "seen": seen_TD}


def whole_weights() -> ExpertWeights:
    torch.manual_seed(0)
    return ExpertWeights(D, I, N, "swiglu")


def evaluate(experts: Any, case: int, rank: int) -> dict[str, Tensor]:
    """Output and gradients of Σ output · seen."""
    t = tokens(case, rank)
    x_TD, weights_TN = t["x"].requires_grad_(), t["weights"].requires_grad_()
    y_TD = experts(x_TD, Dispatch.build(weights_TN, t["selected"], N))
    (y_TD * t["seen"]).sum().backward()
    assert x_TD.grad is not None
    assert weights_TN.grad is not None
    return {"y": y_TD.detach(), "x": x_TD.grad, "weights": torch.where(t["selected"], weights_TN.grad, 0.0)}


def in_parallel(world: World, backend: str) -> list[dict[str, Tensor]]:
    assert world.mesh is not None
    group = world.mesh["expert"]
    results = []
    for case in range(CASES):
        weights = whole_weights()
        for name, p in list(weights.named_parameters()):
            part = p.detach().chunk(world.size)[world.rank].clone()
            divided = DTensor.from_local(part, group, [Shard(0)])
            weights.register_parameter(name, nn.Parameter(divided))
        dispatcher = ExpertParallel(group.get_group())
        result = evaluate(
            lambda x_TD, d, weights=weights, run=dispatcher: run(x_TD, d, weights, backend), case, world.rank
        )
        assert isinstance(weights.up.grad, DTensor)
        assert isinstance(weights.down_proj.grad, DTensor)
        result.update(up=weights.up.grad.full_tensor(), down=weights.down_proj.grad.full_tensor())
        results.append(result)
    return results


@pytest.mark.parametrize(("size", "backend"), [(2, "reference"), (3, "grouped")])
def test_equals_all_experts_in_one_process(size: int, backend: str) -> None:
    results = run(ParallelConfig(expert=size), size, in_parallel, backend)
    for case in range(CASES):
        weights = whole_weights()
        for rank in range(size):
            want = evaluate(lambda x_TD, d, w=weights: reference_experts(x_TD, d, w), case, rank)
            got = results[rank][case]
            for name, tensor in want.items():
                # Sums of D or I products of order one in another order.
                torch.testing.assert_close(
                    got[name], tensor, atol=1e-5, rtol=1e-5, msg=f"{name}, case {case}"
                )
        for rank in range(size):
            # The mean over processes, as of a loss that is one.
            torch.testing.assert_close(
                results[rank][case]["up"] * size, weights.up.grad, atol=1e-5, rtol=1e-5
            )
            torch.testing.assert_close(
                results[rank][case]["down"] * size, weights.down_proj.grad, atol=1e-5, rtol=1e-5
            )


def test_the_cases_are_as_uneven_as_they_should_be() -> None:
    loads = [[tokens(case, rank)["selected"].sum(0) for rank in range(2)] for case in range(CASES)]
    assert any(a.sum() == 0 and b.sum() > 0 for a, b in loads)  # one process sends nothing
    assert any((a + b)[N // 2 :].sum() == 0 and (a + b).sum() > 0 for a, b in loads)  # one gets nothing
    assert any((a + b).sum() == 0 for a, b in loads)  # nothing is sent at all
    assert any((a + b).max() >= 2 * (a + b).min() > 0 for a, b in loads)
