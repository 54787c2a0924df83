"""Attention of other packages, which the model finds by name in transformers' registry."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from grmoe.model.attention_grmoe import GrmoeAttention


def rows_of_tokens(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    """As vLLM's: one sequence, and one row per token with all its heads side by side."""
    heads_BSHD, _ = eager_attention_forward(module, q, k, v, mask, **options)
    return heads_BSHD.flatten(2)[0], None


@pytest.fixture
def rows() -> Iterator[str]:
    ALL_ATTENTION_FUNCTIONS.register("rows", rows_of_tokens)
    yield "rows"
    del ALL_ATTENTION_FUNCTIONS._global_mapping["rows"]


@torch.no_grad()
@pytest.mark.parametrize("chosen", [None, 2])
def test_heads_may_come_as_rows_of_tokens(chosen: int | None, build: Any, rows: str) -> None:
    model = build(attention_heads_per_token=chosen, attn_implementation="eager")
    attention = model.model.layers[0].self_attn
    x = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(3))
    angles = torch.rand(1, 7, 8, generator=torch.Generator().manual_seed(4))
    mask = torch.full((7, 7), -1e9).triu(1)[None, None]
    want, _ = attention(x, position_embeddings=(angles.cos(), angles.sin()), attention_mask=mask)
    model.config._attn_implementation = rows
    found, _ = attention(x, position_embeddings=(angles.cos(), angles.sin()), attention_mask=mask)
    assert torch.equal(found, want)


def test_vllm_finds_what_it_looks_for_in_the_text() -> None:
    """It reads `forward`, as in 0.32.0: one call of what one lookup gave, with its scale, and projections of one input.

    Without the first it does not start. Without the second it keeps three products, and cannot split heads.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(GrmoeAttention.forward)))
    names = {
        node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and ast.unparse(node.value).startswith("ALL_ATTENTION_FUNCTIONS.get_interface(")
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (call,) = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id in names]
    assert "scaling=self.scaling" in ast.unparse(call)
    for name in ("q_proj", "k_proj", "v_proj"):
        assert [ast.unparse(c) for c in calls if ast.unparse(c.func) == f"self.{name}"] == [
            f"self.{name}(hidden_states)"
        ]
