"""Merged linear layers: the same numbers from fewer products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from grmoe.model import GrmoeForCausalLM, preset
from grmoe.train.compiled import compile_for_training, merge_linears


def linears(graph: fx.Graph) -> int:
    return sum("linear" in str(node.target) for node in graph.nodes)


def merging(counts: list[tuple[int, int]]) -> Callable[..., Any]:
    """A backend that merges, notes the linear layers before and after, and runs the rest as it is."""

    def backend(module: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        before = linears(module.graph)
        merge_linears(module.graph)
        module.graph.lint()
        module.recompile()
        counts.append((before, linears(module.graph)))
        return module.forward

    return backend


def loss_and_gradients(model: nn.Module, call: Callable[..., Any], ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = call(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("act", "dense"), [("gelu", (6, 4)), ("silu", (7, 4))])
def test_queries_keys_and_values_become_one_product(act: str, dense: tuple[int, int]) -> None:
    """Two of the attention's four products go in each block; with SwiGLU another one in a dense block."""
    torch.manual_seed(0)
    model = GrmoeForCausalLM(preset("tiny", hidden_act=act, vocab_size=64)).double()
    ids = torch.randint(64, (2, 16))
    want = loss_and_gradients(model, model, ids)
    counts: list[tuple[int, int]] = []
    got = loss_and_gradients(model, torch.compile(model, backend=merging(counts)), ids)
    # The loop over experts breaks the graph on a CPU: dense block and MoE block's attention are graphs of their own.
    assert {pair for pair in counts if pair[0] > 1} == {dense, (4, 2)}
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)  # fp64, sums in another order


class Mixed(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3, bias=bias), nn.Linear(4, 5, bias=bias)
        self.c = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).sum() + self.b(x).sum()
        with torch.autocast("cpu", torch.bfloat16):
            return y + self.c(x).float().sum()


def test_layers_with_a_bias_or_under_another_autocast_stay_apart() -> None:
    x = torch.randn(6, 4)
    for bias, want in ((False, (3, 2)), (True, (3, 3))):
        torch.manual_seed(1)
        module = Mixed(bias)
        counts: list[tuple[int, int]] = []
        got = torch.compile(module, backend=merging(counts))(x)
        assert counts == [want]
        torch.testing.assert_close(got, module(x))


def test_inductor_takes_the_pass() -> None:
    """The option by its name, through the real compiler."""
    torch.manual_seed(2)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3, bias=False), nn.Linear(4, 5, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.a(x).sum(-1) * self.b(x).sum(-1)).sum()

    module, x = Pair(), torch.randn(6, 4)
    compile_for_training(module, graphs=False)(x).backward()
    got = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    module(x).backward()
    torch.testing.assert_close(got, [p.grad for p in module.parameters()])
