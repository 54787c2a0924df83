"""Generating tokens: one new token per sequence and step, by batch and by budget, beside an equal Hugging Face Olmoe.

Weights and tokens are random. A step runs the model on one token per sequence with a static cache of keys and values
that holds a context, and picks the most probable next token. On a GPU the step is compiled and one CUDA graph. All
steps get the same tokens, so that the mean number of experts stays what was asked for: picked ones are not fed back.

Ours is one model that selects by mass. Its contenders differ in α, found by bisection on the step itself.

The floor is what a step must read: all weights outside the experts once, the experts that some token chose once, the
packed frames, and the keys and values of the context. Divided by the bandwidth of a copy it is a time. "Saved" is the
share of time saved over the share of bytes saved.

Legend: B sequences, S tokens of context, N experts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from grmoe import checks
from grmoe.bench.forms import early, one_token
from grmoe.bench.measure import SEED, Choice, Contender, Result, Row, Runs, bandwidth, chosen, shorten
from grmoe.bench.models import ModelShape, olmoe, ours
from grmoe.bench.prefill import ALPHAS, STEPS, TAU, saved_share
from grmoe.bench.run import Benchmark
from grmoe.model import GrmoeConfig, GrmoeForCausalLM
from grmoe.probe.routing import moe_layers, recorded, routing_figures
from grmoe.probe.timing import Ratio, time_ratio, warmed_up

MODE = "step"
BATCHES = (1, 8, 32)
FEW_TOKENS = 64  # that `grmoe.linears` is made for
ROOM = 64  # steps before the context starts again
FORMS = ("eager", "compiled", "graphs")
GROUPED, BATCHED = "Hugging Face Olmoe, grouped_mm", "Hugging Face Olmoe, batched_mm"
# Forms of our step, by what stands behind their names: the default, and two that are not measured yet. Fused maps are
# linear maps of few tokens with what stands around them, and experts of one token without a list.
PLAIN, THIN, EARLY = "", ", fused maps", ", fused maps and early starts"
FACTS = {
    "experts": ".3f", "touched": ".2f", "tokens/s": ",.0f", "MB per step": ",.1f", "floor ms": ".4f", "captured": "g",
}  # fmt: skip


def benchmark(form: str, budgets: tuple[float, ...]) -> Benchmark[ModelShape]:
    """budgets: experts per token of ours, the largest first. Empty: K, ¾ K and ½ K."""
    return Benchmark(
        name="decode",
        contenders=lambda shape, device, dtype, _: contenders(shape, device, dtype, form, budgets),
        compare=compare,
        facts=FACTS,
    )


@dataclass
class Decoder:
    """A model, its cache, and the tokens it gets."""

    model: Any
    forward: Callable[..., Any]
    context_BS: Tensor
    ids_B1: Tensor
    cache: StaticCache
    next_B: Tensor
    replay: Callable[[], object] | None = None
    """The step as it is timed."""
    captured: bool = False
    """Whether that is one CUDA graph."""
    taken: int = 0

    @torch.no_grad()
    def step(self) -> None:
        logits = self.forward(input_ids=self.ids_B1, past_key_values=self.cache, use_cache=True).logits
        self.next_B.copy_(logits[:, -1].argmax(-1))

    def rewind(self) -> None:
        """Forget all steps: the cache holds the context again."""
        self.taken = 0
        layers: list[Any] = self.cache.layers
        for layer in layers:
            layer.cumulative_length.fill_(self.context_BS.shape[1])

    def run(self) -> None:
        """One timed step."""
        if self.taken == ROOM - 1:
            self.rewind()
        self.taken += 1
        assert self.replay is not None
        self.replay()

    # -- ours --------------------------------------------------------------------------------------------------

    def experts(self, alpha: float) -> float:
        """Experts computed per token in a step, the mean over layers."""
        self.model.set_alpha(alpha)
        self.model.reset_routing_metrics()
        self.rewind()
        with torch.no_grad():
            self.model(input_ids=self.ids_B1, past_key_values=self.cache, use_cache=True)
        return routing_figures(self.model).experts_per_token

    def alpha_for(self, experts: float, most: int) -> float:
        """The α at which this many experts are computed. Sharper gates compute fewer."""
        low, high = ALPHAS
        if experts >= most or experts <= 1:
            return low if experts >= most else high
        for _ in range(STEPS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.experts(middle) > experts else (low, middle)
        return min((low, high), key=lambda alpha: abs(self.experts(alpha) - experts))

    def touched(self, alpha: float) -> float:
        """Experts that some token of a step chooses, the mean over layers."""
        self.model.set_alpha(alpha)
        self.rewind()
        with torch.no_grad(), recorded(self.model) as routings:
            self.model(input_ids=self.ids_B1, past_key_values=self.cache, use_cache=True)
        chosen = [r.selected.flatten(0, -2).any(0).sum() for r in routings]
        return float(torch.stack(chosen).double().mean())


def contenders(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, form: str, budgets: tuple[float, ...]
) -> list[Contender]:
    checks.one_of("form", form, FORMS)
    most = shape.config().num_experts_per_tok or 2
    for budget in budgets:
        checks.require(1 <= budget <= most, f"--budget must be in [1, {most}], got {budget}")
    decoder = partial(decoder_of, shape, device, dtype, form)

    @cache
    def shared(kind: str) -> Decoder:
        config = shape.config("grassmann")
        config.selection, config.selection_tau = "mass", TAU
        with chosen(*choices_of(kind)):
            return decoder(partial(ours, config))

    def peer(experts: str) -> Runs:
        built = decoder(partial(olmoe, shape.config(), "sdpa", experts))
        return Runs({MODE: built.run}, facts={"captured": built.captured})

    def own(budget: float, kind: str) -> Runs:
        built = shared(kind)
        alpha = built.alpha_for(budget, most)
        experts, touched = built.experts(alpha), built.touched(alpha)
        read = step_bytes(built.model, shape, dtype, touched)
        rate = bandwidth(device)

        def run() -> None:
            if built.model.config.alpha != alpha:  # only in the first call of a turn
                built.model.set_alpha(alpha)
            built.run()

        facts = {"α": alpha, "experts": experts, "touched": touched, "MB per step": read / 1e6}
        facts |= {"bandwidth": rate, "floor ms": 1e3 * read / rate, "captured": built.captured}
        return Runs({MODE: run}, facts=facts).with_choice(*choices_of(kind))

    kinds = (PLAIN, THIN, EARLY) if device.type == "cuda" else (PLAIN,)
    wanted = budgets or (float(most), 0.75 * most, 0.5 * most)
    return [
        Contender(GROUPED, partial(peer, "grouped_mm"), "peer", "transformers"),
        Contender(BATCHED, partial(peer, "batched_mm"), "peer", "transformers"),
        *(
            Contender(budget_name(n, kind), partial(own, n, kind))
            for kind in kinds
            for n in sorted(wanted, reverse=True)
        ),
    ]


def budget_name(experts: float, kind: str = PLAIN) -> str:
    return f"ours, {experts:.2f} experts{kind}"


def choices_of(kind: str) -> list[Choice]:
    if kind == PLAIN:
        return []
    from grmoe import linears  # needs Triton

    thin = [(linears, "MOST_TOKENS", FEW_TOKENS), *one_token()]
    return thin if kind == THIN else [*thin, *early()]


def decoder_of(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, form: str, build: Callable[[], nn.Module]
) -> Decoder:
    """A model with a full context. Its step is compiled and captured as `form` says."""
    torch.manual_seed(SEED)
    with torch.device(device):
        model: Any = build().eval()
        nn.Module.to(model, dtype)  # routers stay in fp32
        ids_BS = torch.randint(model.config.vocab_size, (shape.batch, shape.length))
    held = StaticCache(config=model.config, max_cache_len=shape.length + ROOM)
    with torch.no_grad():
        model(input_ids=ids_BS, past_key_values=held, use_cache=True, logits_to_keep=1)
    forward = model if form == "eager" else torch.compile(model, dynamic=False, fullgraph=True)
    next_B = torch.zeros(shape.batch, dtype=torch.int64, device=device)
    decoder = Decoder(model, forward, ids_BS, ids_BS[:, :1].clone(), held, next_B)
    decoder.rewind()
    decoder.replay = decoder.step
    if form == "graphs":
        try:
            decoder.replay, decoder.captured = warmed_up(decoder.step, device), device.type == "cuda"
        except RuntimeError as error:  # a step that waits for the device is timed without a graph
            warnings.warn(f"this step is not one CUDA graph: {shorten(error)}", RuntimeWarning, stacklevel=2)
    decoder.rewind()
    return decoder


def step_bytes(model: GrmoeForCausalLM, shape: ModelShape, dtype: torch.dtype, touched: float) -> float:
    """Bytes that a step must read, if `touched` experts per layer are chosen by some token."""
    config: GrmoeConfig = model.config
    layers, size = moe_layers(model), dtype.itemsize
    total = sum(p.numel() for p in model.parameters())  # a tied parameter appears once
    experts = sum(p.numel() for layer in layers for p in layer.experts.parameters())
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size  # a few of its rows
    groups, width = config.num_key_value_heads, config.head_dim
    assert groups is not None
    assert width is not None
    keys = 2 * config.num_hidden_layers * groups * width * shape.batch * shape.length
    return size * (total - experts - table + experts * touched / config.num_experts + keys)


def compare(shape: ModelShape, rows: list[Row]) -> Result:
    """Tokens/s over the best Olmoe's, and what smaller budgets save of what bytes allow."""
    result = Result(shape, rows)
    timed = [row for row in rows if MODE in row.times]
    for row in timed:
        row.facts["tokens/s"] = 1e3 * shape.batch / row.times[MODE].median
    own = [row for row in timed if row.kind == "ours"]
    peers = [row for row in timed if row.kind == "peer"]
    if own and peers:
        best = min(peers, key=lambda row: row.times[MODE].median)
        for row in own:
            name = f"tokens/s, {row.name} over {best.name}"
            result.ratios.append(time_ratio(name, best.times[MODE], row.times[MODE]))
    for row in own:
        name = f"{row.name}: time over the floor"
        result.ratios.append(Ratio(name, row.times[MODE].median / row.facts["floor ms"]))
    full = {kind_of(row): row for row in reversed(own)}  # the first of each kind
    for row in own:
        first, plain = full[kind_of(row)], result.row(row.name.removesuffix(kind_of(row)))
        if plain is not None and plain is not row and MODE in plain.times:
            result.ratios.append(time_ratio(f"{plain.name} / {row.name}", plain.times[MODE], row.times[MODE]))
        if row is first:
            continue
        allowed = first.facts["MB per step"] / row.facts["MB per step"]
        text = f"{row.name}: speed-up (bytes allow {allowed:.3f})"
        faster = time_ratio(text, first.times[MODE], row.times[MODE])
        result.ratios.append(faster)
        if allowed > 1:  # with many sequences every expert may be touched either way
            assert faster.interval is not None
            saved, low, high = (saved_share(value, allowed) for value in (faster.value, *faster.interval))
            name = f"{row.name}: time saved / bytes saved"
            result.ratios.append(Ratio(name, saved, (low, high), "share"))
    return result


def kind_of(row: Row) -> str:
    return next((kind for kind in (THIN, EARLY) if row.name.endswith(kind)), PLAIN)
