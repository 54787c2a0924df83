"""What computing answers in one batch changes, against each by itself: the reason for the margin in `grmoe serve`.

    python benchmarks/rounding.py runs/demo/model

The prompts of serve.py at its three α, greedy. Near ties are left as they fall, so that answers can change. No server.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from serve import ALPHAS, LENGTHS, PROMPTS

from grmoe.runs.open import open_model
from grmoe.serve.choice import Choice, Sampling
from grmoe.serve.compute import Compute, Sequence


class Seen(Choice):
    """Keeps the logits it chose from."""

    def of(self, logits_V: torch.Tensor) -> tuple[int, bool]:
        self.logits_V = logits_V
        return super().of(logits_V)


def rounding(folder: Path, dtype: torch.dtype) -> str:
    """All prompts at all α in one batch, near ties left as they fall, beside each by itself."""
    opened = open_model(folder, dtype=dtype)
    batch, single = Compute(opened.model, together=True), Compute(opened.model, together=False)
    batch.guarded = False
    layers, vocabulary = len(batch.routers), opened.model.config.vocab_size

    def begin(compute: Compute) -> list[Sequence]:
        made = []
        for prompt in PROMPTS:
            for alpha in ALPHAS:
                ids = opened.tokenizer(prompt).input_ids
                made.append(Sequence(ids, (alpha,) * layers, Seen(Sampling(), vocabulary)))
                compute.start(made[-1])
        return made

    rows, alone = begin(batch), begin(single)
    logit = gate = 0.0
    for _ in range(max(LENGTHS) - 1):
        batch.step(rows)
        routed = [routing.probs for _, routing in batch.watch.routings]
        for i, (row, other) in enumerate(zip(rows, alone, strict=True)):
            single.step([other])
            if row.tokens[:-1] == other.tokens[:-1]:
                assert isinstance(row.choice, Seen)
                assert isinstance(other.choice, Seen)
                right_V = other.choice.logits_V
                logit = max(logit, float((row.choice.logits_V - right_V).abs().max() / right_V.abs().max()))
                pairs = zip(routed, single.watch.routings, strict=True)
                gate = max(gate, *(float((p[i] - r.probs[0]).abs().max()) for p, (_, r) in pairs))
    changed = sum(row.tokens != other.tokens for row, other in zip(rows, alone, strict=True))
    return (
        f"{dtype}: a batch of {len(rows)} changes logits by at most {logit:.1e} of the largest, "
        f"gates by {gate:.1e},"
        f" and {changed} of {len(rows)} greedy answers of {max(LENGTHS)} tokens"
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
