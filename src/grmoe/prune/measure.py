"""How far surgery moved a model's predictions.

Legend: W windows, S tokens of a window, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grmoe.dial.text import Text
from grmoe.model import GrmoeForCausalLM

TOKENS = 32768  # of calibration text that predictions are compared on


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
