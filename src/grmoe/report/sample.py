"""A sample of a model's gates that fits into a page: real tokens, and what each router does with them at any α.

A gate's logits are affine in α, ℓ = a + α·b, and a (a prior that α does not scale) is the same for every token. A
softmax does not change when all logits of a token shift, so b is kept as its distance below the token's largest, in
16-bit steps. The error is at most half a step: range/131070.

Legend: T tokens, N experts, W windows, S tokens per window.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grmoe.checks import require
from grmoe.model import GrmoeForCausalLM
from grmoe.model.choices_grmoe import OWN_CHOICE
from grmoe.probe.gates import AffineGate, affine_gates
from grmoe.probe.pieces import Pieces
from grmoe.probe.routing import recorded
from grmoe.probe.text import Stream
from grmoe.probe.typed_windows import TypedWindow, covering_starts, typed_windows
from grmoe.probe.windows import window_length
from grmoe.runs.open import LoadedModel

_MAX_TOKENS = 4096  # enough to know a mean to about one percent
MAX_NUMBERS = 140_000  # layers × tokens × experts of all models of a page: 370 kB
_MIN_PASSAGES = 8  # long windows are shortened for this
STEPS = 65535


@dataclass(frozen=True)
class LayerGates:
    """ℓ = a + α·b of one MoE layer, with b = −step · steps_TN."""

    a_N: Tensor
    """fp64."""
    step: float
    steps_TN: Tensor
    """int32, 0 … STEPS."""

    @property
    def b_TN(self) -> Tensor:
        """What the page computes with, fp64."""
        return -self.step * self.steps_TN.double()

    def as_json(self) -> dict[str, Any]:
        packed = self.steps_TN.numpy().astype("<u2").tobytes()
        scores = base64.b64encode(packed).decode("ascii")
        return {"a": self.a_N.tolist(), "step": self.step, "scores": scores}


@dataclass(frozen=True)
class Sample:
    dial: bool
    """Whether α moves these gates. Other routers are shown as they are, with a = 0 and α = 1."""
    layers: list[LayerGates]
    windows: list[dict[str, Any]]
    """Pieces, types and domain of each window. Their tokens in order are the T of the layers."""

    def as_json(self) -> dict[str, Any]:
        layers = [layer.as_json() for layer in self.layers]
        return {"dial": self.dial, "layers": layers, "windows": self.windows}


def sample_gates(loaded: LoadedModel, stream: Stream, models: int = 1) -> Sample:
    """Gates of windows spread evenly over the stream, at the model's present setting.

    models: how many models share the page.
    """
    config, pieces = loaded.model.config, Pieces(loaded.tokenizer)
    tokens = max(1, min(_MAX_TOKENS, MAX_NUMBERS // models // (len(config.moe_layers) * config.gate_experts)))
    length = max(1, min(window_length(loaded), tokens // _MIN_PASSAGES, stream.tokens))
    starts = covering_starts(stream.tokens, tokens // length * length, length)
    windows = list(typed_windows(stream, pieces, starts, length))
    ids_WS = torch.from_numpy(np.stack([window.ids_S for window in windows]))
    dial = config.router not in OWN_CHOICE
    gates = affine_gates(loaded.model, ids_WS) if dial else _fixed_gates(loaded.model, ids_WS)
    layers = [quantise(gate.a_TN[0], gate.b_TN) for gate in gates]
    return Sample(dial, layers, [_describe(window, pieces, stream) for window in windows])


def quantise(a_N: Tensor, b_TN: Tensor) -> LayerGates:
    finite = bool(torch.isfinite(a_N).all() and torch.isfinite(b_TN).all())
    require(finite, "the gates of this model are NaN or Inf")
    below_TN = (b_TN.amax(-1, keepdim=True) - b_TN).double().cpu()
    step = max(float(below_TN.max()), 1e-12) / STEPS
    return LayerGates(a_N.double().cpu(), step, (below_TN / step).round().int())


@torch.no_grad()
def _fixed_gates(model: GrmoeForCausalLM, ids_WS: Tensor) -> list[AffineGate]:
    """The logits of routers without a dial, as they are."""
    parts = []
    with recorded(model) as seen:
        for ids_S in ids_WS:
            seen.clear()
            model.model(input_ids=ids_S[None].to(model.device), use_cache=False)
            parts.append([routing.logits.flatten(0, -2) for routing in seen])
    layers = [torch.cat(logits) for logits in zip(*parts, strict=True)]
    return [AffineGate(torch.zeros_like(b_TN), b_TN) for b_TN in layers]


def _describe(window: TypedWindow, pieces: Pieces, stream: Stream) -> dict[str, Any]:
    return {
        "pieces": pieces.show(window.ids_S),
        "types": window.types_S.tolist(),
        "domain": stream.domain_names[int(window.domains_S[0])],
    }
