"""Ranges around the parts of a model, in the forward and in the backward, that together cover a whole pass.

A mark is an event on the device (on a CPU a time of the clock) and the part that begins there. What lies between two
marks belongs to the first one's part, so that the parts of a pass add up to the pass. A range puts an identity before
and after its function. The identities' own backward marks the range's backward: autograd runs later nodes first, so
that all nodes of the function run between the two.

A range lies outside of what is compiled: a compiled model has no parts. With `compiled`, each part is compiled by
itself, as it is inside a compiled model, but for what the compiler fuses across parts (norms and residuals).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from grmoe.model import GrmoeForCausalLM
from grmoe.model.block_grmoe import GrmoeMLP
from grmoe.routing import Routing

ATTENTION, ROUTING, EXPERTS = "attention", "routing", "experts"
DENSE, HEAD, UPDATE, REST = "dense feed-forward", "head and loss", "optimisers", "rest"
PARTS = (ATTENTION, ROUTING, EXPERTS, DENSE, HEAD, UPDATE, REST)
_PAUSE_CYCLES = 200_000_000  # 0.1 s at 2 GHz: the host enqueues most of a step meanwhile
_EMPTY = 200  # ranges with nothing inside, to see what a range costs


class Marks:
    """The marks of passes over a model. Does nothing between passes."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = perf_counter) -> None:
        self.device, self.clock = device, clock
        self.marks: list[tuple[str, Any]] | None = None

    def begin(self, part: str) -> None:
        if self.marks is None:
            return
        if self.device.type != "cuda":
            self.marks.append((part, self.clock()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((part, event))

    def end(self) -> None:
        self.begin(REST)

    def times(self, run: Callable[[], object]) -> dict[str, float]:
        """Milliseconds by part of one pass. The device pauses first, so that it never waits for the host."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(_PAUSE_CYCLES)
        self.marks = []
        self.end()
        run()
        self.end()
        marks, self.marks = self.marks, None
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        found = dict.fromkeys(PARTS, 0.0)
        for (part, start), (_, end) in pairwise(marks):
            found[part] += 1e3 * (end - start) if isinstance(end, float) else start.elapsed_time(end)
        return found

    def empty_ms(self) -> float:
        """What a range with nothing inside takes: the error of a short part."""

        def nothing() -> None:
            for _ in range(_EMPTY):
                self.begin(ROUTING)
                self.end()

        self.times(nothing)
        return self.times(nothing)[ROUTING] / _EMPTY


@contextmanager
def ranges(model: GrmoeForCausalLM, marks: Marks, compiled: bool = False) -> Iterator[None]:
    """Inside, the model's parts are ranges of `marks`. Its weights and its results stay as they are."""
    wrapped: list[tuple[Any, str, str]] = [(model, "_loss_alone", HEAD)]
    plain: list[Any] = [model.model.norm]
    for layer in model.model.layers:
        block: Any = layer
        wrapped.append((block.self_attn, "forward", ATTENTION))
        plain += [block.input_layernorm, block.post_attention_layernorm]
        if isinstance(block.mlp, GrmoeMLP):
            wrapped.append((block.mlp, "forward", DENSE))
        else:
            wrapped += [(block.mlp.router, "forward", ROUTING), (block.mlp, "compute", EXPERTS)]
    compile_part = _compiled if compiled else lambda function: function
    # The head is a kernel of its own and is not compiled alone: inside a compiled model it is not fused either.
    for owner, name, part in wrapped:
        function = getattr(owner, name)
        setattr(owner, name, _ranged(function if part == HEAD else compile_part(function), part, marks))
    for norm in plain:
        norm.forward = compile_part(norm.forward)
    # All blocks share their code, and each has attributes of its own: one compilation per block may be needed.
    limit = max(64, 4 * len(wrapped))
    try:
        with torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=8 * limit):
            yield
    finally:
        for owner, name, _ in wrapped:
            delattr(owner, name)
        for norm in plain:
            del norm.forward


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _ranged(function: Callable[..., Any], part: str, marks: Marks) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        marks.begin(part)
        values = _marked([*given, *named.values()], marks.end)
        named = dict(zip(named, values[len(given) :], strict=True))
        results = function(*values[: len(given)], **named)
        several = isinstance(results, tuple)
        results = _marked(results if several else [results], lambda: marks.begin(part))
        marks.end()
        return tuple(results) if several else results[0]

    return call


def _marked(values: Sequence[Any], mark: Callable[[], None]) -> list[Any]:
    """The values, with one identity around all tensors that need a gradient. Its backward calls `mark`."""
    places = [i for i, value in enumerate(values) if isinstance(value, Routing) or _needs_grad(value)]
    tensors = [v.weights if isinstance(v := values[i], Routing) else v for i in places]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return list(values)
    found = list(values)
    for i, tensor in zip(places, _Mark.apply(mark, *tensors), strict=True):
        value = values[i]
        found[i] = replace(value, weights=tensor) if isinstance(value, Routing) else tensor
    return found


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mark: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mark = mark
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.mark()
        return None, *gradients
