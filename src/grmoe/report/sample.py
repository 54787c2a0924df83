"""A sample of a model's gates that fits into a page: real tokens, and what each router makes of them at any α.

A gate's logits are affine in α, ℓ = a + α·b, and a (a prior the dial leaves alone) is the same for every token. A
softmax does not see a shift of a token's logits, so b is kept as its distance below the token's largest, in 16-bit
steps: off by at most half a step, range/131070.

Legend: T tokens, N experts, S tokens of a window.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grmoe.analyze.record import recorded
from grmoe.analyze.source import Stream, Window, windows
from grmoe.analyze.study import sequence_length
from grmoe.checks import require
from grmoe.dial.gates import layer_inputs, moe_layers
from grmoe.dial.text import Text
from grmoe.model import GrmoeForCausalLM
from grmoe.model.configuration_grmoe import OWN_CHOICE
from grmoe.probe.pieces import Pieces
from grmoe.runs.open import LoadedModel

TOKENS = 4096  # a mean of so many is known to about a percent
NUMBERS = 600_000  # of all layers, tokens and experts: 1.6 MB of the page
PASSAGES = 8  # at least, where windows are long
STEPS = 65535


@dataclass(frozen=True)
class LayerGates:
    """ℓ = a + α·b of one MoE layer, with b = −step · (16-bit numbers)."""

    a_N: Tensor  # fp64
    step: float
    steps_TN: Tensor  # int32, 0 … STEPS

    @property
    def b_TN(self) -> Tensor:
        """What the page computes with, fp64."""
        return -self.step * self.steps_TN.double()

    def as_json(self) -> dict[str, Any]:
        packed = self.steps_TN.numpy().astype("<u2").tobytes()
        return {
            "a": self.a_N.tolist(),
            "step": self.step,
            "scores": base64.b64encode(packed).decode("ascii"),
        }


@dataclass(frozen=True)
class Sample:
    """dial: whether α moves these gates; a router that chooses by itself is shown as it is, at a = 0 and α = 1."""

    dial: bool
    layers: list[LayerGates]
    windows: list[
        dict[str, Any]
    ]  # pieces, types and domain of each; their tokens in order are the T of the layers

    def as_json(self) -> dict[str, Any]:
        return {
            "dial": self.dial,
            "layers": [layer.as_json() for layer in self.layers],
            "windows": self.windows,
        }


def take(opened: LoadedModel, stream: Stream, share: int = 1) -> Sample:
    """Windows at even distances over the stream, routed at the setting the model has now.

    share: of how many runs in one page this is one.
    """
    config = opened.model.config
    most = min(TOKENS, NUMBERS // share // (len(config.moe_layers) * config.num_experts))
    length = max(1, min(sequence_length(opened), most // PASSAGES, stream.tokens - 1))
    pieces = Pieces(opened.tokenizer)
    # The last token of a window is only ever predicted: it is not routed.
    found = list(windows(stream, pieces, max(1, most // length) * (length + 1), length + 1))
    dial = config.router not in OWN_CHOICE
    gates = _gates(opened.model, found) if dial else _fixed(opened.model, found)
    require(
        all(bool(torch.isfinite(a).all() and torch.isfinite(b).all()) for a, b in gates),
        "gates of this model are NaN or Inf",
    )
    return Sample(
        dial, [quantise(a_N, b_TN) for a_N, b_TN in gates], [_shown(w, pieces, stream) for w in found]
    )


def quantise(a_N: Tensor, b_TN: Tensor) -> LayerGates:
    below_TN = (b_TN.amax(-1, keepdim=True) - b_TN).double().cpu()
    step = max(float(below_TN.max()), 1e-12) / STEPS
    return LayerGates(a_N.double().cpu(), step, (below_TN / step).round().int())


@torch.no_grad()
def _gates(model: GrmoeForCausalLM, found: list[Window]) -> list[tuple[Tensor, Tensor]]:
    """(a, b) of every layer, on the inputs it has at the present setting."""
    rows_WS = torch.from_numpy(np.stack([w.ids_S for w in found]))
    inputs = layer_inputs(model, Text("sample", rows_WS), rows_WS.numel())
    out = []
    for layer, x_TD, alpha in zip(moe_layers(model), inputs, model.alpha, strict=True):
        ends = []
        for value in (0.0, 1.0):
            layer.router.alpha = value
            ends.append(layer.router.gate(x_TD.float(), None))
        layer.router.alpha = alpha
        out.append((ends[0][0], ends[1] - ends[0]))
    return out


@torch.no_grad()
def _fixed(model: GrmoeForCausalLM, found: list[Window]) -> list[tuple[Tensor, Tensor]]:
    """The logits as they are, for routers without a dial."""
    parts: list[list[Tensor]] = []
    with recorded(model) as seen:
        for window in found:
            seen.clear()
            ids_S = torch.from_numpy(window.ids_S[:-1]).to(model.device)
            model.model(input_ids=ids_S[None], use_cache=False)
            parts.append([routing.logits.flatten(0, -2) for routing in seen])
    layers = [torch.cat(logits) for logits in zip(*parts, strict=True)]
    return [(torch.zeros(b_TN.shape[-1]), b_TN) for b_TN in layers]


def _shown(window: Window, pieces: Pieces, stream: Stream) -> dict[str, Any]:
    return {
        "pieces": pieces.show(window.ids_S[:-1]),
        "types": window.types_S[:-1].tolist(),
        "domain": stream.names[int(window.domains_S[0])],
    }
