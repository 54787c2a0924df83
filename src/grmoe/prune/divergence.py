"""How far pruning moved a model's predictions.

Legend: W windows, S tokens per window, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grmoe.model import GrmoeForCausalLM
from grmoe.probe.windows import Text

TOKENS = 32768  # calibration tokens on which predictions are compared


class Divergence:
    """Mean KL(p⁰ ‖ p) of next-token distributions, nats per token.

    p⁰ is the model when this object was built, p the model at the call.

    The loss on few tokens also falls by luck, and a search among many candidates finds the lucky ones. The divergence
    compares whole distributions and is never below zero, so it has far less noise.
    """

    def __init__(self, model: GrmoeForCausalLM, text: Text) -> None:
        self.model, self.text = model, text.some(TOKENS)
        self.before = list(self._states())

    @torch.no_grad()
    def __call__(self) -> float:
        """The divergence of the model as it is now. Its routing metrics are reset."""
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        for before_WSD, now_WSD in zip(self.before, self._states(), strict=True):
            # One window at a time, so that the logits of only one exist.
            for before_SD, now_SD in zip(before_WSD, now_WSD, strict=True):
                p0_SV, p_SV = self._log_probs(before_SD), self._log_probs(now_SD)
                total += (p0_SV.exp() * (p0_SV - p_SV)).sum(dtype=torch.float64)
        self.model.reset_routing_metrics()
        return float(total) / self.text.tokens

    @torch.no_grad()
    def _states(self) -> Iterator[Tensor]:
        for rows_WS in self.text.batches(self.model.device):
            ids_WS = rows_WS[:, :-1].contiguous()
            yield self.model.model(input_ids=ids_WS, use_cache=False).last_hidden_state

    def _log_probs(self, x_SD: Tensor) -> Tensor:
        return torch.log_softmax(self.model.lm_head(x_SD).float(), dim=-1)
