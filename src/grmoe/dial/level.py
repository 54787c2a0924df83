"""Even loads: a bias for the choice of experts, so that every expert receives its share of the tokens at a setting.

Training evens out the load of the trained setting. With fewer experts per token the load is another one. The bias
changes which experts are chosen where gates are close. The weights stay those of the gate.

Legend: T tokens, N experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grmoe.dial.setting import Setting
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.gates import affine_gates
from grmoe.probe.windows import Text
from grmoe.routing.selection import NO_LIMIT, largest

TOKENS = 32768  # of the text, evenly spread
STEPS, RATE, DECAY = 80, 0.4, 0.95


class Levels:
    """Levels settings by the gates that a model has on a text at its present setting.

    Another setting of one layer moves the inputs of the next a little. What remains uneven is measured afterwards.
    """

    def __init__(self, model: GrmoeForCausalLM, text: Text) -> None:
        every = max(1, text.tokens // TOKENS)
        self.gates = affine_gates(model, text.inputs_WS[::every])

    def __call__(self, setting: Setting) -> Setting:
        """The setting with a bias that evens out its load. A threshold and a dense gate stay as they are."""
        if setting.selection not in ("mass", "topk"):
            return setting
        plain = replace(setting, level=None)
        layers = len(self.gates)
        biases = plain.bias or [[0.0] * self.gates[0].a_TN.shape[-1]] * layers
        caps = setting.caps or (setting.cap,) * layers
        tau = NO_LIMIT if setting.tau is None else setting.tau
        levels = []
        for gate, alpha, bias, cap in zip(self.gates, setting.alphas, biases, caps, strict=True):
            logits_TN = gate.a_TN + alpha * gate.b_TN
            level_N = even_bias(logits_TN + logits_TN.new_tensor(bias), tau, cap)
            levels.append(tuple(round(value, 4) for value in level_N.tolist()))
        return replace(plain, level=tuple(levels))


def even_bias(logits_TN: Tensor, tau: float, cap: int) -> Tensor:
    """b_N with an even load of "the most probable experts of softmax(ℓ + b), at most cap, up to τ".

    b ← b + η(1 − N·share), the rule of the balanced prior, with a falling η. Returns the best b on the way.
    """
    N = logits_TN.shape[-1]
    tau_, cap_ = logits_TN.new_tensor(tau), torch.tensor(cap, device=logits_TN.device)
    bias_N = best_N = logits_TN.new_zeros(N)
    least = logits_TN.new_tensor(torch.inf)
    for step in range(STEPS):
        chosen_TN = largest(torch.softmax(logits_TN + bias_N, -1), tau_, cap_)
        load_N = chosen_TN.to(logits_TN.dtype).mean(0)
        excess_N = N * load_N / load_N.sum() - 1
        spread = excess_N.square().mean()
        best_N = torch.where(spread < least, bias_N, best_N)
        least = torch.minimum(spread, least)
        bias_N = bias_N - RATE * DECAY**step * excess_N
    return best_N - best_N.mean()
