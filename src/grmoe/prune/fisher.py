"""How much the loss depends on each expert: the Fisher information of its gate on calibration text.

Multiply expert e's combine weight on token t by m_te, which is one. With L the summed loss of a window,

    F_e = Σ_t (∂L/∂m_te)²,        ∂L/∂m_te = w_te·⟨∂L/∂y_t, f_e(x_t)⟩

F_e is the empirical Fisher information of the m_te, its diagonal summed over tokens. Dropping the expert sets its m_te
to zero. With the Fisher information in place of the Hessian, half of F_e estimates what that costs to second order.

Legend: N experts, W windows, S tokens per window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grmoe.model import GrmoeForCausalLM
from grmoe.probe.windows import Text
from grmoe.prune.choose import Method
from grmoe.prune.layers import TOKENS, Layout, PrunableLayer, drop
from grmoe.routing import Routing, routers, uncounted


def fisher_information(model: GrmoeForCausalLM, text: Text) -> list[Tensor]:
    """F_e for every MoE layer, (N,) fp64 each, on some tokens of a text. One window at a time, to save memory."""
    found = routers(model)
    sums = [torch.zeros(router.num_experts, dtype=torch.float64) for router in found]
    masks: list[Tensor] = []

    def masked(_module: object, _inputs: object, routing: Routing) -> Routing:
        masks.append(torch.ones_like(routing.weights, requires_grad=True))
        routing.weights = routing.weights * masks[-1]
        return routing

    hooks = [router.register_forward_hook(masked) for router in found]
    try:
        with uncounted(model), torch.enable_grad():
            for row_S in text.some(TOKENS).rows_WS:
                masks.clear()
                ids_S = row_S.to(model.device)[None]
                logits_SV = model(input_ids=ids_S[:, :-1], use_cache=False).logits[0].float()
                loss = torch.nn.functional.cross_entropy(logits_SV, ids_S[0, 1:], reduction="sum")
                for total_N, gradient in zip(sums, torch.autograd.grad(loss, masks), strict=True):
                    total_N += gradient.double().square().flatten(0, -2).sum(0).cpu()
    finally:
        for hook in hooks:
            hook.remove()
    return sums


def fisher_method(information: Sequence[Tensor]) -> Method:
    """Drop the group with the least Fisher information in every layer."""

    def step(layers: Sequence[PrunableLayer], layouts: Sequence[Layout]) -> list[Layout]:
        chosen = []
        for layout, F_N in zip(layouts, information, strict=True):
            each = [float(F_N[list(group)].sum()) for group in layout]
            chosen.append(drop(layout, each.index(min(each))))
        return chosen

    return step
