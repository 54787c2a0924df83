"""Metrics and prior sums count a token once, also where activation checkpointing runs the forward twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grmoe.layer import MoE
from grmoe.routing import ROUTERS, Mass, Router, Routing, build_router, routers, uncounted

D, N, T = 12, 4, 30
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[(name, {"balance": cls.reads_prior}) for name, cls in ROUTERS.items() if name != "grassmann"],
    ("softmax", {"balance": True, "noise": 0.5, "z_loss": 0.1, "load_loss": 0.1}),
    ("grassmann", {"rank": 3}),
    ("grassmann", {"rank": 3, "selection": Mass(0.7, cap=3), "amortizer": "affinity", "linear": True}),
    ("grassmann", {"rank": 3, "prior": "uniform"}),
]


class Block(nn.Module):
    def __init__(self, router: Router) -> None:
        super().__init__()
        self.moe = MoE(D, 8, N, router, shared_experts=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, routing = self.moe.run(x)
        return x + y, routing.aux_loss


class Model(nn.Module):
    """Two blocks; `reentrant` None runs them plainly. `seen` holds the selection of every forward."""

    def __init__(self, name: str, options: dict[str, Any], reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(build_router(name, D, N, **options)) for _ in range(2)])
        self.reentrant = reentrant
        self.seen: list[list[Tensor]] = [[], []]
        for router, seen in zip(routers(self), self.seen, strict=True):

            def keep(module: nn.Module, inputs: Any, routing: Routing, seen: list[Tensor] = seen) -> None:
                seen.append(routing.selected.clone())

            router.register_forward_hook(keep)

    def forward(self, x: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for block in self.blocks:
            if self.reentrant is None:
                x, aux = block(x)
            else:
                x, aux = checkpoint(block, x, use_reentrant=self.reentrant)
            loss = loss + aux
        return loss + x.square().mean()


def tokens() -> Tensor:
    return torch.randn(2, T // 2, D, generator=torch.Generator().manual_seed(1))


def step(model: Model) -> list[Tensor]:
    torch.manual_seed(7)  # the noise of the forward
    x = tokens().requires_grad_()
    model.zero_grad()
    loss = model(x)
    loss.backward()
    assert x.grad is not None
    grads = [torch.zeros(0) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [loss.detach(), x.grad, *grads]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_checkpointing_changes_no_bit_and_counts_once(
    name: str, options: dict[str, Any], reentrant: bool
) -> None:
    plain, saved = Model(name, options, None), Model(name, options, reentrant)
    for ours, expected in zip(step(saved), step(plain), strict=True):
        assert torch.equal(ours, expected)
    for once, twice in zip(plain.seen, saved.seen, strict=True):
        assert (len(once), len(twice)) == (1, 2)  # it did run again
        assert torch.equal(twice[0], once[0])
        assert torch.equal(twice[1], once[0])
    for a, b in zip(routers(saved), routers(plain), strict=True):
        assert a.read_metrics().tokens == T
        assert torch.equal(a.counter.sums, b.counter.sums)
        assert torch.equal(a.prior_sums, b.prior_sums)
        assert float(a.prior_sums[-1]) == (T if a.balance else 0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_prior_updated_after_the_backward_follows_the_plain_run(reentrant: bool) -> None:
    options = {"rank": 3, "selection": Mass(0.7, cap=3)}
    paths = []
    for kind in (None, reentrant):
        model = Model("grassmann", options, kind)
        path = []
        for _ in range(4):
            step(model)
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * (torch.zeros_like(p) if p.grad is None else p.grad)
            for router in routers(model):
                router.update_prior(0.5)
                path.append(router.log_prior.clone())
        paths.append(path)
    for a, b in zip(*paths, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(paths[0][0], paths[0][-1])


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad"
)  # the inner forward of a reentrant one
@pytest.mark.parametrize("reentrant", [True, False])
def test_several_backwards_and_nested_checkpoints_count_once(reentrant: bool) -> None:
    model = Model("grassmann", {"rank": 3}, reentrant)
    for forwards in (1, 2):
        x = tokens().requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).backward()
        assert [r.read_metrics().tokens for r in routers(model)] == [forwards * T] * 2
    model.reentrant = None
    with torch.no_grad():
        model(tokens())
    assert routers(model)[0].read_metrics().tokens == 3 * T


def test_uncounted_passes() -> None:
    router = build_router("grassmann", D, N, rank=3)
    with router.uncounted(), router.uncounted():  # may be nested
        routing = router(tokens())
    with pytest.raises(ValueError, match="x must have shape"), router.uncounted():
        router(torch.zeros(2, D + 1))  # counting goes on after an error too
    assert router.read_metrics().tokens == 0
    assert not router.prior_sums.any()
    assert torch.equal(router(tokens()).probs, routing.probs)
    assert router.read_metrics().tokens == T
    assert float(router.prior_sums[-1]) == T


def test_uncounted_covers_a_whole_model_or_some_of_its_routers() -> None:
    model = Model("grassmann", {"rank": 3}, None)
    with uncounted(model):
        model(tokens())
    assert [r.read_metrics().tokens for r in routers(model)] == [0, 0]
    with uncounted(routers(model)[:1]):
        model(tokens())
    assert [r.read_metrics().tokens for r in routers(model)] == [0, T]
