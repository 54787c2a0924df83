"""A training step of the layer alone: forward, backward, optimiser. Ours next to Hugging Face's block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from grmoe.bench.blocks import Block, Setting
from grmoe.bench.forms import OURS, SOFTMAX
from grmoe.bench.layer import CPU_SHAPES, CUDA_SHAPES, HUGGING_FACE
from grmoe.bench.measure import Contender, Result, Row, Runs
from grmoe.bench.run import Benchmark
from grmoe.bench.shapes import LayerShape
from grmoe.layer import MoE
from grmoe.optim import GrassmannAdam, split_parameters, step_together
from grmoe.probe.timing import Ratio

# Small enough that hundreds of steps on one batch do not change the load.
RATE = 1e-6
STEP = "step"
FACTS = {"tokens/s": ",.0f", "held MB": ".0f"}


def contenders(
    shape: LayerShape, device: torch.device, dtype: torch.dtype, rank: int | None = None
) -> list[Contender]:

    def runs(block: Callable[[Setting], Block]) -> Callable[[], Runs]:
        # Each contender has its own weights, because it changes them.
        def build() -> Runs:
            setting = Setting(shape, rank, device, dtype)
            return _step_runs(setting, block(setting))

        return build

    return [
        Contender(HUGGING_FACE, runs(Setting.hugging_face), "peer", "transformers"),
        Contender(OURS, runs(Setting.ours)),
        Contender(SOFTMAX, runs(lambda s: s.ours(router=s.softmax))),
    ]


def optimizers(module: nn.Module) -> list[Optimizer]:
    """Fused AdamW, and our optimiser for frames if there are any."""
    split = split_parameters(module)
    groups: list[dict[str, Any]] = [{"params": split.rest}, {"params": split.kappa, "weight_decay": 0.0}]
    adam = AdamW([g for g in groups if g["params"]], lr=RATE, fused=True)
    return [adam, GrassmannAdam(split.frame_groups, lr=RATE)] if split.frame_groups else [adam]


def _step_runs(setting: Setting, block: Block) -> Runs:
    module = block.module
    assert module is not None
    steppers = optimizers(module)

    def step() -> None:
        block.call(setting.x_TD).backward(setting.grad_TD)
        step_together(steppers)
        if isinstance(module, MoE):
            module.router.update_prior(RATE)
        module.zero_grad(set_to_none=True)
        setting.x_TD.grad = None

    step()  # creates the optimisers' state, which is counted here
    state = [t for o in steppers for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    held = sum(t.numel() * t.element_size() for t in [*module.parameters(), *state])
    return Runs({STEP: step}, block.errors, {"held MB": held / 1e6})


def compare(shape: LayerShape, rows: list[Row]) -> Result:
    result = Result(shape, rows)
    for row in rows:
        if STEP in row.times:
            row.facts["tokens/s"] = 1e3 * shape.tokens / row.times[STEP].median
    result.add_ratio(f"{HUGGING_FACE} / {OURS}, {STEP}", HUGGING_FACE, OURS, STEP)
    result.add_ratio(f"Grassmann gate over softmax gate, {STEP}", OURS, SOFTMAX, STEP, "excess")
    ours, peer = result.row(OURS), result.row(HUGGING_FACE)
    if ours and peer and ours.peak and peer.peak:
        result.ratios.append(Ratio(f"peak memory, {OURS} / {HUGGING_FACE}", ours.peak / peer.peak))
    return result


BENCHMARK = Benchmark(
    name="train-step",
    contenders=contenders,
    compare=compare,
    cuda_shapes=CUDA_SHAPES,
    cpu_shapes=CPU_SHAPES,
    facts=FACTS,
)
