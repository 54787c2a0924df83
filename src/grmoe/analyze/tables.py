"""An analysis as tables and text: a part for the terminal, all of it as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from grmoe.analyze.figures import correlation_text, draw
from grmoe.analyze.results import Analysis, Layer, Result
from grmoe.analyze.statistics import Information
from grmoe.files import write_file
from grmoe.runs.results import plain, save_results
from grmoe.tables import Table

DIGITS = 6  # significant, of every number in results.json

_CAPTIONS = {
    "types": "Experts and types: of an expert's tokens (left), of a type's tokens (right).",
    "entropy": "Entropy of the gate over the tokens of each type.",
    "kappa": "κ of each expert against the entropy of its tokens' types.",
    "domains": "Share of a domain's tokens that each expert leads.",
    "overlap": "How much experts share.",
    "training": "Load of each expert over training.",
}
_NOTE = (
    "Compare I(expert; type), in nats, with two baselines: types shuffled over tokens (chance), and a random expert "
    "for each distinct token (a router that separates tokens without regard to types). Only what is above "
    "the second is specialisation on types. p: share of the draws that reach the value."
)
_BOUNDS_NOTE = (
    "The paper's load is the mean gate, not the share of tokens computed. It bounds its CV by (N−1) e^{−αΔ}, "
    "Δ = γ(κ_min − ρ κ_max) > 0. γ is the least affinity of a token to its own expert, ργ the largest to another. "
    "A prior takes its range off Δ. Δ needed: where the bound would equal the CV. "
    "G_k: mean gate mass of the k largest experts, with its bounds."
)


def show(result: Result) -> Iterator[Table | str]:
    """What to print: one row per layer, the token types, and the correlation with κ."""
    analysis = result.analysis
    yield _layer_table(analysis)
    layers = analysis.layers
    if len(layers) > 4:  # too wide for a terminal: analysis.md has the others
        layers = [layers[i] for i in (0, len(layers) // 2, -1)]
    yield _type_table(analysis, layers)
    if analysis.layers[0].top_mass:
        yield _bounds_table(analysis)
    if any(layer.amortized is not None for layer in layers):
        yield _amortizer_table(analysis, layers)
    yield _correlation_line(analysis)


def save(result: Result, out: Path) -> dict[str, Path]:
    """Write OUT/results.json, the figures and analysis.md."""
    numbers = save_results(result.loaded, "analysis", plain(result.analysis, DIGITS), out)
    figures = draw(result.analysis, out)
    write_file(out / "analysis.md", markdown(result, figures).encode())
    return {"Numbers": numbers, "Report": out / "analysis.md"}


def _layer_table(analysis: Analysis) -> Table:
    """One row per layer."""
    headings = ["block", "α", "H", "load min–max", "leading min–max", "experts per token", "κ min–max"]
    headings += ["I(expert; type)", "shuffled", "by token", "p by token", "r(κ, type entropy)"]
    table = Table("Layers", headings)
    for layer in analysis.layers:
        correlation = layer.kappa_correlation
        table.add(
            str(layer.layer),
            f"{layer.alpha:g}",
            _number(layer.entropy),
            _range(layer.load[: analysis.experts - analysis.identity_experts], 3),
            _range(layer.leading_load, 3),
            f"{sum(share or 0.0 for share in layer.load):.2f}",
            "–" if layer.kappa is None else _range(layer.kappa, 2),
            *_information(layer.information),
            "–" if correlation is None else correlation_text(correlation),
        )
    return table


def _type_table(analysis: Analysis, layers: Sequence[Layer]) -> Table:
    """One row per type: its tokens, and for each layer the entropy of the gate and the expert that leads most."""
    headings = ["type", "tokens", "share"]
    for layer in layers:
        headings += [f"H, block {layer.layer}", f"most by, block {layer.layer}"]
    table = Table("Token types", headings)
    for k, (name, n) in enumerate(zip(analysis.types, analysis.type_tokens, strict=True)):
        cells = [name, f"{n:,}", f"{n / analysis.tokens:.1%}"]
        for layer in layers:
            share, expert = max((row[k] or 0.0, expert) for expert, row in enumerate(layer.of_type))
            cells += [_number(layer.type_entropy[k]), f"expert {expert}: {share:.0%}" if share else "–"]
        table.add(*cells)
    return table


def _bounds_table(analysis: Analysis) -> Table:
    """One row per layer: Theorem "Collapse Resistance" where the router has subspaces, and the top-k mass."""
    theorem = ["γ", "ρ", "Δ", "Δ > 0", "tokens with Δ > 0", "CV of mean gate", "bound", "Δ needed"]
    layers = analysis.layers
    theorem = theorem if any(layer.separation for layer in layers) else []
    ks = [found.k for found in layers[0].top_mass]
    headings = ["block", *theorem]
    for k in ks:
        headings += [f"G{k}", f"paper's bound, k = {k}", f"sharp bound, k = {k}"]
    table = Table("Bounds of the paper: load CV and top-k mass", headings)
    for layer in layers:
        found = layer.separation
        cells = ["–"] * len(theorem)
        if found is not None:
            gap = found.gaps[0]
            cells = [
                *map(_number, (gap.gamma, gap.rho, gap.gap)),
                "yes" if found.holds else "no",
                f"{found.leading_tokens:.1%}",
                *map(_number, (found.load_cv, found.paper, found.gap_needed)),
            ]
        for mass in layer.top_mass:
            cells += map(_number, (mass.mass, mass.paper, mass.sharp))
        table.add(str(layer.layer), *cells)
    return table


def _amortizer_table(analysis: Analysis, layers: Sequence[Layer]) -> Table:
    """One row for all tokens and one per type: what the amortiser does to concentration, logits and leading expert."""
    headings = ["tokens of type"]
    for layer in layers:
        names = ("concentration ratio", "mean logit ratio", "h of leading")
        headings += [f"{name}, block {layer.layer}" for name in names]
    table = Table("Amortiser (the paper: average concentration is preserved, a ratio of 1)", headings)
    cells = ["all (5 %–95 %)"]
    for layer in layers:
        a = layer.amortized
        if a is None:
            cells += ["–", "–", ""]
        else:
            kept = _spread(a.concentration, a.concentration_low, a.concentration_high)
            cells += [kept, _spread(a.ratio, a.ratio_low, a.ratio_high), ""]
    table.add(*cells)
    table.end_section()
    for k, name in enumerate(analysis.types):
        cells = [name]
        for layer in layers:
            a = layer.amortized
            cells += ["", "–", "–"] if a is None else ["", _number(a.type_ratio[k]), _number(a.type_h[k])]
        table.add(*cells)
    return table


def _spread(value: float | None, low: float | None, high: float | None) -> str:
    return f"{_number(value)} ({_number(low)}–{_number(high)})"


def _expert_table(analysis: Analysis, layer: Layer) -> Table:
    """One row per expert: κ, loads, the types of the tokens it leads and their entropy."""
    headings = ["expert", "κ", "load", "leading", "gate", "tokens led", *analysis.types, "type entropy"]
    table = Table(f"Block {layer.layer}", headings)
    for expert, of_expert in enumerate(layer.of_expert):
        table.add(
            str(expert),
            _number(layer.kappa[expert]) if layer.kappa else "–",
            _number(layer.load[expert]),
            _number(layer.leading_load[expert]),
            _number(layer.gate_load[expert]),
            f"{layer.expert_tokens[expert]:,}",
            *("–" if share is None else f"{share:.1%}" for share in of_expert),
            _number(layer.expert_type_entropy[expert]),
        )
    return table


def _correlation_line(analysis: Analysis) -> str:
    """κ against the entropy of an expert's types, beside the paper's number."""
    if analysis.kappa_correlation is None:
        return f"The {analysis.router} router has no κ to compare with the entropy of an expert's types."
    pooled, within = analysis.kappa_correlation, analysis.kappa_correlation_within
    return (
        f"κ against the entropy of an expert's types: {correlation_text(pooled)} over the experts of all layers; "
        f"{correlation_text(within)} within layers. Paper: r = -0.87, without an interval."
    )


def markdown(result: Result, figures: dict[str, Path]) -> str:
    """All tables, and the figures beside the file."""
    analysis, loaded = result.analysis, result.loaded
    step = "" if loaded.step is None else f", step {loaded.step}"
    parts = [
        f"# What the experts of {loaded.path.name} do",
        f"Router {analysis.router}{step}; {analysis.tokens:,} tokens of {analysis.text} in windows of "
        f"{analysis.sequence_length}; {len(analysis.layers)} MoE layers with {analysis.experts} experts each.",
        _correlation_line(analysis),
        _NOTE,
    ]
    tables = [_layer_table(analysis), _type_table(analysis, analysis.layers)]
    if any(layer.amortized is not None for layer in analysis.layers):
        tables.append(_amortizer_table(analysis, analysis.layers))
    for table in tables:
        parts += [f"## {table.title}", table.markdown()]
    if analysis.layers[0].top_mass:
        table = _bounds_table(analysis)
        parts += [f"## {table.title}", _BOUNDS_NOTE, table.markdown()]
    for layer in analysis.layers:
        table = _expert_table(analysis, layer)
        parts += [f"## {table.title}", table.markdown()]
        if layer.domain_information is not None:
            value, shuffled, by_token, p = _information(layer.domain_information)
            parts.append(f"I(expert; domain) = {value}; shuffled {shuffled}, by token {by_token} (p = {p}).")
        if layer.dropped:
            parts.append(f"{layer.dropped:,} tokens had no expert.")
    parts.append("## Figures")
    for name, figure in figures.items():
        parts += [_CAPTIONS[name], f"![{_CAPTIONS[name]}]({figure.name})"]
    return "\n\n".join(parts) + "\n"


def _information(found: Information | None) -> list[str]:
    if found is None:
        return ["–"] * 4
    values = (found.value, found.shuffled_mean, found.by_token_mean)
    return [*(f"{value:.4f}" for value in values), f"{found.by_token_p:.3f}"]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _range(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{min(known):.{digits}f}–{max(known):.{digits}f}" if known else "–"
