"""The next token from its logits, and whether rounding could have made it another one (see `near_ties`).

`TokenSampler` chooses what `model.generate` chooses on a CPU after `torch.manual_seed(seed)`: the largest logit, or a
sample by `torch.multinomial`, which is argmax p/q with q exponential.

Legend: V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from grmoe.serve.near_ties import MARGIN


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0
    """0 chooses the most probable token."""
    top_p: float = 1.0
    seed: int = 0


class TokenSampler:
    """Chooses the tokens of one answer. Each token has one draw of noise, however often it is computed."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.generator = torch.Generator().manual_seed(sampling.seed) if sampling.temperature else None
        self.noise_V: Tensor | None = None  # drawn when the token is first chosen

    def advance(self) -> None:
        """Go on to the next token."""
        self.noise_V = None

    def choose(self, logits_V: Tensor) -> tuple[int, bool]:
        """(token, whether the choice is clear) for fp32 logits on the CPU."""
        margin = MARGIN * max(1.0, float(logits_V.abs().max()))
        if self.generator is None:
            best = logits_V.topk(2).values
            return int(logits_V.argmax()), bool(best[0] - best[1] > margin)
        if self.noise_V is None:
            self.noise_V = torch.empty(len(logits_V)).exponential_(1, generator=self.generator)
        temperature, top_p = self.sampling.temperature, self.sampling.top_p
        scaled_V = logits_V / temperature
        ratio_V = _ratio(scaled_V, self.noise_V, top_p)
        token = int(ratio_V.argmax())
        best = ratio_V.topk(2).values.log()
        clear = bool(best[0] - best[1] > 2 * margin / temperature)
        if clear and top_p < 1:
            # Rounding may keep or drop a token at the edge of top_p. That matters if it would have been drawn.
            for factor in (1 - MARGIN, 1 + MARGIN):
                edge = min(1.0, top_p * factor)
                clear = clear and int(_ratio(scaled_V, self.noise_V, edge).argmax()) == token
        return token, clear


def _ratio(scaled_V: Tensor, noise_V: Tensor, top_p: float) -> Tensor:
    if top_p < 1:
        scaled_V = TopPLogitsWarper(top_p)(None, scaled_V.unsqueeze(0)).squeeze(0)
    return torch.softmax(scaled_V, dim=-1) / noise_V
