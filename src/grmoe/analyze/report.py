"""An analysis in words: tables for the terminal, and all of it as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from grmoe.analyze.figures import correlation_text
from grmoe.analyze.results import Analysis
from grmoe.analyze.statistics import Information

CAPTIONS = {
    "types": "Experts and types: of an expert's tokens (left), of a type's tokens (right).",
    "entropy": "Entropy of the gate over the tokens of each type.",
    "kappa": "κ of each expert against the entropy of its tokens' types.",
    "domains": "Of a domain's tokens, the share of each expert.",
    "overlap": "How much experts share.",
    "training": "Load of each expert over training.",
}
NOTE = (
    "I(expert; type) in nats is read against two baselines: types shuffled over tokens (chance), and a random expert "
    "for each distinct token (a router that tells tokens apart and knows nothing of types). Only what lies above the "
    "second is specialisation on types. p: share of the draws that reach the value."
)

Rows = tuple[list[str], list[list[str]]]


def layer_rows(analysis: Analysis) -> Rows:
    """One line a layer."""
    heading = [
        "layer",
        "α",
        "H",
        "load min–max",
        "experts a token",
        "κ min–max",
        "I(expert; type)",
        "shuffled",
    ]
    heading += ["by token", "p by token", "r(κ, type entropy)"]
    rows = []
    for layer in analysis.layers:
        work = sum(e * n for e, n in zip(layer.experts_per_token, analysis.type_tokens, strict=True) if e)
        kappa = "–" if layer.kappa is None else f"{min(layer.kappa):.2f}–{max(layer.kappa):.2f}"
        found = layer.information
        rows.append(
            [
                str(layer.layer),
                f"{layer.alpha:g}",
                f"{layer.entropy:.3f}",
                f"{min(layer.load):.3f}–{max(layer.load):.3f}",
                f"{work / max(1, layer.tokens):.2f}",
                kappa,
                *_information(found),
                "–" if layer.kappa_correlation is None else correlation_text(layer.kappa_correlation),
            ]
        )
    return heading, rows


def _information(found: Information | None) -> list[str]:
    if found is None:
        return ["–"] * 4
    values = (found.value, found.shuffled_mean, found.by_token_mean)
    return [*(f"{value:.4f}" for value in values), f"{found.by_token_p:.3f}"]


def type_rows(analysis: Analysis) -> Rows:
    """One line a type: how often, and per layer its entropy and the expert that has most of it."""
    heading = ["type", "tokens", "share"]
    for layer in analysis.layers:
        heading += [f"H, layer {layer.layer}", f"most by, layer {layer.layer}"]
    rows = []
    for k, (name, n) in enumerate(zip(analysis.types, analysis.type_tokens, strict=True)):
        row = [name, f"{n:,}", f"{n / analysis.tokens:.1%}"]
        for layer in analysis.layers:
            column = [(share[k] or 0.0, expert) for expert, share in enumerate(layer.of_type)]
            share, expert = max(column)
            row += [_number(layer.type_entropy[k]), f"expert {expert}: {share:.0%}" if n else "–"]
        rows.append(row)
    return heading, rows


def correlation_lines(analysis: Analysis) -> list[str]:
    """κ against the entropy of an expert's types, beside the paper's number."""
    if analysis.kappa_correlation is None:
        return [f"The {analysis.router} router has no κ to compare with the entropy of an expert's types."]
    pooled, within = analysis.kappa_correlation, analysis.kappa_correlation_within
    return [
        f"κ against the entropy of an expert's types: {correlation_text(pooled)} over experts of all layers; "
        f"{correlation_text(within)} within layers. Paper: r = -0.87, without an interval."
    ]


def rich_tables(analysis: Analysis) -> list[Table]:
    """For the terminal: a line a layer, and types where there are few enough layers for the width."""
    few = len(analysis.layers) <= 4
    types = type_rows(analysis)
    if not few:  # the first, middle and last layer stand for the rest, which analysis.md has
        shown = sorted({0, len(analysis.layers) // 2, len(analysis.layers) - 1})
        keep = [0, 1, 2, *(3 + 2 * i + j for i in shown for j in (0, 1))]
        types = [types[0][c] for c in keep], [[row[c] for c in keep] for row in types[1]]
    return [_rich("Layers", layer_rows(analysis)), _rich("Token types", types)]


def _rich(title: str, content: Rows) -> Table:
    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(content[0]):
        table.add_column(heading, justify="left" if i == 0 else "right")
    for row in content[1]:
        table.add_row(*row)
    return table


def write_markdown(analysis: Analysis, figures: dict[str, Path], path: Path) -> None:
    """All tables and the figures beside them."""
    step = "" if analysis.step is None else f", step {analysis.step}"
    lines = [
        f"# What the experts of {Path(analysis.model).name} do",
        "",
        f"Router {analysis.router}{step}; {analysis.tokens:,} tokens of {analysis.text} in windows of "
        f"{analysis.sequence_length}; {len(analysis.layers)} MoE layers of {analysis.experts} experts.",
        "",
        *correlation_lines(analysis),
        "",
        NOTE,
        "",
        "## Layers",
        "",
        *_markdown(layer_rows(analysis)),
        "",
        "## Token types",
        "",
        *_markdown(type_rows(analysis)),
    ]
    for number, layer in enumerate(analysis.layers):
        lines += ["", f"## Layer {layer.layer}", "", *_markdown(_expert_rows(analysis, number))]
        found = layer.domain_information
        if found is not None:
            value, shuffled, by_token, p = _information(found)
            lines += ["", f"I(expert; domain) = {value}; shuffled {shuffled}, by token {by_token} (p = {p})."]
        if layer.dropped:
            lines += ["", f"{layer.dropped:,} tokens had no expert."]
    lines += ["", "## Figures"]
    for name, figure in figures.items():
        lines += ["", CAPTIONS[name], "", f"![{CAPTIONS[name]}]({figure.name})"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _expert_rows(analysis: Analysis, number: int) -> Rows:
    """One line an expert: κ, load, the types of its tokens and their entropy."""
    layer = analysis.layers[number]
    heading = ["expert", "κ", "tokens", "load", "leads", "gate", *analysis.types, "type entropy"]
    rows = []
    for expert, share in enumerate(layer.of_expert):
        rows.append(
            [
                str(expert),
                "–" if layer.kappa is None else f"{layer.kappa[expert]:.3f}",
                f"{layer.expert_tokens[expert]:,}",
                f"{layer.load[expert]:.3f}",
                f"{layer.leading_load[expert]:.3f}",
                f"{layer.gate_load[expert]:.3f}",
                *("–" if value is None else f"{value:.1%}" for value in share),
                _number(layer.expert_type_entropy[expert]),
            ]
        )
    return heading, rows


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _markdown(content: Rows) -> list[str]:
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    rules = ["---", *["---:"] * (len(content[0]) - 1)]
    return [line(content[0]), line(rules), *map(line, content[1])]
