"""Results of `grmoe dial` in tables and lines, for the terminal and for the model card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grmoe.dial.beside import BudgetRow
from grmoe.dial.frontier import Gain
from grmoe.dial.meter import IN_WORDS
from grmoe.dial.results import Check, DialResults, PointResult, Result
from grmoe.dial.speed import Speed
from grmoe.dial.target import Target
from grmoe.hardware import device_name
from grmoe.probe.losses import Increase, verdict
from grmoe.tables import Table, percent, span

_CARD_POINTS = 3  # of the frontier, in the model card
_OFF = 0.05  # share of a budget by which other experts are computed than asked for, that is worth saying


def show(result: Result) -> Iterator[Table | str]:
    """What the terminal shows: the choice in a few lines, the tables behind it, and last perplexity by budget."""
    body = result.body
    yield from _summary(body)
    yield _frontier_table(body, _worth_showing(body))
    yield _alpha_table(body)
    yield _certificate_table(body)
    if any(check.budgets for check in body.checks):
        yield _text_table(body)
    if body.budgets:
        yield budget_table(body.budgets)  # last, where the eye is when the command ends


def _worth_showing(body: DialResults) -> dict[str, list[PointResult]]:
    """The settings that no other beats, the chosen one and the trained one, each once. results.json has all of them.

    Of a dial with speeds, those that were timed.
    """
    left = [p for p in _comparable(body) if p.best or p in (body.chosen, body.trained)]
    found = {}
    for name, points in body.families.items():
        # With points of one α for all above it, only those of one α per layer are left.
        found[name.removesuffix(" allowed")] = [p for p in points if p in left]
        left = [p for p in left if p not in points]
    for p in left:  # the chosen and the trained one may lie on no frontier
        if p in (body.chosen, body.trained):
            found.setdefault("trained" if p == body.trained else _rule(p), []).append(p)
    return {name: sorted(points, key=lambda p: p.experts_per_token) for name, points in found.items()}


def _rule(point: PointResult) -> str:
    """Of a setting, as the tables name it."""
    return IN_WORDS.get(point.family, point.family)


def _comparable(body: DialResults) -> list[PointResult]:
    """The timed points of a dial with speeds, else all."""
    return [p for p in body.points if p.speed or not body.timed]


def _summary(body: DialResults) -> Iterator[str]:
    chosen, trained = body.chosen, body.trained
    yield f"Asked:  {body.asked}"
    yield f"Chosen: {_rule(chosen)}: {chosen.name}"
    yield (
        f"        {chosen.experts_per_token:.3f} experts per token (trained {trained.experts_per_token:.3f}), "
        f"perplexity {chosen.perplexity:.3f} (trained {trained.perplexity:.3f}): {chosen.increase}"
    )
    if len(body.domains) > 1:
        yield f"        by domain: {domain_line(body.domains)}"
    yield (
        f"        load: CV {chosen.load_cv:.3f} (trained {trained.load_cv:.3f}), the least used expert gets "
        f"{chosen.min_load:.2f} of a fair share (trained {trained.min_load:.2f})"
    )
    if chosen.speed is not None:
        yield (
            f"        {chosen.speed.relative:.2f} times the trained speed "
            f"(middle 80 %: {span(chosen.speed.relative_interval)}), {chosen.speed.tokens_per_second:,.0f} tokens/s "
            f"({chosen.speed.how})"
        )
    yield f"        {gain_line(body.per_layer_gains)}"
    for rule, gained in body.rule_gains.items():
        yield f"        {gain_line(gained, rule)}"
    if body.curve:
        low, high = (body.curve[i]["experts_per_token"] for i in (0, -1))
        yield f"Budget: any from {low:g} to {high:g} experts per token ({len(body.curve)} points of the curve)"
    for check in body.checks:
        yield f"Check:  {check_line(body.target, check)}"


def domain_line(domains: Mapping[str, Increase]) -> str:
    """The increase of perplexity on each domain, the largest first."""
    ordered = sorted(domains.items(), key=lambda item: -item[1].value)
    return ", ".join(f"{name} {percent(found.value)}" for name, found in ordered)


def gain_line(gains: Sequence[Gain], rule: str = "one α per layer") -> str:
    """Where a rule beats one α for all by more than noise, and the largest such gain."""
    better = [g for g in gains if g.gain > g.error]
    if not better:
        return f"{rule}: no gain over one α for all beyond noise"
    best = max(better, key=lambda g: g.gain)
    return (
        f"{rule}: lower loss at {len(better)} of {len(gains)} points of one α for all, beyond noise; "
        f"at most {best.gain:.4f} ± {best.error:.4f} nats per token, at {best.experts_per_token:.2f} experts per token"
    )


def check_line(target: Target, check: Check) -> str:
    """The chosen setting on another text, and whether it keeps the target there."""
    line = (
        f"{Path(check.text).name} ({check.tokens:,} tokens): {check.experts_per_token:.3f} experts per token, "
        f"perplexity {check.perplexity_trained:.3f} → {check.perplexity:.3f}, {check.increase}"
    )
    if target.kind == "perplexity":
        return f"{line}: {verdict(check.increase, target.value)}"
    if check.missed_by is None:
        return line
    missed = f"missed by {check.missed_by:.3f} experts per token"
    return f"{line}: {'kept' if check.missed_by <= 0 else missed}"


def _frontier_table(body: DialResults, families: Mapping[str, Sequence[PointResult]]) -> Table:
    """Points by rule. An arrow marks the chosen one, a star those that no other rule beats."""
    speed = ["relative speed"] if body.timed else []
    headings = ["rule", "setting", "experts per token", "perplexity", "increase", *speed, "best"]
    title = "Settings on the calibration text (best: none has as few experts and a lower loss; ← chosen)"
    table = Table(title, headings, left=2)
    for name, points in families.items():
        for p in points:
            table.add(
                name + (" ←" if p == body.chosen else ""),
                p.name,
                f"{p.experts_per_token:.3f}",
                f"{p.perplexity:.3f}",
                percent(p.increase.value),
                *([_relative(p.speed)] if body.timed else []),
                "*" if p.best else "",
            )
        table.end_section()
    return table


def _steps_to(row: BudgetRow) -> str:
    """What is computed, where that is not the budget."""
    off = abs(row.experts_per_token - row.budget) > _OFF * row.budget
    return f", with {row.experts_per_token:.2f}" if off else ""


def budget_table(rows: Sequence[BudgetRow]) -> Table:
    """Perplexity by experts per token: one row per budget, one column per model.

    A curve with a k per layer has steps. Where a budget lies between two of them, the cell says what is computed.
    """
    models = list(dict.fromkeys(row.model for row in rows))
    title = "Perplexity by experts per token, and its increase over the same model as trained"
    table = Table(title, ["experts per token", *models])
    for budget in sorted({row.budget for row in rows}, reverse=True):
        cells = {
            row.model: f"{row.perplexity:.2f} ({percent(row.increase.value)}){_steps_to(row)}"
            for row in rows
            if row.budget == budget
        }
        table.add(f"{budget:.3g}", *(cells.get(name, "–") for name in models))
    return table


def _text_table(body: DialResults) -> Table:
    """What fewer experts cost on each text: one row per budget."""
    own = [row for row in body.budgets if row.model == body.budgets[0].model]
    texts = [body.calibration.text, *(Path(check.text).name for check in body.checks)]
    table = Table("Increase of perplexity by experts per token, on each text", ["experts per token", *texts])
    for same_budget in zip(own, *(check.budgets for check in body.checks), strict=True):
        grown = (percent(row.increase.value) for row in same_budget)
        table.add(f"{same_budget[0].budget:.3g}", *grown)
    return table


def _alpha_table(body: DialResults) -> Table:
    """The paper's table: what α does, at the chosen τ, or weight, and cap."""
    setting = body.table[0].setting
    rule = "weight ≥" if setting["selection"] == "at_least" else setting["selection"]
    tau, cap = setting["selection_tau"], setting["num_experts_per_tok"]
    speed = ["relative speed", "tokens/s"] if body.timed else []
    headings = ["α", "exp(H)", "1/Σg²", "experts per token", "perplexity", *speed]
    table = Table(f"One α for all layers, {rule} {tau:g}, cap {cap}", headings)
    rows: list[tuple[str, PointResult]] = [(f"{row.alpha:g}", row) for row in body.table]
    for name, p in [("as trained", body.trained), *rows, ("chosen", body.chosen)]:
        table.add(
            name,
            f"{p.effective_experts_entropy:.2f}",
            f"{p.effective_experts_inverse:.2f}",
            f"{p.experts_per_token:.3f}",
            f"{p.perplexity:.3f}",
            *(
                [_relative(p.speed), f"{p.speed.tokens_per_second:,.0f}" if p.speed else "–"]
                if body.timed
                else []
            ),
        )
    return table


def _certificate_table(body: DialResults) -> Table:
    """What is proved about the chosen setting, layer by layer."""
    tokens = body.certificates[0].tokens
    title = f"Certificates of the chosen setting against all experts at the same α, {tokens:,} tokens"
    headings = ["block", "dropped mass", "most", "entropy within", "entropy", "‖ŷ‖", "error", "bound"]
    table = Table(title, [*headings, "bound / error"])
    for c in body.certificates:
        table.add(
            str(c.layer),
            f"{c.dropped_mean:.3f}",
            f"{c.dropped_max:.3f}",
            span((c.entropy_lower, c.entropy_upper)),
            f"{c.entropy:.2f}",
            f"{c.output:.3g}",
            f"{c.exact:.3g}",
            f"{c.bound:.3g}" if c.holds else "∞ for some tokens",
            f"{c.looseness:,.0f}",
        )
    return table


def card_section(result: Result) -> str:
    """The section of the model card. It names texts without their place on this machine."""
    body, model = result.body, result.loaded.model
    chosen, trained, text = body.chosen, body.trained, body.calibration
    few = best = [p for p in _comparable(body) if p.on_frontier]
    if len(best) > _CARD_POINTS:
        few = [best[i * (len(best) - 1) // (_CARD_POINTS - 1)] for i in range(_CARD_POINTS)]
    checks = "".join(f"- Checked on {check_line(body.target, c)}.\n" for c in body.checks)
    alphas, certificates = _alpha_table(body), _certificate_table(body)
    domains = f" By domain: {domain_line(body.domains)}." if len(body.domains) > 1 else ""
    return f"""## The dial

Measured with `grmoe dial` on {text.tokens:,} tokens of “{Path(text.text).name}”
({device_name(model.device)}, {str(model.dtype).removeprefix("torch.")}).

- Asked: {body.asked}.
- Chosen: {chosen.name}: {chosen.experts_per_token:.3f} experts per token, perplexity {chosen.perplexity:.3f},
  {chosen.increase}.{domains}
- As trained: {trained.name}: {trained.experts_per_token:.3f} experts per token, perplexity {trained.perplexity:.3f}.
{checks}
{alphas.title}:

{alphas.markdown()}

Some points of the frontier, one α per layer allowed:

{_frontier_table(body, {"frontier": few}).markdown()}

{certificates.title} (error: measured; bound: proved):

{certificates.markdown()}
"""


def _relative(speed: Speed | None) -> str:
    return f"{speed.relative:.2f} ({span(speed.relative_interval)})" if speed else "–"
