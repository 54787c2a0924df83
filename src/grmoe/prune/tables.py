"""Results of `grmoe prune` in a table and lines, for the terminal and for the model card."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from grmoe.probe.losses import verdict
from grmoe.prune.choose import RANDOM
from grmoe.prune.results import DRAWS, Outcome, PruneResults, Result
from grmoe.tables import Table, percent


def show(result: Result) -> Iterator[Table | str]:
    """What the terminal shows: the choice in a few lines, then all methods."""
    yield from _summary(result)
    yield _methods_table(result.body)


def text_names(body: PruneResults) -> list[str]:
    """Short names of the texts, calibration first."""
    return ["calibration", *(Path(text.text).name for text in body.texts[1:])]


def _summary(result: Result) -> Iterator[str]:
    body, chosen = result.body, result.body.chosen
    trained = body.texts[0]
    yield f"Asked:   {body.asked} (trained: {body.trained_experts})"
    if chosen is None:
        best = min(body.ranked, key=lambda o: o.texts[0].loss)
        yield (
            f"Chosen:  nothing. With {best.experts} experts the best method, {best.method}, is at "
            f"{best.texts[0].increase}"
        )
    else:
        yield f"Chosen:  {chosen.experts} experts, {chosen.method}: {_describe_layouts(result)}"
        yield (
            f"         perplexity {chosen.texts[0].perplexity:.3f} (trained {trained.perplexity:.3f}): "
            f"{chosen.texts[0].increase}"
        )
        assert body.after is not None
        yield (
            f"Size:    {body.before.parameters:,} → {body.after.parameters:,} parameters "
            f"({percent(body.after.parameters / body.before.parameters - 1)}), weights "
            f"{body.before.bytes / 1e6:.2f} → {body.after.bytes / 1e6:.2f} MB"
        )
    for i, name in enumerate(text_names(body)):
        merges, drops = _overlap_beats(body, i)
        yield (
            f"Overlap: lower loss than {merges} of {DRAWS} random merges and {drops} of {DRAWS} random drops ({name})"
        )
    yield f"         {_describe_overlaps(body)}"
    for c in body.certificates:
        yield (
            f"Bound:   certificate drop, block {c.block}: ‖y − ŷ‖ ≤ {c.bound:.3g} certified, {c.error:.3g} measured, "
            f"‖y‖ = {c.output:.3g} (means over tokens)"
        )
    if chosen is None:
        return
    if len(body.texts) == 1:
        yield "Check:   none. The calibration text flatters the choice; measure on other text with --check"
    for text, pruned in zip(body.texts[1:], chosen.texts[1:], strict=True):
        kept = "" if body.max_ppl_increase is None else f": {verdict(pruned.increase, body.max_ppl_increase)}"
        yield (
            f"Check:   {Path(text.text).name} ({text.tokens:,} tokens): perplexity {text.perplexity:.3f} → "
            f"{pruned.perplexity:.3f}, {pruned.increase}{kept}"
        )


def _describe_layouts(result: Result) -> str:
    """What happened to the experts, by block: "block 1: 0+3 merged, 5 dropped"."""
    body = result.body
    assert body.chosen is not None
    blocks = []
    for block, layout in zip(result.loaded.model.config.moe_layers, body.chosen.layouts, strict=True):
        kept = {e for group in layout for e in group}
        dropped = [str(e) for e in range(body.trained_experts) if e not in kept]
        parts = [f"{'+'.join(map(str, group))} merged" for group in layout if len(group) > 1]
        parts += [f"{' '.join(dropped)} dropped"] if dropped else []
        blocks.append(f"block {block}: {', '.join(parts)}")
    return "; ".join(blocks)


def _overlap_beats(body: PruneResults, text: int) -> tuple[int, int]:
    """Overlap against chance, in the fair comparison: merges with merges, drops with drops."""
    by_method = {o.method: o for o in body.ranked}
    merges = body.beaten(by_method["overlap merge"], "random merge", text)
    return merges, body.beaten(by_method["overlap drop"], "random drop", text)


def _describe_overlaps(body: PruneResults) -> str:
    parts = "; ".join(f"block {o.block} {o.smallest:.3f} to {o.largest:.3f}" for o in body.overlaps)
    if body.random_overlap is None:
        return f"cosines of gate rows, all pairs: {parts}"
    return f"overlaps of all pairs: {parts}; random frames {body.random_overlap:.3f}, equal frames 1"


def _methods_table(body: PruneResults) -> Table:
    """Every method at the same number of experts, the smallest divergence first."""
    headings = ["method", "KL"]
    for name in text_names(body):
        headings += [name, "increase, % (90 %)", "random drops beaten"]
    table = Table(f"{body.experts} experts in every layer", headings)
    table.add("as trained", "", *(cell for text in body.texts for cell in (f"{text.perplexity:.3f}", "", "")))
    for outcome in body.ranked:
        cells = [cell for i in range(len(body.texts)) for cell in _method_cells(body, outcome, i)]
        name = outcome.method + (" ←" if outcome == body.chosen else "")
        table.add(name, f"{outcome.divergence:.4f}", *cells)
    table.end_section()
    for kind in RANDOM:
        cells = []
        for text, c in zip(body.texts, body.random[kind], strict=True):
            band = _band(*(v / text.perplexity - 1 for v in (c.mean, c.low, c.high)))
            cells += [f"{c.mean:.3f}", band, f"{c.smallest:.3f} to {c.largest:.3f}"]
        table.add(f"{kind}, mean of {DRAWS} (range)", "", *cells)
    return table


def _method_cells(body: PruneResults, outcome: Outcome, text: int) -> tuple[str, str, str]:
    pruned = outcome.texts[text]
    band = _band(pruned.increase.value, pruned.increase.low, pruned.increase.high)
    return f"{pruned.perplexity:.3f}", band, f"{body.beaten(outcome, 'random drop', text)} of {DRAWS}"


def card_section(result: Result) -> str:
    """The section of the model card. It names texts without their place on this machine."""
    body, chosen = result.body, result.body.chosen
    assert chosen is not None
    table = Table("", ["text", "tokens", "perplexity before", "perplexity", "increase"])
    for text, pruned in zip(body.texts, chosen.texts, strict=True):
        table.add(
            Path(text.text).name,
            f"{text.tokens:,}",
            f"{text.perplexity:.3f}",
            f"{pruned.perplexity:.3f}",
            str(pruned.increase),
        )
    return f"""## Pruned

{chosen.experts} experts in every MoE layer instead of {body.trained_experts}, chosen with `grmoe prune` on the first
text below. Nothing was retrained. Training figures in this card are from before pruning.

{_describe_layouts(result)}.

{table.markdown()}
"""


def _band(value: float, low: float, high: float) -> str:
    return f"{100 * value:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"
