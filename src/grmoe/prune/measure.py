"""What surgery did to a model: its loss on a text, as `grmoe dial` measures it, and how far its predictions moved.

Legend: W windows, S tokens of a window, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import torch
from torch import Tensor

from grmoe.dial.measure import Point, window_losses
from grmoe.dial.setting import current
from grmoe.dial.text import Text
from grmoe.model import GrmoeForCausalLM
from grmoe.routing import routers

TOKENS = 32768  # of calibration text that predictions are compared on


@torch.no_grad()
def measure(model: GrmoeForCausalLM, text: Text) -> Point:
    """The model as it stands. `Meter` would also take principal angles of all frames, which nobody reads here."""
    rows = max(1, (16384 if model.device.type == "cuda" else 2048) // text.rows_WS.shape[1])
    model.reset_routing_metrics()
    parts = [window_losses(model, rows_WS.to(model.device)) for rows_WS in text.rows_WS.split(rows)]
    losses_W = torch.cat(parts).double().cpu()
    if not bool(torch.isfinite(losses_W).all()):
        raise ValueError(f"the loss must be finite to be compared, got NaN or Inf on {text.name}")
    metrics = [router.metrics.read() for router in routers(model)]
    model.reset_routing_metrics()
    return Point(
        current(model.config),
        "pruned",
        losses_W,
        fmean(m.experts_computed for m in metrics),
        tuple(m.experts_computed for m in metrics),
        fmean(m.entropy for m in metrics),
        fmean(m.effective_experts_entropy for m in metrics),
        fmean(m.effective_experts_inverse for m in metrics),
    )


class Divergence:
    """Mean KL(p⁰ ‖ p) of next-token distributions, nats a token: p⁰ of the model as it was here, p as it is when asked.

    A loss on few tokens also falls by luck, and a search among many candidates finds the lucky ones. The divergence
    looks at whole distributions and is never below zero: it measures the damage itself, with far less noise.
    """

    def __init__(self, model: GrmoeForCausalLM, text: Text) -> None:
        self.model = model
        self.rows_WS = text.rows_WS[: max(1, TOKENS // (text.rows_WS.shape[1] - 1))]
        self.batch = max(1, (16384 if model.device.type == "cuda" else 2048) // text.rows_WS.shape[1])
        self.before = list(self._states())

    @torch.no_grad()
    def __call__(self) -> float:
        """The model's metrics are reset."""
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        for before_WSD, now_WSD in zip(self.before, self._states(), strict=True):
            # Window by window, so that the logits of one exist at a time.
            for before_SD, now_SD in zip(before_WSD, now_WSD, strict=True):
                p0_SV, p_SV = self._log_probs(before_SD), self._log_probs(now_SD)
                total += (p0_SV.exp() * (p0_SV - p_SV)).sum(dtype=torch.float64)
        self.model.reset_routing_metrics()
        return float(total) / (self.rows_WS.shape[0] * (self.rows_WS.shape[1] - 1))

    @torch.no_grad()
    def _states(self) -> Iterator[Tensor]:
        for rows_WS in self.rows_WS.split(self.batch):
            ids_WS = rows_WS[:, :-1].contiguous().to(self.model.device)
            yield self.model.model(input_ids=ids_WS, use_cache=False).last_hidden_state

    def _log_probs(self, x_SD: Tensor) -> Tensor:
        return torch.log_softmax(self.model.lm_head(x_SD).float(), dim=-1)
