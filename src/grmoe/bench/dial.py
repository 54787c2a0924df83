"""What the dial saves: the layer's time over experts per token, and the effect of α on both.

Two parts. First, given selections move the average number of experts per token from 1 to 4, and a line is fitted to
the times. Then the layer's own gate selects the smallest set of experts with 90 % of the mass, at several α.

Legend: T tokens, D model width, N experts, R subspace rank.
"""

from __future__ import annotations

import copy
import statistics
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grmoe.bench.blocks import CHECKED_TOKENS, Block, Setting, as_reference, routed
from grmoe.bench.measure import Contender, Result, Row, Runs, relative_error
from grmoe.bench.plot import BY_KIND, canvas, curve
from grmoe.bench.run import Benchmark
from grmoe.bench.shapes import DialShape, LayerShape
from grmoe.routing import GrassmannRouter, Mass

CUDA_SHAPES = (DialShape(16384, 2048, 16, 2752),)
CPU_SHAPES = (DialShape(2048, 256, 8, 256),)

TAU, CAP = 0.9, 4
_AVERAGES = tuple(1 + i / 4 for i in range(13))
ALPHAS = (0.5, 1.0, 2.0, 5.0)
FORWARD, BOTH = "forward", "forward+backward"

FACTS = {"experts": ".2f", "α": "g", "dropped": ".4f", "bound": ".3g"}


def contenders(
    shape: DialShape, device: torch.device, dtype: torch.dtype, rank: int | None = None
) -> list[Contender]:
    def make() -> Setting:
        sizes = LayerShape(shape.tokens, shape.dim, shape.experts, shape.width, CAP)
        return Setting(sizes, rank, device, dtype, Mass(TAU, cap=CAP))

    setting = cache(make)

    def given(average: float) -> Contender:
        return Contender(f"{average:.2f} experts", lambda: _given_runs(setting(), average))

    def own(alpha: float) -> Contender:
        return Contender(f"own gate, α = {alpha:g}", lambda: _own_runs(setting(), alpha))

    return [*map(given, _AVERAGES), *map(own, ALPHAS)]


def given_selection(tokens: int, experts: int, average: float, device: torch.device) -> Tensor:
    """A mask (T, N) with round(average · T) entries. Each token gets floor(average) or ceil(average) experts.

    Assignments go round the experts in turn, so their loads differ by at most one. The order is random.
    """
    with torch.device(device):
        count_T = torch.full((tokens,), int(average))
        count_T[: round((average - int(average)) * tokens)] += 1
        count_T = count_T[torch.randperm(tokens)]
        first_T = count_T.cumsum(0) - count_T
        seat_TN = (torch.arange(experts) - first_T.unsqueeze(1)) % experts
        return (seat_TN < count_T.unsqueeze(1))[:, torch.randperm(experts)]


def _given_runs(setting: Setting, average: float) -> Runs:
    """Gate, given selection, experts."""
    moe = setting.layer(setting.grassmann)
    selected_TN = given_selection(setting.shape.tokens, setting.shape.experts, average, setting.device)

    def errors() -> dict[str, float]:
        x_TD, chosen_TN = setting.x_TD.detach()[:CHECKED_TOKENS], selected_TN[:CHECKED_TOKENS]
        moe64 = setting.layer(as_reference(moe.router), "reference")
        moe64.experts = setting.experts64
        with torch.no_grad():
            y_TD, y64_TD = routed(moe, x_TD, chosen_TN), routed(moe64, x_TD.double(), chosen_TN)
        return {"y": relative_error(y_TD, y64_TD)}

    block = Block(lambda x: routed(moe, x, selected_TN), list(moe.parameters()), errors)
    facts = {"experts": float(selected_TN.sum() / len(selected_TN))}
    return _runs(block, setting.x_TD, setting.grad_TD, facts)


def _own_runs(setting: Setting, alpha: float) -> Runs:
    """The layer with its own selection, on tokens near its experts' subspaces."""
    router = copy.deepcopy(setting.grassmann)
    router.alpha = alpha
    moe = setting.layer(router)
    x_TD = near_tokens(router, setting.shape.tokens).to(setting.dtype).requires_grad_()
    with torch.no_grad():
        _, routing = moe.run(x_TD)
        truncation = moe.truncation(x_TD.detach(), routing)
    facts = {
        "experts": float(routing.selected.sum() / len(x_TD)),
        "α": alpha,
        "dropped": float(truncation.dropped.mean()),
        "bound": float(truncation.bound.mean()),
    }
    block = Block(moe, list(moe.parameters()), lambda: setting.errors(moe, moe, x_TD))
    return _runs(block, x_TD, setting.grad_TD, facts)


def near_tokens(router: GrassmannRouter, tokens: int) -> Tensor:
    """Tokens that mix a random expert's subspace with noise: some are clear, some are not. Lengths vary."""
    N, D, R = router.frames.shape
    with torch.no_grad(), torch.device(router.frames.device):
        owner_TN1 = torch.nn.functional.one_hot(torch.randint(N, (tokens,)), N).unsqueeze(-1)
        inside_T1R = torch.nn.functional.normalize(torch.randn(tokens, 1, R), dim=-1)
        inside_TD = (owner_TN1 * inside_T1R).flatten(1) @ router.frames.mT.reshape(N * R, D)
        noise_TD = torch.randn(tokens, D) / D**0.5
        share_T1 = torch.rand(tokens, 1)
        length_T1 = D**0.5 * torch.exp(torch.randn(tokens, 1) / 2)
        return length_T1 * (share_T1.sqrt() * inside_TD + (1 - share_T1).sqrt() * noise_TD)


def _runs(block: Block, x_TD: Tensor, grad_TD: Tensor, facts: dict[str, float]) -> Runs:
    timed = {FORWARD: lambda: block.forward(x_TD), BOTH: lambda: block.both(x_TD, grad_TD)}
    return Runs(timed, block.errors, facts)


@dataclass(frozen=True)
class Fit:
    """time = offset + slope · experts, in ms."""

    slope_ms: float
    offset_ms: float
    r2: float

    def __call__(self, experts: float) -> float:
        return self.offset_ms + self.slope_ms * experts


def fit_line(x: list[float], y: list[float]) -> Fit:
    """Least squares."""
    slope, offset = statistics.linear_regression(x, y)
    return Fit(slope, offset, statistics.correlation(x, y) ** 2)


def compare(shape: DialShape, rows: list[Row]) -> Result:
    result = Result(shape, rows)
    given = _given(rows)
    for mode in (FORWARD, BOTH):
        timed = [row for row in given if mode in row.times]
        if len({row.facts["experts"] for row in timed}) < 2:
            continue  # one point makes no line
        fit = fit_line([row.facts["experts"] for row in timed], [row.times[mode].median for row in timed])
        result.extra.setdefault("fits", {})[mode] = asdict(fit)
        result.add_ratio(f"time at 1 expert / at 2, {mode}", "1.00 experts", "2.00 experts", mode)
    return result


def _fit_lines(result: Result) -> list[str]:
    return [
        f"{mode}: {f['offset_ms']:.3g} + {f['slope_ms']:.3g} · experts ms, R² = {f['r2']:.5f}"
        for mode, f in result.extra.get("fits", {}).items()
    ]


def draw(results: list[Result], path: Path, title: str) -> Path:
    """Left: time over experts per token. Right: time over α."""
    with canvas(path, len(results), 2, 3.6, title) as axes:
        for (left, right), result in zip(axes, results, strict=True):
            for mode, color in ((FORWARD, BY_KIND["ours"]), (BOTH, BY_KIND["peer"])):
                rows = [row for row in _given(result.rows) if mode in row.times]
                fit = result.extra.get("fits", {}).get(mode)
                if rows:
                    experts = [row.facts["experts"] for row in rows]
                    curve(left, experts, rows, mode, color, Fit(**fit) if fit else None)
            left.set_title(str(result.shape), loc="left", fontsize=9)
            left.set_xlabel("experts per token, given")
            left.set_ylabel("ms")
            left.set_ylim(bottom=0)
            left.legend(frameon=False)
            _draw_alpha(right, [row for row in result.rows if "α" in row.facts and BOTH in row.times])
    return path


def _draw_alpha(ax: Any, rows: list[Row]) -> None:
    if not rows:
        return
    alphas = [row.facts["α"] for row in rows]
    curve(ax, alphas, rows, BOTH, BY_KIND["peer"], None)
    ax.set_xscale("log", base=2)
    ax.set_xticks(alphas, [f"{a:g}" for a in alphas])
    ax.set_xlabel(f"α, own gate: mass {TAU:g}, at most {CAP} experts")
    ax.set_ylabel(f"ms, {BOTH}")
    ax.set_ylim(bottom=0)
    for row in rows:
        note = f"{row.facts['experts']:.2f} experts\n{100 * row.facts['dropped']:.1f} % dropped"
        top = row.times[BOTH].interval[1]
        ax.annotate(note, (row.facts["α"], top), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    ax.margins(x=0.15, y=0.25)


def _given(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "experts" in row.facts and "α" not in row.facts]


BENCHMARK = Benchmark(
    name="dial",
    contenders=contenders,
    compare=compare,
    cuda_shapes=CUDA_SHAPES,
    cpu_shapes=CPU_SHAPES,
    facts=FACTS,
    lines=_fit_lines,
    draw=draw,
)
