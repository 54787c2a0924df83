"""How much a batch changes logits, gates and answers, compared with each sequence alone.

    python benchmarks/rounding.py runs/demo/model

Uses the prompts of serve.py at its three α, greedy, without a server. Near ties are not computed again, so answers can
change.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from serve import ALPHAS, LENGTHS, PROMPTS

from grmoe.runs.open import open_model
from grmoe.serve.batching import BatchGenerator, Sequence
from grmoe.serve.sampling import Sampling, TokenSampler


class RecordingSampler(TokenSampler):
    """Keeps the logits it chose from."""

    logits_V: torch.Tensor

    def choose(self, logits_V: torch.Tensor) -> tuple[int, bool]:
        self.logits_V = logits_V
        return super().choose(logits_V)


def rounding(folder: Path, dtype: torch.dtype) -> str:
    """All prompts at all α in one batch, compared with each alone."""
    loaded = open_model(folder, dtype=dtype)
    batch, single = BatchGenerator(loaded.model, together=True), BatchGenerator(loaded.model, together=False)
    batch.repeat_ties = False
    trained = loaded.model.config.layer_numbers()

    def begin(generator: BatchGenerator) -> tuple[list[Sequence], list[RecordingSampler]]:
        samplers = [RecordingSampler(Sampling()) for _ in PROMPTS for _ in ALPHAS]
        pairs = [(prompt, alpha) for prompt in PROMPTS for alpha in ALPHAS]
        sequences = [
            Sequence(
                prompt=loaded.tokenizer(prompt).input_ids,
                numbers=tuple(numbers._replace(alpha=alpha) for numbers in trained),
                sampler=sampler,
            )
            for (prompt, alpha), sampler in zip(pairs, samplers, strict=True)
        ]
        for sequence in sequences:
            generator.start([sequence])
        return sequences, samplers

    (rows, seen), (alone, seen_alone) = begin(batch), begin(single)
    logit = gate = 0.0
    for _ in range(max(LENGTHS) - 1):
        batch.step(rows)
        routed = [routing.probs for routing in batch.routings]
        for i, (row, other) in enumerate(zip(rows, alone, strict=True)):
            single.step([other])
            if row.tokens[:-1] == other.tokens[:-1]:
                right_V = seen_alone[i].logits_V
                logit = max(logit, float((seen[i].logits_V - right_V).abs().max() / right_V.abs().max()))
                pairs = zip(routed, single.routings, strict=True)
                gate = max(gate, *(float((p[i] - r.probs[0]).abs().max()) for p, r in pairs))
    changed = sum(row.tokens != other.tokens for row, other in zip(rows, alone, strict=True))
    return (
        f"{dtype}: a batch of {len(rows)} changes logits by at most {logit:.1e} of the largest, "
        f"gates by {gate:.1e}, and {changed} of {len(rows)} greedy answers of {max(LENGTHS)} tokens"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    for dtype in (torch.float32, torch.bfloat16):
        print(rounding(given.folder, dtype), flush=True)


if __name__ == "__main__":
    main()
