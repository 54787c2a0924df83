"""Forward passes for many sequences, each at its own α, with answers of a batch of one.

A sequence is prefilled alone, exactly as `model.generate` does it. Then it takes its steps together with others, as a
row of one batch with a joint cache, padded on the left; α is one number for each row. What a batch changes are last
bits. Where they could decide (`choice`, `watch`), the sequence is computed again by itself, from its prompt on, and
goes back into the batch with the cache it should have. Without `together` every sequence is by itself all the time.

Legend: B sequences, L positions of the joint cache, V tokens of the vocabulary, M MoE layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from grmoe.model import GrmoeForCausalLM
from grmoe.routing import Router, routers, uncounted
from grmoe.serve.choice import Choice
from grmoe.serve.watch import Watch

# A sequence that is computed again so often, with ties all along, stays by itself: the effort is bounded.
MOST_TIES = 4


@dataclass(eq=False)
class Sequence:
    """An answer in the making."""

    prompt: list[int]
    alphas: tuple[float, ...]  # of each MoE layer
    choice: Choice
    tokens: list[int] = field(default_factory=list)  # of the answer
    experts: float = 0.0  # computed so far, the mean over layers
    cache: DynamicCache | None = None  # while it is by itself
    alone: bool = False  # stays by itself
    ties: int = 0  # how often it was computed again
    exact: bool = True  # so far every step was one of a batch of one

    @property
    def length(self) -> int:
        """Tokens in its cache: all but the last, which is the next input."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def experts_per_token(self) -> float:
        return self.experts / max(1, self.length)


def can_batch(model: GrmoeForCausalLM) -> bool:
    """Whether sequences of a batch leave each other's routing alone: with a capacity they do not."""
    kinds = {type(router) for router in routers(model)}
    return all(kind.select is Router.select and kind.route is Router.route for kind in kinds)


class Compute:
    """One model, many sequences. Not for several threads at once."""

    def __init__(self, model: GrmoeForCausalLM, together: bool) -> None:
        self.model, self.together = model.eval(), together
        self.guarded = model.dtype == torch.float32  # in 16 bits nearly everything is close
        self.routers = routers(model)
        self.watch = Watch(self.routers)
        self.batch: list[Sequence] = []
        self.cache = DynamicCache(config=model.config)
        self.pads: list[int] = []  # positions on the left of each row that mean nothing
        self.recomputed = 0

    @torch.no_grad()
    def start(self, sequence: Sequence) -> None:
        """Read the prompt; the first token of the answer."""
        logits_V = self._prefill(sequence)
        sequence.experts += self.watch.experts()[0]
        self._take(sequence, sequence.choice.of(logits_V)[0])
        sequence.alone = not self.together

    @torch.no_grad()
    def step(self, sequences: list[Sequence]) -> None:
        """One more token for each of these, which are all there are."""
        self._gather([s for s in sequences if not s.alone])
        if self.batch:
            self._step_together()
        for sequence in sequences:
            if sequence.alone and sequence not in self.batch:
                self._step_alone(sequence)

    def _step_together(self) -> None:
        device, L = self.model.device, self.cache.get_seq_length()
        pads_B = torch.tensor(self.pads, device=device)
        # No mask where nothing is padded, as `generate` has none: for a batch of one the same operations.
        mask = torch.arange(L + 1, device=device) >= pads_B.unsqueeze(1) if any(self.pads) else None
        logits_BV = self._forward(
            self.batch,
            torch.tensor([[s.tokens[-1]] for s in self.batch], device=device),
            self.cache,
            positions=(L - pads_B).unsqueeze(1),
            mask=mask,
        )
        experts = self.watch.experts()
        routed = self.watch.steady()
        for row, sequence in enumerate(self.batch):
            sequence.exact = sequence.exact and len(self.batch) == 1
            token, steady = sequence.choice.of(logits_BV[row])
            if self.guarded and not (sequence.exact or (steady and routed[row])):
                token = self._again(sequence)
            sequence.experts += experts[row]
            self._take(sequence, token)

    def _step_alone(self, sequence: Sequence) -> None:
        logits_V = self._decode(sequence, sequence.tokens[-1], sequence.length)
        sequence.experts += self.watch.experts()[0]
        self._take(sequence, sequence.choice.of(logits_V)[0])

    def _again(self, sequence: Sequence) -> int:
        """The next token of a sequence, by the operations of a batch of one from its prompt on."""
        self.recomputed += 1
        logits_V = self._prefill(sequence)
        for done, token in enumerate(sequence.tokens):
            logits_V = self._decode(sequence, token, len(sequence.prompt) + done)
        sequence.ties += 1
        sequence.exact, sequence.alone = True, sequence.ties == MOST_TIES
        return sequence.choice.of(logits_V)[0]

    def _take(self, sequence: Sequence, token: int) -> None:
        sequence.tokens.append(token)
        sequence.choice.draw()

    # -- forward passes ----------------------------------------------------------------------------------------

    def _prefill(self, sequence: Sequence) -> Tensor:
        sequence.cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([sequence.prompt], device=self.model.device)
        return self._forward([sequence], ids, sequence.cache)[0]

    def _decode(self, sequence: Sequence, token: int, position: int) -> Tensor:
        assert sequence.cache is not None
        place = torch.tensor([[position]], device=self.model.device)
        ids = torch.tensor([[token]], device=self.model.device)
        return self._forward([sequence], ids, sequence.cache, positions=place)[0]

    def _forward(
        self,
        sequences: list[Sequence],
        ids: Tensor,
        cache: DynamicCache,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, V) of the last position, fp32 on the CPU."""
        self.watch.start()
        set_dials(self.routers, [s.alphas for s in sequences])
        with uncounted(self.routers):  # nobody reads metrics of all requests together
            out = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits_BV: Tensor = out.logits[:, -1].float().cpu()
        return logits_BV

    def _gather(self, sequences: list[Sequence]) -> None:
        """Make the batch consist of these: rows that stay, and others with a cache of their own."""
        if sequences == self.batch and all(s.cache is None for s in sequences):
            return
        lengths = [s.length for s in sequences]
        L = max(lengths, default=0)
        before = {id(s): row for row, s in enumerate(self.batch)}
        joint = DynamicCache(config=self.model.config)
        for m in range(self.model.config.num_hidden_layers if sequences else 0):
            parts = [self._rows(s, before, m) for s in sequences]
            keys, values = (
                torch.cat([torch.nn.functional.pad(x, (0, 0, L - x.shape[2], 0)) for x in kind])
                for kind in zip(*parts, strict=True)
            )
            joint.update(keys, values, m)
        for sequence in sequences:
            sequence.cache = None
        self.batch, self.cache, self.pads = sequences, joint, [L - length for length in lengths]

    def _rows(self, sequence: Sequence, before: dict[int, int], layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (1, heads, length, width) of a sequence in a layer."""
        if sequence.cache is not None:
            own: Any = sequence.cache.layers[layer]
            return own.keys, own.values
        row = before[id(sequence)]
        pad = self.pads[row]
        joint: Any = self.cache.layers[layer]
        return joint.keys[row : row + 1, :, pad:], joint.values[row : row + 1, :, pad:]


def set_dials(found: list[Router], alphas: list[tuple[float, ...]]) -> None:
    """α of each sequence (outer) and layer (inner); one number for all where they agree, which kernels can take."""
    for m, router in enumerate(found):
        values = [a[m] for a in alphas]
        same = len(set(values)) == 1
        now = router.alpha_value.new_tensor(values[0] if same else values)
        router.alpha_value = now if same else now.view(-1, 1, 1)
