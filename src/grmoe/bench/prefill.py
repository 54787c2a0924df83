"""What the dial saves in a whole model: prefill at several numbers of experts per token, next to what FLOPs allow.

Weights and tokens are random. All contenders are one model that selects by mass, at most two experts. They differ in
α, chosen so that the mean number of experts is the one asked for. α is a tensor, so one compiled model serves all.
Prefill means all blocks and the logits of the last position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from grmoe import checks
from grmoe.bench.measure import SEED, Contender, Result, Row, Runs
from grmoe.bench.models import FORMS, ModelShape
from grmoe.bench.run import Benchmark
from grmoe.model import GrmoeForCausalLM, count
from grmoe.probe.timing import Ratio, time_ratio
from grmoe.routing import routers

MODE = "prefill"
MAX_EXPERTS = 2
TAU = 0.5  # one expert with more than half of the mass is computed alone
COUNTS = (2.0, 1.75, 1.5, 1.25, 1.1, 1.0)
ALPHAS = (1e-3, 1e4)  # the range of the search for α
STEPS = 18  # of the bisection: α to a few parts in 10⁴
FACTS = {"α": ".3g", "experts": ".3f", "tokens/s": ",.0f", "GFLOP per token": ".4f"}


def benchmark(form: str) -> Benchmark[ModelShape]:
    return Benchmark(
        name="prefill",
        contenders=lambda shape, device, dtype, _: contenders(shape, device, dtype, form),
        compare=compare,
        facts=FACTS,
    )


@dataclass
class Dialled:
    """One model that is set to an α before it runs."""

    model: GrmoeForCausalLM
    forward: Callable[..., Any]
    ids_BS: Tensor
    alpha: float = 1.0

    def run(self, alpha: float) -> object:
        if alpha != self.alpha:  # only in the first call of a turn
            self.model.set_alpha(alpha)
            self.alpha = alpha
        with torch.no_grad():
            return self.forward(input_ids=self.ids_BS, use_cache=False, logits_to_keep=1).logits

    def experts(self, alpha: float) -> float:
        """Experts computed per token, the mean over layers."""
        self.model.reset_routing_metrics()
        self.run(alpha)
        layers = [router.counter.read().experts_per_token for router in routers(self.model)]
        return sum(layers) / len(layers)

    def alpha_for(self, experts: float) -> float:
        """The α at which this many experts are computed. Sharper gates compute fewer."""
        low, high = ALPHAS
        if experts >= MAX_EXPERTS or experts <= 1:
            return low if experts >= MAX_EXPERTS else high
        for _ in range(STEPS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.experts(middle) > experts else (low, middle)
        return (low * high) ** 0.5


def contenders(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, form: str = "eager"
) -> list[Contender]:
    """One for each of COUNTS, all with the same model."""
    mode = FORMS[checks.one_of("form", form, tuple(FORMS))][1]

    @cache
    def dialled() -> Dialled:
        torch.manual_seed(SEED)
        config = shape.config("grassmann")
        config.selection, config.selection_tau, config.num_experts_per_tok = "mass", TAU, MAX_EXPERTS
        with torch.device(device):
            model = GrmoeForCausalLM(config).eval()
            ids_BS = torch.randint(config.vocab_size, (shape.batch, shape.length))
        torch.nn.Module.to(model, dtype)  # routers stay in fp32
        forward = model if mode is None else torch.compile(model, dynamic=False, mode=mode)
        return Dialled(model, forward, ids_BS)

    def build(experts: float) -> Runs:
        model = dialled()
        alpha = model.alpha_for(experts)
        found = model.experts(alpha)
        flops = flops_per_token(shape, found)
        facts = {"α": alpha, "experts": found, "GFLOP per token": flops / 1e9, "flops": flops}
        return Runs({MODE: lambda: model.run(alpha)}, facts=facts)

    return [Contender(f"{n:.2f} experts", lambda n=n: build(n)) for n in COUNTS]  # type: ignore[misc]


def flops_per_token(shape: ModelShape, experts: float) -> float:
    """Products with weights, causal attention, and the output matrix at one position per sequence."""
    config = shape.config("grassmann")
    config.num_experts_per_tok = MAX_EXPERTS
    cost = count(config, shape.length)
    head = 2 * config.vocab_size * config.hidden_size
    return cost.train_flops_at(experts) / 3 - head * (1 - 1 / shape.length)


def compare(shape: ModelShape, rows: list[Row]) -> Result:
    """Speed-up over the model that computes two experts, and time saved / FLOPs saved."""
    result = Result(shape, rows)
    timed = [row for row in rows if MODE in row.times]
    for row in timed:
        row.facts["tokens/s"] = 1e3 * shape.batch * shape.length / row.times[MODE].median
    for row in timed[1:]:
        allowed = timed[0].facts["flops"] / row.facts["flops"]
        text = f"{row.name}: speed-up (FLOPs allow {allowed:.3f})"
        faster = time_ratio(text, timed[0].times[MODE], row.times[MODE])
        result.ratios.append(faster)
        if allowed > 1:  # with a few tokens two contenders may compute the same number of experts
            assert faster.interval is not None
            saved, low, high = (saved_share(value, allowed) for value in (faster.value, *faster.interval))
            name = f"{row.name}: time saved / FLOPs saved"
            result.ratios.append(Ratio(name, saved, (low, high), "share"))
    return result


def saved_share(faster: float, allowed: float) -> float:
    """(1 − 1/faster) / (1 − 1/allowed)."""
    return (1 - 1 / faster) / (1 - 1 / allowed)
