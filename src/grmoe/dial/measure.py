"""What a setting costs and does on a text: loss of every window, experts per token, entropy.

Legend: W windows, S tokens of a window, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from grmoe.dial.setting import Setting, apply, current
from grmoe.dial.text import Text
from grmoe.head import next_token_loss
from grmoe.model import GrmoeForCausalLM
from grmoe.routing import routers

ONE_SIDED = 1.645  # standard errors: 95 % of a normal distribution lie below


@dataclass(frozen=True, eq=False)
class Point:
    """A setting and what was measured with it. Routing figures are means over MoE layers."""

    setting: Setting
    family: str  # "trained", "top-k", "uniform", "per layer"
    losses_W: Tensor  # nats a token of each window, fp64 on the CPU
    experts: float  # computed per token
    layer_experts: tuple[float, ...]
    entropy: float
    effective_entropy: float  # exp(H) of each layer
    effective_inverse: float  # 1/Σg²

    @property
    def loss(self) -> float:
        return float(self.losses_W.mean())

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


@dataclass(frozen=True)
class Increase:
    """Perplexity against a baseline on the same windows, minus one: with the band of 1.645 paired standard errors."""

    value: float
    low: float
    high: float


def increase(point: Point, base: Point) -> Increase:
    """exp(Δ) − 1 with Δ = mean_w(ℓ_w − ℓ⁰_w) and its standard error s/√W.

    Paired: windows differ far more from each other than two settings do on one window.
    """
    delta_W = point.losses_W - base.losses_W
    mean = float(delta_W.mean())
    error = ONE_SIDED * float(delta_W.std()) / math.sqrt(len(delta_W))
    return Increase(math.expm1(mean), math.expm1(mean - error), math.expm1(mean + error))


class Meter:
    """Measures settings of one model on one text; no setting twice."""

    def __init__(
        self, model: GrmoeForCausalLM, text: Text, tick: Callable[[str], None] = lambda label: None
    ) -> None:
        self.model, self.text, self.tick = model, text, tick
        self.points: dict[Setting, Point] = {}
        self.trained = self.measure(current(model.config), "trained")

    @property
    def layers(self) -> int:
        return len(self.trained.setting.alphas)

    def measure(self, setting: Setting, family: str) -> Point:
        """The model is left at `setting`."""
        if setting not in self.points:
            apply(self.model, setting)
            self.points[setting] = measure(self.model, self.text, family)
            self.tick(family)
        return self.points[setting]


@torch.no_grad()
def measure(model: GrmoeForCausalLM, text: Text, family: str) -> Point:
    """The model as it stands."""
    rows = max(1, (16384 if model.device.type == "cuda" else 2048) // text.rows_WS.shape[1])
    model.reset_routing_metrics()
    parts = [window_losses(model, rows_WS.to(model.device)) for rows_WS in text.rows_WS.split(rows)]
    routing = [router.counter.read() for router in routers(model)]  # nobody asks about frames here
    model.reset_routing_metrics()
    setting, losses_W = current(model.config), torch.cat(parts).double().cpu()
    if not bool(torch.isfinite(losses_W).all()):
        raise ValueError(
            f"the loss must be finite to be compared, got NaN or Inf at {setting} on {text.name}"
        )
    return Point(
        setting,
        family,
        losses_W,
        fmean(m.experts_per_token for m in routing),
        tuple(m.experts_per_token for m in routing),
        fmean(m.entropy for m in routing),
        fmean(m.effective_experts_entropy for m in routing),
        fmean(m.effective_experts_inverse for m in routing),
    )


def window_losses(model: GrmoeForCausalLM, rows_WS: Tensor) -> Tensor:
    """Mean loss of each window, (W,)."""
    x_WSD = model.model(input_ids=rows_WS[:, :-1].contiguous(), use_cache=False).last_hidden_state
    count = torch.tensor(x_WSD.shape[1], device=x_WSD.device)
    weight = model.lm_head.weight
    # Window by window, so that the logits of one exist at a time.
    return torch.stack(
        [next_token_loss(x, weight, row[1:], count) for x, row in zip(x_WSD, rows_WS, strict=True)]
    )
