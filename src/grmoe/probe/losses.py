"""What a model costs and does on a text: loss per window, experts per token, entropy; and how two models compare.

Legend: W windows, S tokens per window, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from grmoe.head import token_losses
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.routing import RoutingFigures, routing_figures
from grmoe.probe.windows import MIN_WINDOWS, Text
from grmoe.tables import percent

ONE_SIDED = 1.645  # standard errors: 95 % of a normal distribution lie below


@dataclass(frozen=True, eq=False, kw_only=True)
class Measurement(RoutingFigures):
    """A model on a text."""

    losses_W: Tensor
    """Nats per token of each window, fp64 on the CPU."""
    domains_W: tuple[str, ...] = ()
    """The domain of each window. Empty: not known."""

    @property
    def loss(self) -> float:
        return float(self.losses_W.mean())

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


@torch.no_grad()
def measure(model: GrmoeForCausalLM, text: Text) -> Measurement:
    """The model at its present setting. Its routing metrics are reset."""
    model.reset_routing_metrics()
    parts = [window_losses(model, rows_WS) for rows_WS in text.batches(model.device)]
    routing = routing_figures(model)
    model.reset_routing_metrics()
    losses_W = torch.cat(parts).cpu()
    if not bool(torch.isfinite(losses_W).all()):
        raise ValueError(f"the loss on {text.name} is NaN or Inf: nothing can be compared")
    return Measurement(losses_W=losses_W, domains_W=text.domains_W, **vars(routing))


def window_losses(model: GrmoeForCausalLM, rows_WS: Tensor) -> Tensor:
    """Mean loss of each window, (W,), fp64."""
    x_WSD = model.model(input_ids=rows_WS[:, :-1].contiguous(), use_cache=False).last_hidden_state
    loss_T = token_losses(x_WSD.flatten(0, 1), model.lm_head.weight, rows_WS[:, 1:].flatten())
    # In fp64 the order of the sum does not matter: a window's loss hardly depends on the windows beside it.
    return loss_T.view(len(rows_WS), -1).double().mean(-1)


@dataclass(frozen=True)
class Increase:
    """Relative change of perplexity, with a band of 1.645 paired standard errors (90 %)."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{percent(self.value)}, 90 % interval {percent(self.low)} to {percent(self.high)}"


def increase(measured: Measurement, base: Measurement) -> Increase:
    """exp(Δ) − 1 with Δ = mean_w(ℓ_w − ℓ⁰_w), both on the same windows.

    Paired: windows differ far more from each other than two settings do on one window.
    """
    return _increase(measured.losses_W - base.losses_W)


def increase_by_domain(measured: Measurement, base: Measurement) -> dict[str, Increase]:
    """`increase` on each domain of the text that has enough windows, in the order of the text."""
    delta_W, found = measured.losses_W - base.losses_W, {}
    for domain in dict.fromkeys(measured.domains_W):
        of_domain_W = torch.tensor([name == domain for name in measured.domains_W])
        if int(of_domain_W.sum()) >= MIN_WINDOWS:
            found[domain] = _increase(delta_W[of_domain_W])
    return found


def within(limit: float, whole: Increase, domains: Mapping[str, Increase], margin: float = 1.0) -> bool:
    """Whether perplexity grows by at most `limit` on the whole text, and on each of its domains.

    On the whole text the upper end of the interval counts. A domain has few windows and a wide interval, so there the
    increase itself counts. Without domains, the average would hide a kind of text on which the promise is broken.

    margin: the upper end may be at most limit / margin. Text of another kind can grow by more.
    """
    return margin * whole.high <= limit and all(part.value <= limit for part in domains.values())


def _increase(delta_W: Tensor) -> Increase:
    mean = float(delta_W.mean())
    error = ONE_SIDED * float(delta_W.std()) / math.sqrt(len(delta_W))
    return Increase(math.expm1(mean), math.expm1(mean - error), math.expm1(mean + error))


def verdict(grown: Increase, limit: float) -> str:
    """Whether a promise about perplexity held: "kept", or by how much it was missed, and whether noise decides."""
    if grown.value <= limit:
        return "kept" + ("" if grown.high <= limit else ", but the interval reaches past the limit")
    doubt = ", within its noise" if grown.low <= limit else ""
    return f"missed by {100 * (grown.value - limit):.2f} points{doubt}"
