"""The training objective:

    L = M + β·Σ_layers O,        M = CE + c·Σ_layers R

CE  cross-entropy of the next token, nats per token; of conversations: the mean over all that the assistant says in a
    step, whatever its micro-batches and processes are
R   a router's own losses (load balancing, z-loss), with their coefficients; c is the model's `router_aux_loss_coef`.
    With `routing.entropy_weight` = w > 0 also w·mean over tokens of (H − η·log N)², H the entropy of a token's gate and
    η = `routing.entropy_target` (`grmoe.routing.entropy`). With `routing.leading_weight` = w > 0 also
    w·N·Σ_e s_e·(mean over tokens of p_e): p a token's gate, s_e the share of the tokens that expert e led in the step
    before (`grmoe.routing.leading`). With `model.residual_loss_coef` = r > 0 also r·mean over tokens of
    (log mean square of the residual stream before the layer)²
O   Σ_{e≠e'} max(0, ‖U_eᵀU_e'‖²_F − hinge), the overlap penalty (eq:subspace_reg). The hinge is ρ₀·k²/d, a share of the
    overlap of random subspaces, or the paper's ρ₀·k with `routing.overlap_unit=absolute`. β is
    `routing.overlap_weight`, ρ₀ is `routing.overlap_rho`

With random budgets (`elastic`) M is that of the drawn budgets. With `elastic.distill` = δ > 0 the full budget is
computed too, and the drawn one learns from its predictions (p: full, q: drawn; p carries no gradient):

    L = ½·(M_full + M_drawn) + δ·KL(p ‖ q) + β·Σ_layers O,        KL(p ‖ q) = mean over tokens of Σ_v p_v log(p_v / q_v)

The mean is over the tokens that CE has.

The mean of the two keeps the scale of gradients, so that clipping and β mean the same with and without distillation.
The log shows CE and R of the drawn budgets in both cases, and the divergence KL before its weight.

The model's forward pass computes M and returns its parts beside it (see `GrmoeCausalLMOutput`). The overlap depends on
the weights alone, so it is computed once per step and not once per micro-batch.

Legend: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grmoe.head import IGNORED
from grmoe.model import GrmoeForCausalLM
from grmoe.parallel.world import World, total
from grmoe.runs.config_groups import RoutingConfig


class LossParts(NamedTuple):
    """What the log says about a pass. 0-d tensors without gradients."""

    cross_entropy: Tensor
    router: Tensor
    """c·ΣR"""
    divergence: Tensor
    """KL(p ‖ q), before its weight δ"""


def overlap_term(model: GrmoeForCausalLM, config: RoutingConfig) -> Tensor:
    """ΣO. Pairs of experts are sampled from torch's default generator."""
    if not config.overlap_weight:
        return torch.zeros((), device=model.device)
    num_pairs = None if config.overlap_pairs == "all" else config.overlap_pairs
    relative = config.overlap_unit == "random"
    return model.overlap_penalty(config.overlap_rho, relative=relative, num_pairs=num_pairs)


def target_weights(micro_batches: Sequence[Tensor], world: World) -> list[Tensor]:
    """w of each micro-batch: its targets, divided by the mean over all micro-batches of all processes.

    The mean of w·CE over micro-batches and processes is then the mean over all targets. A negative token is no target.
    """
    targets_M = torch.stack([(rows_BS[:, 1:] >= 0).sum() for rows_BS in micro_batches])
    number = total(world, targets_M.sum()).clamp(min=1)
    return list((targets_M.double() * (len(micro_batches) * world.size) / number).unbind())


def weighted_loss(output: Any, weight: Tensor | None, coefficient: float) -> Tensor:
    """w·CE + c·ΣR of the model's output: M, with a weight for its targets. None: 1."""
    loss: Tensor = output.loss
    if weight is None:
        return loss
    weight = weight.to(loss.dtype)
    return weight * loss + (1 - weight) * coefficient * output.aux_loss


def model_loss(loss: Tensor, output: Any, distill: float, weight: Tensor | None = None) -> Tensor:
    """M. If the output was compared with the full budget: what its pass adds to L, ½·M + δ·w·KL. w: as of CE."""
    if output.divergence is None:
        return loss
    return loss / 2 + distill * _times(weight, output.divergence)


def _times(weight: Tensor | None, value: Tensor) -> Tensor:
    return value if weight is None else weight.to(value.dtype) * value


def loss_parts(output: Any, count: int, weight: Tensor | None = None) -> LossParts:
    """The part of one of `count` micro-batches in what is logged."""
    divergence, language = output.divergence, output.cross_entropy
    if divergence is None:
        divergence = torch.zeros_like(language)
    parts = (_times(weight, language), output.router_loss, _times(weight, divergence.detach()))
    return LossParts(*(part / count for part in parts))


def forward_loss(forward: Callable[..., Any], rows_BS: Tensor, **options: Any) -> Any:
    """The model's output for sequences (B, S + 1) on its device: the loss without the logits.

    A negative token −1 − id is context (`TokenDataset.read_rows`): the model reads it, and no loss counts on it.
    """
    ids_BS = torch.where(rows_BS < 0, ~rows_BS, rows_BS)
    targets = torch.where(rows_BS < 0, IGNORED, rows_BS)[:, 1:].contiguous()
    sequences = {"input_ids": ids_BS[:, :-1], "labels": targets, "shift_labels": targets}
    return forward(**sequences, use_cache=False, skip_logits=True, **options)
