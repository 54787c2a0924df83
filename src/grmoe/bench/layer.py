"""The whole MoE layer: all our backends next to other libraries and dense GEMMs with the same FLOPs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from grmoe.bench.blocks import Block, Setting, skewed
from grmoe.bench.forms import FEW_TOKENS, FORMS, OURS, SOFTMAX, Form
from grmoe.bench.hopper_peers import sonicmoe, triton_kernels
from grmoe.bench.measure import Contender, Result, Row, Runs, bandwidth
from grmoe.bench.run import Benchmark
from grmoe.bench.shapes import LayerShape, default_rank
from grmoe.experts import BACKENDS
from grmoe.kernels import runtime
from grmoe.layer import MoE
from grmoe.probe.timing import Ratio
from grmoe.routing import GrassmannRouter

CUDA_SHAPES = (
    LayerShape(16384, 768, 8, 1536, 2),
    LayerShape(16384, 2048, 16, 2752, 2),
    LayerShape(32768, 2048, 64, 1024, 8),
)
# Where SonicMoE, the fastest layer on NVIDIA's Hopper, was measured too.
HOPPER_SHAPES = (
    LayerShape(16384, 768, 8, 1536, 2),
    LayerShape(16384, 2048, 16, 2752, 2),
    LayerShape(16384, 2560, 32, 3456, 2),
    LayerShape(32768, 2048, 64, 1024, 8),
    LayerShape(32768, 4096, 128, 768, 8),
)
DECODE_SHAPES = tuple(
    LayerShape(tokens, 2048, experts, width, top_k)
    for experts, width, top_k in ((64, 1024, 8), (16, 2752, 2))
    for tokens in FEW_TOKENS
)
CPU_SHAPES = tuple(LayerShape(2048, 256, experts, 256, 2) for experts in (4, 8, 16, 64))

# The reference reads offsets on the host and launches several kernels per expert.
LOOP_EXPERTS, LOOP_ROUNDS = 64, 5

COMPILED = "ours, compiled"
_SAME = "ours, softmax gate, same experts"
HUGGING_FACE, LIGER, SCATTER = "Hugging Face OLMoE block", "Liger fused MoE", "ScatterMoE"
BATCHED = "Hugging Face OLMoE block, batched_mm"
SONIC, TRITON_KERNELS = "SonicMoE", "triton_kernels"
DENSE = "dense GEMMs, same FLOPs"
FORWARD, BOTH = "forward", "forward+backward"
# Other Grassmann gates, which take several kernels.
GATES: dict[str, dict[str, Any]] = {
    "ours, amortised gate (affinity)": {"amortizer": "affinity"},
    "ours, amortised gate (input)": {"amortizer": "input"},
    "ours, linear term": {"linear": True},
}
FACTS = {"touched experts": "g", "floor ms": ".4f"}
SHARE = "gate's share of the FLOPs, "
SMALLER = (2, 4)  # the gate's rank over these, where its FLOPs are a large part of the layer's


def contenders(
    shape: LayerShape, device: torch.device, dtype: torch.dtype, rank: int | None = None
) -> list[Contender]:
    setting = cache(lambda: Setting(shape, rank, device, dtype))

    def runs(block: Callable[[Setting], Block], backward: bool = True) -> Callable[[], Runs]:
        return lambda: _block_runs(setting(), block(setting()), backward)

    def form_of(form: Form) -> Callable[[], Runs]:
        return lambda: _form_runs(setting(), form)

    backends = [
        Contender(
            f"ours, {name}",
            runs(partial(Setting.ours, backend=name)),
            rounds=LOOP_ROUNDS if name == "reference" else None,
        )
        for name in BACKENDS
        if name != "reference" or shape.experts <= LOOP_EXPERTS
    ]
    few = []
    if shape.tokens <= max(FEW_TOKENS):  # it copies the weights of every token's experts
        block = partial(Setting.hugging_face, experts="batched_mm")
        few = [Contender(BATCHED, runs(block), "peer", "transformers")]
    listed = [
        Contender(HUGGING_FACE, runs(Setting.hugging_face), "peer", "transformers"),
        *few,
        Contender(LIGER, runs(Setting.liger), "peer", "liger_kernel"),
        Contender(SCATTER, runs(Setting.scattermoe), "peer", "scattermoe"),
        Contender(SONIC, runs(sonicmoe), "peer", "sonicmoe"),
        Contender(TRITON_KERNELS, runs(triton_kernels, backward=False), "peer", "triton_kernels"),
        Contender(DENSE, lambda: _dense_runs(setting()), "ceiling", "torch"),
        *backends,
        Contender(OURS, runs(Setting.ours)),
        Contender(SOFTMAX, runs(lambda s: s.ours(router=s.softmax))),
        Contender(_SAME, lambda: _same_experts_runs(setting())),
    ]
    if device.type == "cuda":  # on a CPU these have no kernels, or compile longer than the whole benchmark
        listed.append(Contender(COMPILED, runs(lambda s: s.ours(compiled=True))))
        listed += [Contender(name, form_of(form)) for name, form in FORMS.items() if form.suits(shape)]
        listed += [Contender(name, runs(partial(_other_gate, options))) for name, options in GATES.items()]
        if shape.tokens > max(FEW_TOKENS):
            full = default_rank(shape.dim, shape.experts) if rank is None else rank
            ranks = [full // part for part in SMALLER if full // part >= 8]
            listed += [Contender(rank_name(r), runs(partial(_other_gate, {"rank": r}))) for r in ranks]
    return listed


def rank_name(rank: int) -> str:
    return f"{OURS}, rank {rank}"


def _other_gate(options: dict[str, Any], setting: Setting) -> Block:
    return setting.ours(router=setting.gate(**options))


def gate_share(shape: LayerShape, rank: int, mode: str) -> float:
    """FLOPs of the Grassmann gate over those of the layer. Its backward has two products, and computes the first one
    again where the forward does not keep it."""
    products = 1 if mode == FORWARD else 3 if _keeps_projection(shape.experts * rank) else 4
    gate = 2 * shape.experts * rank * products
    experts = 6 * shape.top_k * shape.width * (1 if mode == FORWARD else 3)
    return gate / (gate + experts)


def _keeps_projection(columns: int) -> bool:
    if not runtime.HAS_TRITON:
        return False
    from grmoe.kernels.gate import KEPT_COLUMNS

    return columns >= KEPT_COLUMNS


def _block_runs(setting: Setting, block: Block, backward: bool = True) -> Runs:
    x_TD, grad_TD = setting.x_TD, setting.grad_TD
    timed: dict[str, Callable[[], object]] = {FORWARD: lambda: block.forward(x_TD)}
    if backward:
        timed[BOTH] = lambda: block.both(x_TD, grad_TD)
    return Runs(timed, block.errors, _facts(setting, block.module))


def _facts(setting: Setting, module: object) -> dict[str, float]:
    """Many tokens: the Grassmann gate's share of the FLOPs. Few tokens: the experts that they touch, and the time to
    read the weights of these and of the gate once."""
    if not isinstance(module, MoE):
        return {}
    if setting.shape.tokens > max(FEW_TOKENS):
        if not isinstance(module.router, GrassmannRouter):
            return {}
        rank = module.router.rank
        return {"rank": rank} | {
            SHARE + mode: gate_share(setting.shape, rank, mode) for mode in (FORWARD, BOTH)
        }
    with torch.no_grad(), module.router.uncounted():
        touched = int(module.router(setting.x_TD).selected.any(0).sum())
    size = setting.x_TD.element_size()
    gate = max(p.numel() for p in module.router.parameters())  # frames, or one row per expert
    expert = (setting.experts.up[0].numel() + setting.experts.down_proj[0].numel()) * touched
    rate = bandwidth(setting.device)
    return {
        "touched experts": touched,
        "touched bytes": size * (expert + gate),
        "bandwidth": rate,
        "floor ms": 1e3 * size * (expert + gate) / rate,
    }


def _form_runs(setting: Setting, form: Form) -> Runs:
    gate = setting.softmax if form.softmax else setting.grassmann
    runs = _block_runs(setting, setting.ours("triton", gate))
    modes = {FORWARD: form.forward, BOTH: form.backward}
    timed = {mode: runs.timed[mode] for mode, wanted in modes.items() if wanted}

    def output() -> dict[str, float]:
        return setting.output_error(setting.layer(skewed(copy.deepcopy(gate)), "triton"))

    return Runs(timed, runs.errors if form.backward else output, runs.facts).with_choice(*form.choices())


def _same_experts_runs(setting: Setting) -> Runs:
    """Run the softmax gate, then the experts that the Grassmann gate chose, so that only the gates differ.

    Two similar loads can differ by a wave of tiles, which costs as much as a gate.
    """
    layer, softmax = setting.layer(copy.deepcopy(setting.grassmann)).eval(), copy.deepcopy(setting.softmax)
    x_TD = setting.x_TD.detach()
    with torch.no_grad():
        routing = layer.router(x_TD)
    softmax.eval()

    @torch.no_grad()
    def forward() -> Tensor:
        softmax(x_TD)
        return layer.compute(x_TD, routing)

    return Runs({FORWARD: forward})


def _dense_runs(setting: Setting) -> Runs:
    """All T·K rows through one expert's matrices, nothing but GEMMs: an upper bound on the rate."""
    shape = setting.shape
    rows = shape.tokens * shape.top_k
    up, down = setting.experts.up[0].detach(), setting.experts.down_proj[0].detach()
    with torch.device(setting.device):
        x, inner, grad = (torch.randn(rows, n).to(setting.dtype) for n in (shape.dim, shape.width, shape.dim))
        grad_inner = torch.randn(rows, 2 * shape.width).to(setting.dtype)

    def forward() -> tuple[Tensor, Tensor]:
        return x @ up.T, inner @ down.T

    def both() -> tuple[Tensor, ...]:
        return *forward(), grad @ down, grad.T @ inner, grad_inner @ up, grad_inner.T @ x

    return Runs({FORWARD: forward, BOTH: both})


def compare(shape: LayerShape, rows: list[Row]) -> Result:
    result = Result(shape, rows)
    peers = [row for row in rows if row.kind == "peer"]
    for mode in (FORWARD, BOTH):
        result.add_ratio(f"{SONIC} / {SOFTMAX}, {mode}", SONIC, SOFTMAX, mode)
        result.add_ratio(f"{SONIC} / {OURS}, {mode}", SONIC, OURS, mode)
        timed = [peer for peer in peers if mode in peer.times]
        if timed:
            best = min(timed, key=lambda peer: peer.times[mode].median)
            result.add_ratio(f"best peer ({best.name}) / {OURS}, {mode}", best.name, OURS, mode)
        hugging = [peer for peer in timed if peer.name in (HUGGING_FACE, BATCHED)]
        if hugging:
            best = min(hugging, key=lambda peer: peer.times[mode].median)
            result.add_ratio(f"best of Hugging Face ({best.name}) / {OURS}, {mode}", best.name, OURS, mode)
        gates = "Grassmann gate over softmax gate"
        result.add_ratio(f"ours, reference / {OURS}, {mode}", "ours, reference", OURS, mode)
        result.add_ratio(f"share of the dense rate, {mode}", DENSE, OURS, mode, "share")
        result.add_ratio(f"share of the dense rate, softmax gate, {mode}", DENSE, SOFTMAX, mode, "share")
        result.add_ratio(f"{gates}, {mode}", OURS, SOFTMAX, mode, "excess")
        result.add_ratio(f"{gates}, same experts, {mode}", OURS, _SAME, mode, "excess")
        for name, form in FORMS.items():
            if name != form.beside:
                result.add_ratio(f"{form.beside} / {name}, {mode}", form.beside, name, mode)
                result.add_ratio(f"{SONIC} / {name}, {mode}", SONIC, name, mode)
        for name in GATES:
            result.add_ratio(f"{name} over the plain gate, {mode}", name, OURS, mode, "excess")
        for smaller in _of_smaller_rank(rows):
            result.add_ratio(f"{SONIC} / {smaller.name}, {mode}", SONIC, smaller.name, mode)
    row = result.row(OURS)
    if row is not None and FORWARD in row.times and "floor ms" in row.facts:
        name = f"{OURS} / floor (its experts and frames read once), {FORWARD}"
        result.ratios.append(Ratio(name, row.times[FORWARD].median / row.facts["floor ms"]))
    held = [peer for peer in peers if peer.peak]
    if row is not None and row.peak and held:
        least = min(held, key=lambda peer: peer.peak or 0)
        name = f"peak memory, {OURS} / best peer ({least.name})"
        result.ratios.append(Ratio(name, row.peak / (least.peak or 1)))
    sonic = result.row(SONIC)
    for ours in map(result.row, (OURS, SOFTMAX, *FORMS)):
        if sonic is not None and ours is not None and sonic.peak and ours.peak:
            result.ratios.append(Ratio(f"peak memory, {ours.name} / {SONIC}", ours.peak / sonic.peak))
    return result


def _of_smaller_rank(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.name.startswith(rank_name(0)[:-1]) and row.times]


def lines(result: Result) -> list[str]:
    """Few tokens: how far the layer is from its floor, and what the Grassmann gate adds, in µs. Many: the gate's share
    of the FLOPs."""
    written = []
    for row in result.rows:
        if "rank" in row.facts and row.name not in GATES:
            shares = ", ".join(f"{100 * row.facts[SHARE + mode]:.1f} % {mode}" for mode in (FORWARD, BOTH))
            written.append(f"{row.name}: of the FLOPs, a gate of rank {row.facts['rank']:g} takes {shares}")
        if "floor ms" in row.facts and FORWARD in row.times and row.name in (OURS, SOFTMAX):
            floor, ms = row.facts["floor ms"], row.times[FORWARD].median
            size, rate = row.facts["touched bytes"] / 1e6, row.facts["bandwidth"] / 1e12
            read = f"{size:.1f} MB at {rate:.2f} TB/s take {1e3 * floor:.1f} µs"
            written.append(
                f"{row.name}: {read}; {1e3 * (ms - floor):.1f} µs above that, {ms / floor:.2f} times"
            )
    grassmann, softmax = (result.times(name, FORWARD) for name in (OURS, SOFTMAX))
    if grassmann and softmax and any("floor ms" in row.facts for row in result.rows):
        written.append(
            f"the Grassmann gate adds {1e3 * (grassmann.median - softmax.median):.1f} µs to the softmax gate"
        )
    return written


BENCHMARK = Benchmark(
    name="layer",
    contenders=contenders,
    compare=compare,
    cuda_shapes=CUDA_SHAPES,
    cpu_shapes=CPU_SHAPES,
    named_shapes={"hopper": HOPPER_SHAPES, "decode": DECODE_SHAPES},
    facts=FACTS,
    lines=lines,
)
