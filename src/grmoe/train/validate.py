"""Perplexity and routing metrics on held-out text, by domain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from grmoe.parallel.shard import sync_metrics
from grmoe.parallel.world import total
from grmoe.routing import RoutingMetrics, set_alpha, uncounted
from grmoe.train.setup import Trainer


@dataclass(frozen=True)
class Validation:
    loss: float
    """Nats per token over all domains."""
    domains: dict[str, float]
    """Nats per token of each domain, the domain with most held-out text first."""
    routing: list[RoutingMetrics]
    """Of each MoE layer."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def validate(trainer: Trainer) -> Validation:
    """Measure at most `validation.tokens` tokens per domain, at the model's own α. All processes call it together."""
    model, world = trainer.model, trainer.world
    set_alpha(model, model.config.alphas)
    model.reset_routing_metrics()
    model.eval()
    try:
        sums = {}
        for domain in trainer.validation.domains:
            sum_2 = torch.zeros(2, dtype=torch.float64, device=world.device)
            for rows, counts in _own_share(trainer, domain):
                with nullcontext() if counts else uncounted(model):
                    # With router logits, which a configuration may ask for, it would include the routers' losses.
                    loss = trainer.run(model, rows.to(world.device), output_router_logits=False).loss
                if counts:
                    targets = int((rows[:, 1:] >= 0).sum())  # negative: context only
                    sum_2 += torch.stack([loss.double() * targets, loss.new_full((), targets)])
            sums[domain] = total(world, sum_2).tolist()
        sync_metrics(model, world)
        routing = model.routing_metrics()
    finally:
        model.train()
        model.reset_routing_metrics()
    sizes = trainer.validation.domain_tokens
    by_size = sorted(sums.items(), key=lambda item: -sizes[item[0]])
    domains = {name: loss / tokens for name, (loss, tokens) in by_size if tokens}
    loss, tokens = (sum(s[i] for s in sums.values()) for i in (0, 1))
    # Conversations: the windows measured may hold context alone.
    return Validation(loss / tokens if tokens else math.nan, domains, routing)


def _own_share(trainer: Trainer, domain: str) -> Iterator[tuple[Tensor, bool]]:
    """(batch, whether it counts): every `size`-th batch of a domain.

    Sharded models need all processes in every forward. A process without a batch repeats another one, uncounted.
    """
    world = trainer.world
    batches = _batches(trainer, domain)
    while group := list(itertools.islice(batches, world.size)):
        counts = world.rank < len(group)
        yield group[world.rank if counts else -1], counts


def _batches(trainer: Trainer, domain: str) -> Iterator[Tensor]:
    """The first windows of a domain: the same text for every batch size and number of processes."""
    config, length = trainer.config.validation, trainer.length
    left = max(1, config.tokens // length)
    for rows in trainer.validation.windows(length, config.batch_size or trainer.micro_rows, domain):
        yield rows[:left]
        left -= len(rows)
        if left <= 0:
            return
