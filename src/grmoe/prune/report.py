"""Results of pruning in words, tables and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich.table import Table

from grmoe import __version__, geometry
from grmoe.dial.measure import Increase, Point, increase
from grmoe.prune.choose import RANDOM
from grmoe.prune.run import DRAWS, Outcome, Result
from grmoe.prune.site import Layout

RESULTS = "results.json"
STUDENT = 1.833  # 90 % of Student's t with DRAWS − 1 = 9 degrees of freedom lie within


@dataclass(frozen=True)
class Chance:
    """Perplexity over the draws of a random baseline; the interval is of their mean, 90 %."""

    mean: float
    low: float
    high: float
    least: float
    most: float


def chance(points: Sequence[Point]) -> Chance:
    losses = [p.loss for p in points]
    mean, error = fmean(losses), STUDENT * stdev(losses) / math.sqrt(len(losses))
    values = (mean, mean - error, mean + error, min(losses), max(losses))
    return Chance(*(math.exp(v) for v in values))


def draws(result: Result, kind: str, text: int | None) -> list[Point]:
    """The points of a random baseline at the final number of experts; text: a check's place, None for calibration."""
    return [_on(o, text) for o in result.final if o.method == kind]


def beaten(result: Result, outcome: Outcome, kind: str, text: int | None) -> int:
    """How many draws have a higher loss."""
    return sum(p.loss > _on(outcome, text).loss for p in draws(result, kind, text))


def _on(outcome: Outcome, text: int | None) -> Point:
    return outcome.point if text is None else outcome.checks[text]


def summary(result: Result) -> list[str]:
    chosen, trained, opened = result.chosen, result.trained, result.opened
    had = opened.model.config.num_experts
    lines = [f"Asked:   {result.plan} (trained: {had})"]
    if chosen is None:
        best = min((o for o in result.final if o.draw is None), key=lambda o: o.point.loss)
        grown = increase(best.point, trained)
        lines.append(
            f"Chosen:  nothing: with {best.experts} experts already the best, {best.method}, is at "
            f"{percent(grown.value)} (90 % interval {percent(grown.low)} to {percent(grown.high)})"
        )
    else:
        grown = increase(chosen.point, trained)
        lines += [
            f"Chosen:  {chosen.experts} experts, {chosen.method}: {layout_words(result, chosen)}",
            f"         perplexity {chosen.point.perplexity:.3f} (trained {trained.perplexity:.3f}): "
            f"{percent(grown.value)}, 90 % interval {percent(grown.low)} to {percent(grown.high)}",
        ]
        lines.append(
            f"Size:    {result.before.parameters:,} → {result.after.parameters:,} parameters "
            f"({percent(result.after.parameters / result.before.parameters - 1)}), weights "
            f"{result.before.bytes / 1e6:.2f} → {result.after.bytes / 1e6:.2f} MB"
        )
    lines += [_against_chance(result, text) for text in (None, *range(len(result.others)))]
    lines.append(_overlap_words(result))
    if chosen is None:
        return lines
    for i, other in enumerate(result.others):
        grown = increase(chosen.checks[i], result.trained_checks[i])
        kept = "" if result.plan.experts is not None else _kept(result.plan.increase, grown)
        lines.append(
            f"Check:   {other.name} ({other.tokens:,} tokens): perplexity {result.trained_checks[i].perplexity:.3f} → "
            f"{chosen.checks[i].perplexity:.3f}, {percent(grown.value)} ({percent(grown.low)} to "
            f"{percent(grown.high)}){kept}"
        )
    if not result.others:
        lines.append(
            "Check:   none; the text it was chosen on flatters it, --check measures it on other text"
        )
    return lines


def _kept(bound: float, grown: Increase) -> str:
    """Whether the promise held on text it was not made on."""
    if grown.value <= bound:
        return ": kept" + ("" if grown.high <= bound else ", but the interval reaches past the limit")
    doubt = ", within its noise" if grown.low <= bound else ""
    return f": missed by {100 * (grown.value - bound):.2f} points{doubt}"


def layout_words(result: Result, outcome: Outcome) -> str:
    """What became of the experts, by block."""
    blocks = result.opened.model.config.moe_layers
    parts = []
    for block, layout in zip(blocks, outcome.layouts, strict=True):
        gone = sorted(set(range(result.opened.model.config.num_experts)) - {e for g in layout for e in g})
        said = ["+".join(map(str, group)) for group in layout if len(group) > 1]
        said += [f"without {' '.join(map(str, gone))}"] if gone else []
        parts.append(f"block {block} {', '.join(said)}")
    return "; ".join(parts)


def _against_chance(result: Result, text: int | None) -> str:
    """Whether overlap says more than chance, in the fair comparison: merges with merges, drops with drops."""
    name = "calibration" if text is None else result.others[text].name
    by = {o.method: o for o in result.final if o.draw is None}
    merges = beaten(result, by["overlap merge"], "random merge", text)
    drops = beaten(result, by["overlap drop"], "random drop", text)
    return f"Overlap: lower loss than {merges} of {DRAWS} random merges and {drops} of {DRAWS} random drops ({name})"


def _overlap_words(result: Result) -> str:
    config = result.opened.model.config
    parts = [f"block {o.block} {o.least:.3f} to {o.most:.3f}" for o in result.overlaps]
    if config.router != "grassmann":
        return f"         cosines of gate rows, all pairs: {'; '.join(parts)}"
    assert config.router_rank is not None
    random = geometry.random_overlap(config.hidden_size, config.router_rank) / config.router_rank
    return f"         overlaps of all pairs: {'; '.join(parts)}; random frames {random:.3f}, equal ones 1"


def methods_table(result: Result) -> Table:
    """Every method at the same number of experts, the least moved predictions first."""
    table = Table("method", title=f"{result.experts} experts in every layer", title_justify="left")
    table.add_column("KL", justify="right")
    for name in ("calibration", *(other.name for other in result.others)):
        short = Path(name).name
        for heading in (short, "increase, % (90 %)", "random drops beaten"):
            table.add_column(heading, justify="right")
    bases = [result.trained, *result.trained_checks]
    table.add_row("as trained", "", *(v for p in bases for v in (f"{p.perplexity:.3f}", "", "")))
    texts: list[int | None] = [None, *range(len(result.others))]
    single = sorted((o for o in result.final if o.draw is None), key=lambda o: o.divergence or 0.0)
    for outcome in single:
        cells = []
        for text, base in zip(texts, bases, strict=True):
            point = _on(outcome, text)
            grown = increase(point, base)
            cells += [
                f"{point.perplexity:.3f}",
                _band(grown.value, grown.low, grown.high),
                f"{beaten(result, outcome, 'random drop', text)} of {DRAWS}",
            ]
        name = outcome.method + (" ←" if outcome is result.chosen else "")
        table.add_row(name, f"{outcome.divergence:.4f}", *cells)
    table.add_section()
    for kind in RANDOM:
        cells = []
        for text, base in zip(texts, bases, strict=True):
            c = chance(draws(result, kind, text))
            band = _band(*(v / base.perplexity - 1 for v in (c.mean, c.low, c.high)))
            cells += [f"{c.mean:.3f}", band]
            cells.append(f"{c.least:.3f} to {c.most:.3f}")
        table.add_row(f"{kind}, mean of {DRAWS}", "", *cells)
    return table


def as_json(result: Result) -> dict[str, Any]:
    model = result.opened.model
    name = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"
    texts: list[int | None] = [None, *range(len(result.others))]
    return {
        "grmoe": __version__,
        "model": str(result.opened.path),
        "step": result.opened.step,
        "device": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "router": model.config.router,
        "asked": {"experts": result.plan.experts, "max_ppl_increase": _bound(result)},
        "trained_experts": model.config.num_experts,
        "experts": result.experts,
        "calibration": {"text": result.text.name, "tokens": result.text.tokens} | _point(result.trained),
        "checks": [
            {"text": other.name, "tokens": other.tokens} | _point(point)
            for other, point in zip(result.others, result.trained_checks, strict=True)
        ],
        "overlaps": [asdict(o) for o in result.overlaps],
        "before": asdict(result.before),
        "after": asdict(result.after),
        "chosen": None if result.chosen is None else _outcome(result, result.chosen),
        "outcomes": [_outcome(result, o) for o in result.outcomes],
        "random": {
            kind: {
                "calibration" if text is None else result.others[text].name: asdict(
                    chance(draws(result, kind, text))
                )
                for text in texts
            }
            for kind in RANDOM
        },
    }


def _bound(result: Result) -> float | None:
    return result.plan.increase if result.plan.experts is None else None


def _point(point: Point) -> dict[str, float]:
    return {"loss": point.loss, "perplexity": point.perplexity, "experts_per_token": point.experts}


def _outcome(result: Result, outcome: Outcome) -> dict[str, Any]:
    bases = [result.trained, *result.trained_checks]
    points = [outcome.point, *outcome.checks]
    own, *others = (
        _point(p) | {"increase": asdict(increase(p, base))} for p, base in zip(points, bases, strict=False)
    )
    return {
        "method": outcome.method,
        "draw": outcome.draw,
        "experts": outcome.experts,
        "layouts": [_layout(layout) for layout in outcome.layouts],
        "divergence": outcome.divergence,
        **own,
        "checks": others,
    }


def _layout(layout: Layout) -> list[list[int]]:
    return [list(group) for group in layout]


def write_results(result: Result, out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / RESULTS
    path.write_text(json.dumps(as_json(result), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def card_section(result: Result) -> str:
    """What the model card says about the surgery."""
    chosen = result.chosen
    assert chosen is not None
    checks = "".join(
        f" On {other.name} ({other.tokens} tokens) {base.perplexity:.3f} → {point.perplexity:.3f}."
        for other, base, point in zip(result.others, result.trained_checks, chosen.checks, strict=True)
    )
    return f"""## Pruned

{chosen.experts} experts in every MoE layer in place of {result.opened.model.config.num_experts}; nothing was retrained,
and what stands above was measured before.
{layout_words(result, chosen)}. Perplexity on {result.text.tokens} tokens of calibration text
{result.trained.perplexity:.3f} → {chosen.point.perplexity:.3f}.{checks}
"""


def _band(value: float, low: float, high: float) -> str:
    return f"{100 * value:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"


def percent(value: float) -> str:
    return f"{100 * value:+.2f} %"
