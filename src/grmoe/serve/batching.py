"""Forward passes for many sequences, each at its own α or budget. Every sequence gets the tokens it would get alone.

A prompt is read alone, exactly as `model.generate` reads it. Then the sequence takes its steps as one row of a batch
with a joint cache, padded on the left, with one τ, α and cap per row. A batch changes the last bits of logits and
gates. Where these bits could decide (`near_ties`), the sequence is computed again alone, from its prompt on, and goes
back into the batch with the cache of that computation. With `together=False` every sequence is computed alone all the
time.

Legend: B sequences, S tokens of an input, D model width, L positions of the joint cache, V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from grmoe.model import GrmoeForCausalLM
from grmoe.probe.routing import recorded
from grmoe.routing import BY_RANK, LayerNumbers, Router, Routing, routers
from grmoe.serve.near_ties import clear_experts
from grmoe.serve.sampling import TokenSampler
from grmoe.serve.scores import Score, score_prompt, score_token

# A sequence with this many near ties leaves the batch permanently, which bounds the work.
MAX_TIES = 4


@dataclass(eq=False, kw_only=True)
class Sequence:
    """A prompt and the answer so far."""

    prompt: list[int]
    numbers: tuple[LayerNumbers, ...]
    """τ, α and cap of each MoE layer."""
    budget: float | None = None
    """Experts per token that `numbers` stand for; None: α with the trained selection."""
    sampler: TokenSampler
    alternatives: int | None = None
    """Most probable tokens to keep at each position beside the token's own log-probability. None: no scores."""
    score_prompt: bool = False
    """Score the tokens of the prompt too."""
    answer: bool = True
    """Whether an answer is written. Without one, only the prompt is read."""
    tokens: list[int] = field(default_factory=list)
    """Of the answer."""
    scores: list[Score] = field(default_factory=list)
    """Of the prompt if it is scored, then of the answer."""
    started: bool = False
    """Whether the prompt was read."""
    experts: float = 0.0
    """Experts computed so far: the sum over tokens, the mean over layers."""
    cache: DynamicCache | None = None
    """Its own cache; None while it is a row of the batch."""
    alone: bool = False
    """Whether it stays outside the batch."""
    ties: int = 0
    """How often it was computed again."""
    exact: bool = True
    """Whether all steps in its cache were those of a batch of one."""

    @property
    def alphas(self) -> list[float]:
        """α of each MoE layer."""
        return [numbers.alpha for numbers in self.numbers]

    @property
    def length(self) -> int:
        """Tokens in its cache: all but the answer's last one, which is the next input."""
        return len(self.prompt) + max(0, len(self.tokens) - 1) if self.started else 0

    @property
    def experts_per_token(self) -> float | None:
        return self.experts / self.length if self.length else None


def can_batch(model: GrmoeForCausalLM) -> bool:
    """Whether sequences can share a batch."""
    return not why_not_batch(model)


def why_not_batch(model: GrmoeForCausalLM) -> str:
    """Why sequences cannot share a batch; empty where they can.

    A sequence's positions and routing must be independent of the rest of the batch. With a capacity routing is not.
    It must also show near ties: where the weights have an α of their own, it does so only if α multiplies all of the
    gate (`choosing_gate`).
    """
    if model.config.attention_heads_per_token is not None:
        return "a batch rounds differently, and heads that nearly tie are not computed again as experts are"
    rope = model.model.rotary_emb.rope_type
    if rope in ("dynamic", "longrope"):
        return f"rope_type {rope!r} takes its frequencies from the longest sequence of a batch"
    found = routers(model)
    if any(type(r).select is not Router.select or type(r).route is not Router.route for r in found):
        return f"router {model.config.router!r} routes sequences of a batch together"
    if any(r.budget.weighs_apart and getattr(r, "dial", "posterior") != "posterior" for r in found):
        return "weight_alpha with the dial 'likelihood' hides near ties"
    return ""


class BatchGenerator:
    """One model, many sequences. For one thread at a time."""

    def __init__(self, model: GrmoeForCausalLM, together: bool) -> None:
        self.model, self.together = model.eval(), together
        self.repeat_ties = model.dtype == torch.float32  # in 16 bits nearly every choice is a near tie
        self.routers = routers(model)
        self.routings: list[Routing] = []  # of each layer, in the last forward pass
        self.batch: list[Sequence] = []
        self.cache = DynamicCache(config=model.config)
        self.pads: list[int] = []  # unused positions on the left of each row
        self.recomputed = 0  # near ties

    def takes(self, sequences: list[Sequence]) -> bool:
        """Whether `start` reads these prompts at once. One prompt is always taken."""
        return len(sequences) == 1

    @torch.no_grad()
    def start(self, sequences: list[Sequence]) -> None:
        """Read the prompts, score them if asked, and choose the first token of each answer."""
        for sequence in sequences:
            logits_V, hidden_SD = self._prefill(sequence)
            self._begin(sequence, logits_V, hidden_SD)
            sequence.experts += self._experts()[0]

    def _begin(self, sequence: Sequence, logits_V: Tensor, hidden_SD: Tensor) -> None:
        sequence.alone = not self.together
        if sequence.score_prompt and sequence.alternatives is not None:
            head = self.model.lm_head
            sequence.scores = score_prompt(hidden_SD, head, sequence.prompt, sequence.alternatives)
        if sequence.answer:
            self._append(sequence, sequence.sampler.choose(logits_V)[0], logits_V)
        sequence.started = True

    @torch.no_grad()
    def step(self, sequences: list[Sequence]) -> None:
        """One more token for each sequence. Sequences that are not given leave the batch."""
        self._gather([s for s in sequences if not s.alone])
        if self.batch:
            self._step_together()
        for sequence in sequences:
            if sequence.alone and sequence not in self.batch:
                logits_V = self._decode(sequence, sequence.tokens[-1], sequence.length)
                self._append(sequence, sequence.sampler.choose(logits_V)[0], logits_V)
                sequence.experts += self._experts()[0]

    def _step_together(self) -> None:
        device, L = self.model.device, self.cache.get_seq_length()
        pads_B = torch.tensor(self.pads, device=device)
        # Without padding there is no mask, as in `generate`: a batch of one then runs the same operations.
        mask = torch.arange(L + 1, device=device) >= pads_B.unsqueeze(1) if any(self.pads) else None
        logits_BV, _ = self._forward(
            self.batch,
            torch.tensor([[s.tokens[-1]] for s in self.batch], device=device),
            self.cache,
            positions=(L - pads_B).unsqueeze(1),
            mask=mask,
        )
        experts = self._experts()
        pairs = zip(self.routers, self.routings, strict=True)
        routed = torch.stack([clear_experts(*pair) for pair in pairs]).all(0).tolist()
        for row, sequence in enumerate(self.batch):
            sequence.exact = sequence.exact and len(self.batch) == 1
            logits_V = logits_BV[row]
            token, clear = sequence.sampler.choose(logits_V)
            if self.repeat_ties and not (sequence.exact or (clear and routed[row])):
                logits_V = self._repeat_alone(sequence)
                token, _ = sequence.sampler.choose(logits_V)
            self._append(sequence, token, logits_V)
            sequence.experts += experts[row]

    def _repeat_alone(self, sequence: Sequence) -> Tensor:
        """The logits (V,) of the next token by the operations of a batch of one, from the prompt on."""
        self.recomputed += 1
        logits_V, _ = self._prefill(sequence)
        for done, token in enumerate(sequence.tokens):
            logits_V = self._decode(sequence, token, len(sequence.prompt) + done)
        sequence.ties += 1
        sequence.exact, sequence.alone = True, sequence.ties == MAX_TIES
        return logits_V

    def _append(self, sequence: Sequence, token: int, logits_V: Tensor | None) -> None:
        """Add a token. Logits are needed only where it is scored."""
        if sequence.alternatives is not None:
            assert logits_V is not None
            sequence.scores.append(score_token(logits_V, token, sequence.alternatives))
        sequence.tokens.append(token)
        sequence.sampler.advance()

    def _experts(self) -> list[float]:
        """Experts computed for each sequence in the last pass: the sum over its tokens, the mean over layers."""
        counts_B = torch.stack([r.computed for r in self.routings]).transpose(0, 1).flatten(1).sum(-1)
        return [count / len(self.routings) for count in counts_B.tolist()]

    # -- forward passes ----------------------------------------------------------------------------------------

    def _prefill(self, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """Logits (V,) of the last position, and the hidden states (S, D) of all."""
        sequence.cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([sequence.prompt], device=self.model.device)
        logits_BV, hidden_BSD = self._forward([sequence], ids, sequence.cache)
        return logits_BV[0], hidden_BSD[0]

    def _decode(self, sequence: Sequence, token: int, position: int) -> Tensor:
        assert sequence.cache is not None
        place = torch.tensor([[position]], device=self.model.device)
        ids = torch.tensor([[token]], device=self.model.device)
        return self._forward([sequence], ids, sequence.cache, positions=place)[0][0]

    def _forward(
        self,
        sequences: list[Sequence],
        ids: Tensor,
        cache: DynamicCache,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        last: list[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits (B, V), fp32 on the CPU, and hidden states (B, S, D) where they were computed.

        last: position of each row that the logits are of; None: the last one.
        """
        set_numbers(self.routers, [s.numbers for s in sequences])
        with recorded(self.model) as self.routings:
            hidden_BSD: Tensor = self.model.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        # As `generate` does, which keeps the logits of one position alone.
        used_B1D = hidden_BSD[:, -1:]
        if last is not None:
            rows_B = torch.arange(len(last), device=hidden_BSD.device)
            used_B1D = hidden_BSD[rows_B, torch.tensor(last, device=hidden_BSD.device)].unsqueeze(1)
        logits_BV: Tensor = self.model.lm_head(used_B1D)[:, -1].float().cpu()
        return logits_BV, hidden_BSD

    def _gather(self, sequences: list[Sequence]) -> None:
        """Make these sequences the rows of the batch: some are rows already, others bring their own cache."""
        if sequences == self.batch and all(s.cache is None for s in sequences):
            return
        lengths = [s.length for s in sequences]
        L = max(lengths, default=0)
        before = {id(s): row for row, s in enumerate(self.batch)}
        joint = DynamicCache(config=self.model.config)
        for layer in range(self.model.config.num_hidden_layers if sequences else 0):
            parts = [self._rows(s, before, layer) for s in sequences]
            keys, values = (
                torch.cat([pad(x, (0, 0, L - x.shape[2], 0)) for x in kind])
                for kind in zip(*parts, strict=True)
            )
            joint.update(keys, values, layer)
        for sequence in sequences:
            sequence.cache = None
        self.batch, self.cache, self.pads = sequences, joint, [L - length for length in lengths]

    def _rows(self, sequence: Sequence, before: dict[int, int], layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (1, heads, length, width) of a sequence in a layer."""
        if sequence.cache is not None:
            cached: Any = sequence.cache.layers[layer]
            return cached.keys, cached.values
        row = before[id(sequence)]
        joint: Any = self.cache.layers[layer]
        used = (slice(row, row + 1), slice(None), slice(self.pads[row], None))
        return joint.keys[used], joint.values[used]


def set_numbers(found: list[Router], numbers: list[tuple[LayerNumbers, ...]]) -> None:
    """Set the routers to one τ, α, cap and bias per sequence (outer) and layer (inner).

    Where all sequences agree, the router gets one number: its kernels are made for that.
    """
    for layer, router in enumerate(found):
        taus, alphas, caps, biases = zip(*(sequence[layer] for sequence in numbers), strict=True)
        router.alpha_value = _by_sequence(router.alpha_value, alphas)
        if not isinstance(router.selection, BY_RANK):  # one rule for all sequences
            continue
        router.budget.tau = _by_sequence(router.budget.tau, taus)
        router.budget.cap = _by_sequence(router.budget.cap, caps)
        if router.budget.biased:
            router.budget.bias = _biases(router.budget.bias, biases)


def _by_sequence(like: Tensor, values: tuple[float, ...]) -> Tensor:
    """0-d, or (B, 1, 1) where the values differ."""
    if len(set(values)) == 1:
        return like.new_tensor(values[0])
    return like.new_tensor(values).view(-1, 1, 1)


def _biases(like: Tensor, values: tuple[tuple[float, ...] | None, ...]) -> Tensor:
    """(N,), or (B, 1, N) where they differ."""
    N = like.shape[-1]
    rows = [(0.0,) * N if value is None else value for value in values]
    return like.new_tensor(rows[0]) if len(set(rows)) == 1 else like.new_tensor(rows).unsqueeze(1)
