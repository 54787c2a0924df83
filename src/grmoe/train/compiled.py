"""The model compiled for training."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

_MODES = (torch.amp._enter_autocast, torch.amp._exit_autocast, torch._C._set_grad_enabled)  # type: ignore[attr-defined]


def compile_for_training(model: nn.Module, graphs: bool) -> Callable[..., Any]:
    """The model compiled for batches of one shape; with `graphs` into CUDA graphs."""
    options: dict[str, Any] = {"triton.cudagraphs": graphs, "pre_grad_custom_pass": merge_linears}
    compiled: Callable[..., Any] = torch.compile(model, dynamic=False, options=options)
    return compiled


def merge_linears(graph: fx.Graph) -> None:
    """Linear layers that read the same tokens become one: queries, keys and values; SwiGLU's gate and up.

        x·W₁ᵀ, x·W₂ᵀ  →  x·[W₁; W₂]ᵀ, split

    One product with many columns keeps more of the device busy than several with few, and its backward adds nothing
    up. Weights are cast to autocast's precision in any case; they are now cast to where they lie together. The model
    keeps its layers, so that checkpoints and adapters know nothing of it.
    """
    groups: dict[tuple[fx.Node, int], list[tuple[fx.Node, fx.Node]]] = defaultdict(list)  # layers, weights
    region = 0  # between two changes of autocast or of the recording of gradients
    for node in graph.nodes:
        if node.target in _MODES:
            region += 1
        elif node.target in (F.linear, torch._C._nn.linear):
            given: list[Any] = [*node.args, *node.kwargs.values()]
            if given[1].op in ("placeholder", "get_attr") and given[2:] in ([], [None]):
                groups[given[0], region].append((node, given[1]))
    for (x, _), found in groups.items():
        layers, weights = zip(*found, strict=True)
        likes = [weight.meta["example_value"] for weight in weights]
        if len(layers) < 2 or len({(like.dtype, like.device) for like in likes}) > 1:
            continue
        with graph.inserting_before(layers[0]):
            joined = graph.call_function(torch.cat, (list(weights), 0))
            product = graph.call_function(F.linear, (x, joined))
            parts = graph.call_function(torch.split, (product, [like.shape[0] for like in likes], -1))
            for i, layer in enumerate(layers):
                layer.replace_all_uses_with(graph.call_function(operator.getitem, (parts, i)))
        for layer in layers:
            graph.erase_node(layer)
