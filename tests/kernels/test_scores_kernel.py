"""Scores of gates that take several kernels, against PyTorch in fp64: values and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grmoe.kernels import runtime
from grmoe.kernels import scores as module
from grmoe.kernels.scores import Parts, blend, blend_reference, project, project_reference

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(values: list[Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    upstream = [draw(*value.shape, seed=9).to(value.dtype) for value in values]
    return torch.autograd.grad(values, leaves, upstream, retain_graph=True, materialize_grads=True)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "fallback"])
@pytest.mark.parametrize("weight", [(4,), (4, 3), None], ids=str)
def test_project(weight: tuple[int, ...] | None, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Energies and the length, both with gradients; a token of zeros has none."""
    if not kernel:
        monkeypatch.setattr(runtime, "_failed", {"gate backward"})
    x = draw(9, 18)  # no whole 16 bytes
    x[3] = 0
    leaves = [x, draw(4, 18, 3, seed=1), 0.3 * draw(*weight, seed=2)] if weight else [x, draw(4, 18, seed=1)]
    ours = [leaf.clone().requires_grad_() for leaf in leaves]
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    log_weight = (ours[2], wide[2]) if weight else (None, None)
    found = project(ours[0], ours[1], log_weight[0], 2.5)
    expected = project_reference(wide[0], wide[1], log_weight[1], 2.5)
    count = 2 if weight else 1  # a linear gate has no lengths
    assert found[1].requires_grad == bool(weight)
    for a, b in zip(found[:count], expected, strict=False):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    for chosen in ([0], [1], [0, 1]) if weight else ([0],):
        our_values, wide_values = ([values[i] for i in chosen] for values in (found, expected))
        for a, b in zip(gradients(our_values, ours), gradients(wide_values, wide), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "fallback"])
@pytest.mark.parametrize("given", ["κ", "z", "κz", "m", "mn", "κzmn"])
@pytest.mark.parametrize("T", [1, 700])
def test_blend(T: int, given: str, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel:
        monkeypatch.setattr(runtime, "_failed", {"scores", "scores backward"})
    N = 5
    norm = draw(T, seed=4).exp()
    norm[0] = 1e-12  # padding: its linear term is zero
    full = Parts(draw(T, N).square(), 0.3 * draw(N, seed=1), draw(T, N, seed=2), draw(T, N, seed=3), norm)
    wanted = [True, "κ" in given, "z" in given, "m" in given, "n" in given]
    leaves = [part if wish else None for part, wish in zip(full, wanted, strict=True)]
    ours = Parts(*(None if leaf is None else leaf.clone().requires_grad_() for leaf in leaves))  # type: ignore[arg-type]
    wide = Parts(*(None if leaf is None else leaf.double().requires_grad_() for leaf in leaves))  # type: ignore[arg-type]
    found, expected = blend(ours, 3.0), blend_reference(wide, 3.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    our_leaves, wide_leaves = ([leaf for leaf in parts if leaf is not None] for parts in (ours, wide))
    for a, b in zip(gradients([found], our_leaves), gradients([expected], wide_leaves), strict=True):
        # Sums over up to 700 tokens in fp32.
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-3)


def test_nothing_to_blend_and_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("no kernel is needed")

    monkeypatch.setattr(module, "launch", refuse)
    energy = draw(4, 3)
    assert blend(Parts(energy), 1.0) is energy
    assert blend(Parts(energy[:0], network_TN=energy[:0]), 1.0).shape == (0, 3)
