"""When the maps of few tokens may stand in for layers, and that they are these layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from grmoe import linears
from grmoe.kernels import runtime
from grmoe.linears import add_product, feed_forward_few, project_few, takes_few


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = (
            nn.RMSNorm(8),
            nn.Linear(8, 8, bias=False),
            nn.Linear(8, 8, bias=False),
        )

    def asked(self, x: Tensor) -> bool:
        return takes_few(x, self, self.norm, self.first, self.second)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "MOST_TOKENS", 4)
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(runtime, "available", lambda _: True)


def with_bias(m: Whole) -> None:
    m.second = nn.Linear(8, 8)


def other_layer(m: Whole) -> None:
    m.first = nn.Sequential(m.first)  # type: ignore[assignment]


def other_weight(m: Whole) -> None:
    m.first.weight = nn.Parameter(m.first.weight.double())


CHANGES: dict[str, Callable[[Whole], object]] = {
    "trained": lambda m: m.train(),
    "a bias": with_bias,
    "another layer": other_layer,
    "another precision": other_weight,
    "the norm's precision": lambda m: m.norm.double(),
    "a hook": lambda m: m.first.register_forward_hook(lambda *_: None),
    "a hook before": lambda m: m.norm.register_forward_pre_hook(lambda *_: None),
    "a hook on the whole": lambda m: m.register_forward_hook(lambda *_: None),
    "a forward of its own": lambda m: setattr(m.second, "forward", lambda x: x),
}


@torch.no_grad()
@pytest.mark.parametrize("change", [None, *CHANGES], ids=str)
def test_layers_as_they_were_built(change: str | None) -> None:
    whole = Whole().eval()
    if change is not None:
        CHANGES[change](whole)
    assert whole.asked(torch.randn(4, 8)) is (change is None)


def test_tokens() -> None:
    whole = Whole().eval()
    assert not whole.asked(torch.randn(4, 8))  # a gradient could be asked for
    with torch.no_grad():
        assert whole.asked(torch.randn(2, 2, 8))
        assert not whole.asked(torch.randn(5, 8))
        assert not whole.asked(torch.randn(0, 8))
        assert not whole.asked(torch.randn(4, 8).double())


def test_hooks_of_transformers_are_silent_and_global_ones_are_not() -> None:
    whole, x = Whole().eval(), torch.randn(4, 8)

    def capture(*_: object) -> None: ...

    capture.__module__ = "transformers.utils.output_capturing"
    whole.register_forward_hook(capture)
    with torch.no_grad():
        assert whole.asked(x)
        every = nn.modules.module.register_module_forward_hook(lambda *_: None)
        assert not whole.asked(x)
        every.remove()
        assert whole.asked(x)


@torch.no_grad()
def test_each_map_is_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the fallback: the kernel has tests of its own."""
    monkeypatch.setattr(runtime, "attempt", lambda name, kernel, otherwise: otherwise())
    x, norm, residual = torch.randn(2, 3, 8), nn.RMSNorm(8, eps=1e-5), torch.randn(2, 3, 5)
    norm.weight.copy_(torch.rand(8))
    q, k, v = (nn.Linear(8, size, bias=False) for size in (8, 4, 2))
    found = project_few(x, [q.weight, k.weight, v.weight], norm.weight, 1e-5)
    for ours, layer in zip(found, (q, k, v), strict=True):
        torch.testing.assert_close(ours, layer(norm(x)))
    gate, up, down = nn.Linear(8, 6, bias=False), nn.Linear(8, 6, bias=False), nn.Linear(6, 5, bias=False)
    want = nn.functional.silu(gate(norm(x))) * up(norm(x))
    inner = feed_forward_few(x, gate.weight, up.weight, norm.weight, 1e-5)
    torch.testing.assert_close(inner, want)
    torch.testing.assert_close(
        feed_forward_few(x, None, up.weight, norm.weight, 1e-5), nn.functional.gelu(up(norm(x)))
    )
    torch.testing.assert_close(add_product(residual, inner, down.weight), residual + down(inner))
