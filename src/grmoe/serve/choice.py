"""The next token from its logits, and whether rounding could have made it another one.

`Choice` takes what `model.generate` takes on a CPU after `torch.manual_seed(seed)`: the largest logit, or a sample by
`torch.multinomial`, which is argmax p/q with q exponential. Logits of a batch differ from those of a batch of one in
their last bits; a choice is *steady* if it leads by more than that.

Legend: V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

# Of gate probabilities, and of logits as a share of the largest one. In fp32 a batch moves both by about 1e-6
# (benchmarks/rounding.py, docs/explanation/serving.md). This margin is far larger, and still rare enough to compute
# such rows twice.
MARGIN = 3e-5


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0  # 0: the most probable token
    top_p: float = 1.0
    seed: int = 0


class Choice:
    """The choices of one answer: every token has one draw of randomness, however often it is computed."""

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        self.sampling, self.vocab_size = sampling, vocab_size
        self.generator = torch.Generator().manual_seed(sampling.seed) if sampling.temperature else None
        self.draw()

    def draw(self) -> None:
        """Randomness for the next token."""
        self.noise_V: Tensor | None = None
        if self.generator is not None:
            self.noise_V = torch.empty(self.vocab_size).exponential_(1, generator=self.generator)

    def of(self, logits_V: Tensor) -> tuple[int, bool]:
        """(token, steady) for fp32 logits on the CPU."""
        margin = MARGIN * max(1.0, float(logits_V.abs().max()))
        if self.noise_V is None:
            best = logits_V.topk(2).values
            return int(logits_V.argmax()), bool(best[0] - best[1] > margin)
        scaled_V = logits_V / self.sampling.temperature
        ratio_V = self._ratio(scaled_V, self.noise_V, self.sampling.top_p)
        token = int(ratio_V.argmax())
        best = ratio_V.topk(2).values.log()
        steady = bool(best[0] - best[1] > 2 * margin / self.sampling.temperature)
        if steady and self.sampling.top_p < 1:
            # A token at the edge of the kept ones is there or not; that matters if it would have been the one drawn.
            for factor in (1 - MARGIN, 1 + MARGIN):
                top_p = min(1.0, self.sampling.top_p * factor)
                steady = steady and int(self._ratio(scaled_V, self.noise_V, top_p).argmax()) == token
        return token, steady

    @staticmethod
    def _ratio(scaled_V: Tensor, noise_V: Tensor, top_p: float) -> Tensor:
        if top_p < 1:
            scaled_V = TopPLogitsWarper(top_p)(None, scaled_V.unsqueeze(0)).squeeze(0)
        return torch.softmax(scaled_V, dim=-1) / noise_V
