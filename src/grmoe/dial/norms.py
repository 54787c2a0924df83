"""Mean output norm of every expert on calibration text: how much a unit of its gate moves the layer's output.

Legend: T tokens, D model width, N experts.
"""

from __future__ import annotations

import torch

from grmoe.dial.setting import Norms
from grmoe.layer import MoE
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.routing import layer_inputs, moe_layers
from grmoe.probe.windows import Text

TOKENS = 2048


def expert_norms(model: GrmoeForCausalLM, text: Text) -> Norms:
    """n_e = mean over all tokens of ‖f_e(x)‖, for each layer at the model's present setting. Four digits.

    Only ratios within a layer matter, so the mean over its experts is scaled to one.
    """
    inputs = layer_inputs(model, text.some(TOKENS).inputs_WS)
    return tuple(_norms(layer, x_TD) for layer, x_TD in zip(moe_layers(model), inputs, strict=True))


@torch.no_grad()
def _norms(layer: MoE, x_TD: torch.Tensor) -> tuple[float, ...]:
    experts, found = layer.experts, []
    for e in range(len(experts.down_proj)):
        y_TD = experts.activate(x_TD @ experts.up[e].T) @ experts.down_proj[e].T
        found.append(y_TD.double().norm(dim=-1).mean())
    norm_N = torch.stack(found)
    identity = norm_N.new_zeros(layer.router.identity_experts)
    # An expert that gives nothing still has a logarithm.
    scaled = torch.cat([norm_N / norm_N.mean(), identity]).clamp(min=1e-6)
    return tuple(float(f"{n:.4g}") for n in scaled.tolist())
