"""The gate alone: ours next to the softmax gate, the bare GEMM inside it, and its own reference.

Legend: T tokens, D model width, N experts, R subspace rank, K experts per token.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from grmoe.bench.blocks import as_reference, softmax_gate
from grmoe.bench.measure import SEED, Contender, Result, Row, Runs, relative_error
from grmoe.bench.run import Benchmark
from grmoe.bench.shapes import TOP_K, GateShape
from grmoe.routing import GrassmannRouter, Router, Routing, SoftmaxRouter, TopK

CUDA_SHAPES = (GateShape(16384, 768, 8, 48), GateShape(16384, 2048, 16, 64), GateShape(16384, 2560, 32, 64))
CPU_SHAPES = (GateShape(2048, 256, 8, 16), GateShape(2048, 768, 8, 48))

OURS, METRICS, NAIVE = "ours", "ours, with metrics", "naive Grassmann gate"
KEPT, AGAIN = "ours, projection kept", "ours, projection computed again"
SOFTMAX, GEMM = "softmax gate as people write it", "one bare GEMM (three with backward)"
FORWARD, BOTH = "forward", "forward+backward"
_TRAINING = "forward, training"  # packs the frames again, because they may have changed since the last call


def contenders(shape: GateShape, device: torch.device, dtype: torch.dtype) -> list[Contender]:
    gates = cache(lambda: Gates(shape, device, dtype))

    def kept_from(columns: int) -> Callable[[], Runs]:
        return lambda: gates().kept_from(columns)

    kept = [Contender(KEPT, kept_from(0)), Contender(AGAIN, kept_from(sys.maxsize))]
    return [
        Contender(SOFTMAX, lambda: gates().softmax(), "peer", "torch"),
        Contender(GEMM, lambda: gates().gemm(), "ceiling", "torch"),
        Contender(NAIVE, lambda: gates().grassmann("reference", metrics=False)),
        Contender(OURS, lambda: gates().grassmann("auto", metrics=False)),
        Contender(METRICS, lambda: gates().grassmann("auto", metrics=True)),
        *(kept if device.type == "cuda" else []),
    ]


class Gates:
    """The tokens and gates of one shape."""

    def __init__(self, shape: GateShape, device: torch.device, dtype: torch.dtype) -> None:
        T, D, N, R = shape.tokens, shape.dim, shape.experts, shape.rank
        torch.manual_seed(SEED)
        with torch.device(device):
            self.x_TD = torch.randn(T, D).to(dtype).requires_grad_()
            self.linear = SoftmaxRouter(D, N, TOP_K)
            self.direction_TN = torch.randn(T, N)
            self.grad_TNR = torch.randn(T, N * R).to(dtype)
        # Frames are drawn on the CPU.
        self.router = GrassmannRouter(D, N, R, selection=TopK(TOP_K)).to(device)

    def grassmann(self, backend: Literal["auto", "reference"], metrics: bool) -> Runs:
        router, x_TD = copy.deepcopy(self.router), self.x_TD
        router.backend = backend
        router.counter.paused = not metrics  # permanently, because `uncounted()` would be part of the time
        leaves = [x_TD, *router.parameters()]

        served = copy.deepcopy(router).eval()

        def forward() -> Routing:
            with torch.no_grad():
                return served(x_TD)

        def training() -> Routing:
            with torch.no_grad():
                return router(x_TD)

        def both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(router(x_TD).weights, leaves, self.direction_TN)

        def errors() -> dict[str, float]:
            return self.errors(router, lambda x: router(x).probs, dict(router.named_parameters()))

        return Runs({FORWARD: forward, _TRAINING: training, BOTH: both}, errors)

    def kept_from(self, columns: int) -> Runs:
        """Ours, where the forward keeps a projection of at least that many columns for the backward."""
        from grmoe.kernels import gate  # needs Triton

        plain = self.grassmann("auto", metrics=False)
        both = Runs({BOTH: plain.timed[BOTH]}, plain.errors)
        return both.with_choice((gate, "KEPT_COLUMNS", columns))

    def softmax(self) -> Runs:
        x_TD = self.x_TD
        weight_ND = nn.Parameter(self.linear.weight.detach().to(x_TD.dtype))
        direction_TK = self.direction_TN[:, :TOP_K].to(x_TD.dtype)
        rounded = copy.deepcopy(self.linear)
        rounded.weight.data.copy_(weight_ND.data)  # the reference gets the same rounded weights

        def forward() -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                return softmax_gate(x_TD, weight_ND, TOP_K)

        def both() -> tuple[Tensor, ...]:
            weight_TK, _ = softmax_gate(x_TD, weight_ND, TOP_K)
            return torch.autograd.grad(weight_TK, [x_TD, weight_ND], direction_TK)

        def probs(x: Tensor) -> Tensor:
            return nn.functional.softmax(nn.functional.linear(x, weight_ND), dim=-1, dtype=torch.float)

        return Runs(
            {FORWARD: forward, BOTH: both}, lambda: self.errors(rounded, probs, {"weight": weight_ND})
        )

    def gemm(self) -> Runs:
        x_TD, grad = self.x_TD.detach(), self.grad_TNR
        flat = self.router.frames.detach().permute(1, 0, 2).flatten(1).to(x_TD.dtype)

        def three() -> tuple[Tensor, Tensor, Tensor]:
            return x_TD @ flat, grad @ flat.T, x_TD.T @ grad

        return Runs({FORWARD: lambda: x_TD @ flat, BOTH: three})

    def errors(
        self, router: Router, probs: Callable[[Tensor], Tensor], named: dict[str, nn.Parameter]
    ) -> dict[str, float]:
        """Errors against fp64: largest absolute of the probabilities, relative of the gradients.

        The loss is on the probabilities, because a selection that flips at a near tie is not an error of the gate.
        """
        got_TN = probs(self.x_TD)
        gradients = torch.autograd.grad(got_TN, [self.x_TD, *named.values()], self.direction_TN)
        router64 = as_reference(router)
        x64_TD = self.x_TD.detach().double().requires_grad_()
        want_TN = router64(x64_TD).probs
        leaves64 = [x64_TD, *router64.parameters()]
        gradients64 = torch.autograd.grad(want_TN, leaves64, self.direction_TN.double())
        pairs = zip(["x", *named], gradients, gradients64, strict=True)
        errors = {name: relative_error(a, b) for name, a, b in pairs}
        return {"probs": float((got_TN - want_TN).detach().abs().max())} | errors


def compare(shape: GateShape, rows: list[Row]) -> Result:
    result = Result(shape, rows)
    pairs = [
        (f"{OURS} / softmax gate, {FORWARD}", OURS, SOFTMAX, FORWARD),
        (f"{OURS} / softmax gate, {BOTH}", OURS, SOFTMAX, BOTH),
        (f"naive / softmax gate, {FORWARD}", NAIVE, SOFTMAX, FORWARD),
        (f"{OURS} / one bare GEMM, {FORWARD}", OURS, GEMM, FORWARD),
        (f"{OURS} / three bare GEMMs, {BOTH}", OURS, GEMM, BOTH),
        (f"naive / {OURS}, {BOTH}", NAIVE, OURS, BOTH),
        (f"with metrics / {OURS}, {FORWARD}", METRICS, OURS, FORWARD),
        (f"projection kept / computed again, {BOTH}", KEPT, AGAIN, BOTH),
    ]
    for pair in pairs:
        result.add_ratio(*pair)
    return result


BENCHMARK = Benchmark(
    name="gate",
    contenders=lambda shape, device, dtype, _: contenders(shape, device, dtype),  # the shape has the rank
    compare=compare,
    cuda_shapes=CUDA_SHAPES,
    cpu_shapes=CPU_SHAPES,
)
