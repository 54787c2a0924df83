"""Training a whole model: tokens/s, MFU and memory. Ours beside an equal Hugging Face Olmoe and our softmax twin.

A step is a plain loop's: forward and backward under bf16 autocast with fp32 weights, clipped gradients, fused AdamW;
for ours the overlap penalty, `GrassmannAdam` and the balanced prior on top. Nobody reads the loss inside the loop. Each
runs eager, compiled, and compiled into CUDA graphs; what counts is the best of them.

The peer is `OlmoeForCausalLM`, made equal to ours block by block, in its favour where there was a choice:
- It has dense feed-forwards where ours has them, and no norms of queries and keys, for ours has none.
- Its experts take the preset's activation: Hugging Face's `grouped_mm` computes experts without a gate, too.
- `grouped_mm` is no operator autocast knows: left alone, experts with fp32 weights run in fp32, on a GPU one after the
  other. Here they are cast as autocast casts a linear layer.
- No balancing loss, which is its default.
Compiled, transformers builds a mask, and SDPA has no flash kernel for one; "no mask" is the same Olmoe without it.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import OlmoeConfig, OlmoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grmoe import checks
from grmoe.bench.measure import SEED, WARM_UPS, Contender, Result, Row, Runs, Watch
from grmoe.bench.shapes import Shape
from grmoe.bench.train_step import RATE, STEP, optimizers
from grmoe.experts import ExpertWeights
from grmoe.model import GrmoeConfig, GrmoeForCausalLM, count, preset
from grmoe.model.modeling_grmoe import GrmoeMLP
from grmoe.probe.timing import Times, time_ratio

OURS, SOFTMAX = "ours", "ours, softmax top-2"
HUGGING_FACE, NO_MASK = "Hugging Face Olmoe", "Hugging Face Olmoe, no mask"
# How a model runs: the ending of its name, and torch.compile's mode.
FORMS: dict[str, tuple[str, str | None]] = {
    "eager": ("", None),
    "compiled": (", compiled", "default"),
    "graphs": (", CUDA graphs", "reduce-overhead"),
}
FACTS = {
    "M parameters": ".1f",
    "tokens/s": ",.0f",
    "MFU %": ".1f",
    "first loss": ".3f",
    "last loss": ".3f",
    "graphs": "g",
    "waits": "g",
}

# Fields of the same name and meaning in both configurations.
SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
    "max_position_embeddings", "initializer_range", "tie_word_embeddings", "num_experts", "num_experts_per_tok",
    "norm_topk_prob", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
CLIP = 1.0
OVERLAP_WEIGHT, OVERLAP_RHO = 0.01, 0.5
SETTLING = 2  # steps of a turn before its clock starts: memory is found, the queue is full
STATE_BYTES = 16  # a parameter, its gradient and two moments, fp32
HELD_SHARE = 0.4  # of the device, for what all contenders hold; the rest is for one's activations

# Transformers builds no mask for a name it does not know; the function then tells SDPA to be causal.
ALL_ATTENTION_FUNCTIONS.register("sdpa_no_mask", sdpa_attention_forward)


@dataclass(frozen=True)
class ModelShape(Shape):
    preset: str
    batch: int
    length: int
    hidden_act: str

    def __post_init__(self) -> None:
        checks.positive_int("batch", self.batch)
        most = self.config().max_position_embeddings
        checks.require(2 <= self.length <= most, f"length must be in [2, {most}], got {self.length}")

    def config(self, router: str = "softmax") -> GrmoeConfig:
        return preset(self.preset, router=router, hidden_act=self.hidden_act)


# -- the models ------------------------------------------------------------------------------------------------


class CastExperts(nn.Module):
    """Hugging Face's `grouped_mm` experts in autocast's precision."""

    has_bias = is_transposed = False

    def __init__(self, config: GrmoeConfig) -> None:
        super().__init__()
        assert config.moe_intermediate_size is not None
        self.num_experts = config.num_experts
        self.has_gate = config.activation == "swiglu"
        self.weights = ExpertWeights(
            config.hidden_size, config.moe_intermediate_size, config.num_experts, config.activation
        )

    @property
    def up_proj(self) -> Tensor:
        return _cast(self.weights.up)

    gate_up_proj = up_proj

    @property
    def down_proj(self) -> Tensor:
        return _cast(self.weights.down_proj)

    def act_fn(self, inner: Tensor) -> Tensor:
        return self.weights.activate(inner)

    _apply_gate = act_fn

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, _cast(x), top_k_index, _cast(top_k_weights))
        return y


def _cast(tensor: Tensor) -> Tensor:
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def olmoe(config: GrmoeConfig, attention: str) -> OlmoeForCausalLM:
    """Olmoe with the blocks of our configuration."""
    theirs = OlmoeConfig(
        **{name: getattr(config, name) for name in SHARED},
        intermediate_size=config.moe_intermediate_size,  # type: ignore[arg-type]  # resolved
    )
    model = OlmoeForCausalLM._from_config(
        theirs, attn_implementation=attention, experts_implementation="grouped_mm"
    )
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
        new: nn.Module = CastExperts(config) if i in config.moe_layers else GrmoeMLP(config)
        for weight in new.parameters():
            nn.init.normal_(weight, std=theirs.initializer_range)
        if isinstance(new, CastExperts):
            layer.mlp.experts = new
        else:
            layer.mlp = new
    return model


def ours(config: GrmoeConfig) -> GrmoeForCausalLM:
    model: GrmoeForCausalLM = GrmoeForCausalLM._from_config(config, attn_implementation="sdpa")
    return model


# -- the loop --------------------------------------------------------------------------------------------------


def contenders(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, forms: tuple[str, ...]
) -> list[Contender]:
    """Everybody in all `forms`, names of FORMS."""
    grassmann, softmax = shape.config("grassmann"), shape.config()
    listed = []
    for form in forms:
        end, mode = FORMS[checks.one_of("form", form, tuple(FORMS))]
        train = partial(train_runs, shape, device, dtype, mode)
        for name, attention in ((HUGGING_FACE, "sdpa"), (NO_MASK, "sdpa_no_mask")):
            build = partial(train, softmax, partial(olmoe, softmax, attention))
            listed.append(Contender(name + end, build, "peer", "transformers"))
        for name, config in ((OURS, grassmann), (SOFTMAX, softmax)):
            listed.append(Contender(name + end, partial(train, config, partial(ours, config))))
    return listed


def train_runs(
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    mode: str | None,
    config: GrmoeConfig,
    build: Callable[[], nn.Module],
) -> Runs:
    """A model in training on one batch; a step returns its loss, still on the device."""
    torch.manual_seed(SEED)
    ids_BS = torch.randint(config.vocab_size, (shape.batch, shape.length)).to(device)
    with torch.device(device):
        model = build().train()
    # One shape is timed: a graph that fits all would only be slower.
    forward = model if mode is None else torch.compile(model, dynamic=False, mode=mode)
    steppers = optimizers(model)
    parameters = list(model.parameters())
    own = {"skip_logits": True} if isinstance(model, GrmoeForCausalLM) else {}  # as our trainer calls it

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss: Tensor = forward(input_ids=ids_BS, labels=ids_BS, use_cache=False, **own).loss
        if isinstance(model, GrmoeForCausalLM):
            penalty = model.overlap_penalty(OVERLAP_RHO, num_pairs="auto")
            (loss + OVERLAP_WEIGHT * penalty).backward()
        else:
            loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        for optimizer in steppers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if isinstance(model, GrmoeForCausalLM):
            model.update_priors(RATE)
        return loss.detach()

    total = sum(p.numel() for p in parameters)
    return Runs(
        {STEP: step}, facts={"M parameters": total / 1e6, "flops": count(config, shape.length).train_flops}
    )


# -- measuring -------------------------------------------------------------------------------------------------


def measure(
    contenders: list[Contender], device: torch.device, rounds: int, steps: int, apart: bool, watch: Watch
) -> Iterator[list[Row]]:
    """The rows after each round, in which all take turns of so many steps.

    apart: build a contender for its turn and free it afterwards, for models that do not fit beside each other.
    """
    rows = [Row(c.name, c.kind, c.library) for c in contenders]
    held: dict[str, Runs] = {}
    torch.compiler.reset()
    for i in range(rounds):
        for row, contender in zip(rows, contenders, strict=True):
            if row.failure is None:
                with row.catching():
                    if row.name not in held:
                        held[row.name] = start(row, contender, device)
                    times, loss = step_times(held[row.name].timed[STEP], steps, device)
                    checks.require(math.isfinite(loss), f"loss must be finite, got {loss}")
                    row.facts["last loss"] = loss
                    row.times.setdefault(STEP, Times()).rounds.append(times)
            if row.failure is not None:
                row.times.clear()  # of a contender that broke down on the way
            if apart:
                torch.compiler.reset()  # else each new model adds its graphs, up to Dynamo's limit
            if apart or row.failure is not None:
                held.pop(row.name, None)
                gc.collect()
                torch.cuda.empty_cache()
            watch(f"round {i + 1}, {row.name}", 1, 1)
        yield rows


def start(row: Row, contender: Contender, device: torch.device) -> Runs:
    """Build and warm up. The row learns what is seen from outside: losses, graphs, waits, memory."""
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    counters.clear()
    runs = contender.build()
    step = runs.timed[STEP]
    row.facts |= runs.facts | {"first loss": _value(step())}
    for _ in range(WARM_UPS[device.type]):
        step()
    if row.name.endswith(tuple(end for end, mode in FORMS.values() if mode)):
        row.facts["graphs"] = counters["stats"]["unique_graphs"]
    if cuda:
        row.facts["waits"] = count_waits(step)
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        row.peak = torch.cuda.max_memory_allocated() - before
    return runs


def step_times(step: Callable[[], object], steps: int, device: torch.device) -> tuple[list[float], float]:
    """Milliseconds of each step of a loop, and the last loss.

    On a GPU by events between the steps: where the host does not keep the device busy, its idling counts.
    """
    if device.type != "cuda":
        marks = [perf_counter()]
        for _ in range(steps):
            loss = step()
            marks.append(perf_counter())
        return [1e3 * (b - a) for a, b in pairwise(marks)], _value(loss)
    for _ in range(SETTLING):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        loss = step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)], _value(loss)


def count_waits(step: Callable[[], object]) -> int:
    """How often the host waits for the device in a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(w.message) for w in caught)


def too_large(shape: ModelShape, contenders: int, device: torch.device) -> bool:
    """Whether so many models and their optimisers leave too little memory for a step."""
    if device.type != "cuda":
        return False
    held = STATE_BYTES * count(shape.config("grassmann")).total * contenders
    return held > HELD_SHARE * torch.cuda.get_device_properties(device).total_memory


def _value(loss: object) -> float:
    assert isinstance(loss, Tensor)
    return float(loss)


# -- comparing -------------------------------------------------------------------------------------------------


def compare(shape: ModelShape, rows: list[Row], peak: float | None) -> Result:
    """`peak`: FLOP/s of the device, None for no MFU."""
    result = Result(shape, rows, extra={"peak_flops": peak})
    for row in rows:
        if STEP in row.times:
            rate = row.facts["tokens/s"] = 1e3 * shape.batch * shape.length / row.times[STEP].median
            if peak is not None:
                row.facts["MFU %"] = 100 * rate * row.facts["flops"] / peak
    own, twin = best(result, OURS), best(result, SOFTMAX)
    for name in (HUGGING_FACE, NO_MASK):
        if own and (peer := best(result, name)):
            text = f"tokens/s, {own.name} over {peer.name}"
            result.ratios.append(time_ratio(text, peer.times[STEP], own.times[STEP]))
    if own and twin:
        text = f"tokens/s, {own.name} over {twin.name}"
        result.ratios.append(time_ratio(text, twin.times[STEP], own.times[STEP], "excess"))
    return result


def best(result: Result, name: str) -> Row | None:
    """The fastest of a contender's forms."""
    names = [name + end for end, _ in FORMS.values()]
    forms = [row for row in result.rows if row.name in names and STEP in row.times]
    return min(forms, key=lambda row: row.times[STEP].median, default=None)


def lines(result: Result) -> list[str]:
    """The better form of each, in tokens/s with its spread."""
    written = []
    for row in [best(result, name) for name in (HUGGING_FACE, NO_MASK, OURS, SOFTMAX)]:
        if row is None:
            continue
        rate, (low, high) = row.facts["tokens/s"], row.times[STEP].interval
        scale = rate * row.times[STEP].median
        mfu = f", MFU {row.facts['MFU %']:.1f} %" if "MFU %" in row.facts else ""
        written.append(f"{row.name}: {rate:,.0f} tokens/s ({scale / high:,.0f}–{scale / low:,.0f}){mfu}")
    for row in result.rows:
        if row.times and row.facts["last loss"] > row.facts["first loss"]:
            written.append(f"{row.name}: its loss rose, it does not train")
    if result.extra["peak_flops"] is None:
        written.append("No MFU: it needs bf16 and a device whose peak we know.")
    return written
