"""Decoding by CUDA graphs: one replay per step, for all sequences of a batch.

A step of a small batch takes the device less time than the host needs to launch its kernels. So everything a step reads
lies in buffers that stay where they are: tokens, positions, τ, α and cap of each row, and a cache of fixed length. Rows
and length are rounded up to few sizes. A size is captured by `capture`, or the first time it is needed. On a CPU the
same operations run without a graph.

All graphs share one pool of memory. They run one after the other, and no step reads what another left there: results
are copied into buffers outside.

Prompts that wait are read together, padded on the right. A causal model never looks there.

A batch rounds differently from a single sequence, and near ties are not computed again. Answers may therefore differ
from those of a single request.

Legend: R rows, B rows of a step, L positions of a step, V tokens of the vocabulary, N experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from grmoe.model import GrmoeForCausalLM
from grmoe.probe.routing import recorded
from grmoe.probe.timing import warmed_up
from grmoe.routing import BY_RANK
from grmoe.serve.batching import BatchGenerator, Sequence

SHORTEST = 256  # positions of a step; longer ones are powers of two
# Tokens of prompts that are read at once, padding included: enough to fill a GPU. Answers that run wait meanwhile.
PROMPT_TOKENS = 4096


class RowCache:
    """Keys and values of all rows, (layers, 2, R, heads, length, width), and the part that a step uses."""

    def __init__(self, model: GrmoeForCausalLM, rows: int) -> None:
        config: Any = model.config
        size = (rows, config.num_key_value_heads, config.max_position_embeddings, config.head_dim)
        self.held = torch.zeros(config.num_hidden_layers, 2, *size, dtype=model.dtype, device=model.device)
        self.rows_R = torch.arange(rows, device=model.device)
        self.step: tuple[Tensor, int] = (self.rows_R, 0)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What attention calls: write one position per row, and return all."""
        position_B, L = self.step
        held, row_B = self.held[layer], self.rows_R[: len(position_B)]
        for kind, new in enumerate((keys, values)):
            held[kind][row_B, :, position_B] = new[:, :, 0]
        used = held[:, : len(position_B), :, :L]
        return used[0], used[1]

    def put(self, row: int, sequence: Sequence) -> None:
        """Copy a sequence's own cache into a row."""
        assert sequence.cache is not None
        for held, layer in zip(self.held, sequence.cache.layers, strict=True):
            own: Any = layer
            held[0, row, :, : sequence.length] = own.keys[0]
            held[1, row, :, : sequence.length] = own.values[0]

    def move(self, source: int, target: int, length: int) -> None:
        self.held[:, :, target, :, :length] = self.held[:, :, source, :, :length]


class GraphGenerator(BatchGenerator):
    """As `BatchGenerator` with together=True, for at most `rows` sequences."""

    def __init__(self, model: GrmoeForCausalLM, rows: int) -> None:
        super().__init__(model, together=True)
        self.repeat_ties = False
        self.rows = RowCache(model, rows)
        device, layers = model.device, len(self.routers)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.inputs = zeros(2, rows, dtype=torch.int64)  # tokens and positions
        # Unused rows compute too: with τ = α = cap = 1 they touch one expert per layer.
        self.tau, self.alpha = (zeros(layers, rows, 1, 1) + 1 for _ in range(2))
        self.cap = zeros(layers, rows, 1, 1, dtype=torch.int32) + 1
        self.bias = zeros(layers, rows, 1, model.config.gate_experts)
        self.logits_RV = zeros(rows, model.config.vocab_size)
        self.next_R = zeros(rows, dtype=torch.int64)
        self.experts_R = zeros(rows)
        self.replays: dict[tuple[int, int], Callable[[], object]] = {}
        self.captures = device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if self.captures else None

    def capture(self, positions: Iterable[int], rows: int | None = None) -> int:
        """Capture all sizes of steps over these numbers of positions, by 1 to `rows` sequences (None: all rows).

        Return how many were new. No other thread may use the model meanwhile. The largest comes first, and the others
        then fit into its memory.
        """
        counts = range(1, 1 + (len(self.next_R) if rows is None else rows))
        lengths = {self._round_length(each) for each in positions}
        wanted = {(self._round_rows(count), length) for count in counts for length in lengths}
        new = sorted(wanted - self.replays.keys(), reverse=True)
        for size in new:
            self._replay(size)
        return len(new)

    def _replay(self, size: tuple[int, int]) -> Callable[[], object]:
        """A step of this size. Its capture may run it several times: a row writes the same values again."""
        if size not in self.replays:
            self.replays[size] = warmed_up(lambda: self._compute(*size), self.model.device, self.pool)
        return self.replays[size]

    def takes(self, sequences: list[Sequence]) -> bool:
        longest = max(len(s.prompt) for s in sequences)
        return len(sequences) == 1 or longest * len(sequences) <= PROMPT_TOKENS

    @torch.no_grad()
    def start(self, sequences: list[Sequence]) -> None:
        if len(sequences) == 1:
            super().start(sequences)
            return
        lengths = [len(s.prompt) for s in sequences]
        S, device = max(lengths), self.model.device
        ids = torch.tensor([s.prompt + [0] * (S - len(s.prompt)) for s in sequences], device=device)
        cache = DynamicCache(config=self.model.config)
        logits_BV, hidden_BSD = self._forward(sequences, ids, cache, last=[length - 1 for length in lengths])
        real_BS1 = torch.arange(S, device=device).view(1, S, 1) < torch.tensor(lengths, device=device).view(
            -1, 1, 1
        )
        counts = torch.stack([(r.computed & real_BS1).flatten(1).sum(-1) for r in self.routings])
        rows = zip(sequences, lengths, counts.float().mean(0).tolist(), strict=True)
        for row, (sequence, length, experts) in enumerate(rows):
            sequence.cache = DynamicCache(config=self.model.config)
            for number, layer in enumerate(cache.layers):
                held: Any = layer
                used = (slice(row, row + 1), slice(None), slice(length))
                sequence.cache.update(held.keys[used], held.values[used], number)
            self._begin(sequence, logits_BV[row], hidden_BSD[row, :length])
            sequence.experts += experts

    def _step_together(self) -> None:
        count, longest = len(self.batch), max(s.length for s in self.batch) + 1
        given = [[s.tokens[-1] for s in self.batch], [s.length for s in self.batch]]
        self.inputs[:, :count] = torch.tensor(given)
        self._replay((self._round_rows(count), self._round_length(longest)))()
        asked = any(s.alternatives is not None or s.sampler.generator is not None for s in self.batch)
        logits_BV = self.logits_RV[:count].cpu() if asked else None
        found = zip(self.batch, self.next_R[:count].tolist(), self.experts_R[:count].tolist(), strict=True)
        for row, (sequence, token, experts) in enumerate(found):
            logits_V = None if logits_BV is None else logits_BV[row]
            if logits_V is not None and sequence.sampler.generator is not None:
                token, _ = sequence.sampler.choose(logits_V)
            self._append(sequence, token, logits_V)
            sequence.experts += experts

    @torch.no_grad()
    def _compute(self, B: int, L: int) -> None:
        """One step of the first B rows, over L positions. Nothing here may wait for the device."""
        tokens_B, position_B = self.inputs[:, :B]
        self._set_rows(B)
        self.rows.step = (position_B, L)
        mask = torch.arange(L, device=position_B.device) <= position_B.view(-1, 1, 1, 1)
        with recorded(self.model) as routings:
            hidden_B1D: Tensor = self.model.model(
                input_ids=tokens_B.unsqueeze(1),
                attention_mask=mask,
                position_ids=position_B.unsqueeze(1),
                past_key_values=self.rows,  # attention calls `update` alone
                use_cache=True,
            ).last_hidden_state
        logits_BV = self.model.lm_head(hidden_B1D)[:, -1].float()
        self.logits_RV[:B].copy_(logits_BV)
        self.next_R[:B].copy_(logits_BV.argmax(-1))
        counts = torch.stack([r.computed for r in routings]).flatten(2).sum(-1)
        self.experts_R[:B].copy_(counts.float().mean(0))

    def _set_rows(self, B: int) -> None:
        """Let the routers read the buffers, as `set_numbers` sets numbers per sequence."""
        for layer, router in enumerate(self.routers):
            router.alpha_value = self.alpha[layer, :B]
            if isinstance(router.selection, BY_RANK):
                router.budget.tau, router.budget.cap = self.tau[layer, :B], self.cap[layer, :B]
                if router.budget.biased:
                    router.budget.bias = self.bias[layer, :B]

    def _round_rows(self, count: int) -> int:
        """1, 2, 4, or a multiple of 8."""
        size = 1 << (count - 1).bit_length() if count <= 4 else -(-count // 8) * 8
        return min(size, len(self.next_R))

    def _round_length(self, length: int) -> int:
        longest: int = self.model.config.max_position_embeddings
        return min(longest, max(SHORTEST, 1 << (length - 1).bit_length()))

    def _gather(self, sequences: list[Sequence]) -> None:
        """Make these sequences the first rows. Those that stay keep their row if they can."""
        if {id(s) for s in sequences} == {id(s) for s in self.batch}:
            return
        wanted = {id(s) for s in sequences}
        before = {id(s): row for row, s in enumerate(self.batch) if id(s) in wanted}
        rows: list[Sequence | None] = [None] * len(sequences)
        for sequence in sequences:
            if before.get(id(sequence), len(rows)) < len(rows):
                rows[before[id(sequence)]] = sequence
        placed = {id(s) for s in rows if s is not None}
        others = iter([s for s in sequences if id(s) not in placed])
        for row, kept in enumerate(rows):
            if kept is not None:
                continue
            sequence = rows[row] = next(others)
            if sequence.cache is None:
                self.rows.move(before[id(sequence)], row, sequence.length)
            else:
                self.rows.put(row, sequence)
            sequence.cache = None
        self.batch = [s for s in rows if s is not None]
        self._write_numbers()

    def _write_numbers(self) -> None:
        """τ, α, cap and bias of the rows, from their sequences."""
        for layer, router in enumerate(self.routers):
            taus, alphas, caps, biases = zip(*(s.numbers[layer] for s in self.batch), strict=True)
            used = slice(len(self.batch))
            for held, values in ((self.tau, taus), (self.alpha, alphas), (self.cap, caps)):
                held[layer, used] = held.new_tensor(values).view(-1, 1, 1)
            if router.budget.biased:
                none = (0.0,) * self.bias.shape[-1]
                rows = [none if value is None else value for value in biases]
                self.bias[layer, used] = self.bias.new_tensor(rows).unsqueeze(1)
