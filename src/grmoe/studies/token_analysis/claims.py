"""What the paper says of its experts, beside the analyses of all seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from grmoe.model import preset
from grmoe.studies import kappa_start
from grmoe.studies.judging import MIN_SEEDS, above, all_of, below, changed, in_doubt
from grmoe.studies.kappa_start import Kappas, by_start, count_within
from grmoe.studies.measuring import Measured
from grmoe.studies.models.summary import Mean, mean, show_mean
from grmoe.studies.page import Claim, Verdict
from grmoe.studies.token_analysis.reading import (
    AMBIGUOUS,
    ambiguity,
    amortisers,
    confidence,
    generalist,
    kappas,
    specialists,
    type_entropies,
)

WHERE = "Section 6.4.1, Token-Level Routing Analysis"
DETAILS = "Appendix, Token-Level Routing Details"
VALUES = "Appendix, Learned Concentration Values"
CODE, MATH, NOUNS = 0.78, 0.65, 0.71  # of the paper's two specialists
HIGH = 3.0  # their κ
ENTROPY, EXPERTS = 1.8, 16  # the paper's H and N
CORRELATION = -0.87
MODERATE = (1.0, 2.0)  # the κ of the others
START = ((preset("small").router_rank or 1) ** 0.5) / 2  # our κ before training
KEPT = 0.05  # of the average concentration, that an amortiser may change
OURS = "With our prior, scaling, hinge and amortiser."

Runs = Sequence[Measured]


def claims(runs: Runs, literal: Kappas = ()) -> list[Claim]:
    """literal: κ of the paper's literal gate."""
    return [
        _kept(runs), _confident(runs), _sharp(runs, literal), _code(runs), _nouns(runs), *_of_high_kappa(runs),
        _entropy(runs), _ambiguous(runs), *_correlation(runs),
    ]  # fmt: skip


REACHES = "It fails if the whole interval is below nine tenths of the paper's number."


def reaches(found: Mean | None, number: float) -> Verdict:
    """Of "it is this number": the mean is at least nine tenths of it, and the interval excludes half of it.

    It fails if the whole interval is below nine tenths.
    """
    if found is None or found.seeds < MIN_SEEDS:
        return Verdict.OPEN
    if found.high < 0.9 * number:
        return Verdict.FAILS
    return Verdict.HOLDS if found.value >= 0.9 * number and found.low > number / 2 else Verdict.UNDECIDED


def _over(runs: Runs, value: Callable[[dict[str, Any]], float | None]) -> Mean | None:
    """The mean over seeds that have the number."""
    return mean(found for run in runs if (found := value(run.body)) is not None)


def _share(found: Mean | None) -> str:
    if found is None:
        return "–"
    half = "" if found.half is None else f" ± {100 * found.half:.0f}"
    return f"{100 * found.value:.0f}{half} %"


def _range(layers: Sequence[dict[str, Any]], name: str) -> str:
    """The mean over layers and seeds, and the widest quantiles of a layer."""
    low, high = min(one[f"{name}_low"] for one in layers), max(one[f"{name}_high"] for one in layers)
    return f"{fmean(one[name] for one in layers):.3f} ({low:.2f} to {high:.2f})"


def _kept(runs: Runs) -> Claim:
    layers = [one for run in runs for one in amortisers(run.body)]
    ends = [end for one in layers for end in (one["concentration_low"], one["concentration_high"])]
    verdict = Verdict.OPEN
    if len(runs) >= MIN_SEEDS and ends:
        verdict = Verdict.HOLDS if all(abs(end - 1) <= KEPT for end in ends) else Verdict.FAILS
    return Claim(
        "Section 5.2",
        "Σ_e h_e = N, so that the average concentration is preserved for every token",
        f"{_range(layers, 'concentration')}; logits {_range(layers, 'ratio')}" if layers else "",
        changed(verdict),
        f"Σ h_e κ_e over Σ κ_e of a token. 90 % of the tokens must be within {KEPT:g} of 1, in every layer. Beside it "
        f"the same of the logits, Σ h_e κ_e a_e over Σ κ_e a_e. {OURS}",
    )


def _confident(runs: Runs) -> Claim:
    found = _over(runs, confidence)
    return Claim(
        WHERE,
        "The amortiser expresses low confidence on ambiguous tokens and high confidence on specialised ones",
        show_mean(found, 3, "+") if found else "",
        changed(below(found)),
        "h of the leading expert over function words and punctuation minus that over other tokens, by seed. "
        f"{in_doubt(found)} {OURS}",
    )


def has_two_sharp(sharp: Sequence[tuple[int, int]], moderate: Sequence[tuple[float, float]]) -> Verdict:
    """Of "two experts are above 3.0, half of all are moderate", from (at least, at most) of each by seed."""
    if len(sharp) < MIN_SEEDS:
        return Verdict.OPEN
    if all(least >= 2 for least, _ in sharp) and all(least >= 0.5 for least, _ in moderate):
        return Verdict.HOLDS
    missed = any(most < 2 for _, most in sharp) or any(most < 0.5 for _, most in moderate)
    return Verdict.FAILS if missed else Verdict.UNDECIDED


def _sharp(runs: Runs, literal: Kappas) -> Claim:
    experts = preset("small").num_experts
    above_high = [count_within(layers, HIGH, math.inf, experts) for layers in literal]
    within = [count_within(layers, *MODERATE, experts) for layers in literal]
    totals = [experts * len(layers) for layers in literal]
    shares = [(least / n, most / n) for (least, most), n in zip(within, totals, strict=True)]
    found = [kappas(run.body) for run in runs]
    sharp = [sum(k > HIGH for k in values) for values in found]
    moderate = [fmean(MODERATE[0] <= k <= MODERATE[1] for k in values) for values in found]
    ours = has_two_sharp([(n, n) for n in sharp], [(share, share) for share in moderate])
    counts = ", ".join(f"{least}" if least == most else f"{least} to {most}" for least, most in above_high)
    parts = [
        f"literal gate: {counts} experts above 3.0 by seed, κ from {kappa_start.span(literal)}"
        if literal
        else "",
        f"ours: {', '.join(map(str, sharp))} above 3.0, {100 * fmean(moderate):.0f} % within 1.0 to 2.0"
        if runs
        else "",
    ]
    return Claim(
        WHERE,
        "Two experts have κ > 3.0, the others from 1.0 to 2.0",
        "; ".join(filter(None, parts)),
        by_start(has_two_sharp(above_high, shares), ours, literal),
        "All experts of all layers of a model. Two must be above 3.0 and half of all within 1.0 to 2.0, in every "
        f"seed. {kappa_start.REASON} Of its layers the smallest and the largest κ are known. Our κ starts at √k/2 = "
        f"{START:g}, and multiplies another energy. {OURS}",
    )


def _code(runs: Runs) -> Claim:
    found = [specialists(run.body) for run in runs]
    code, numbers, every = (mean(getattr(s, name) for s in found) for name in ("code", "math", "all"))
    return Claim(
        WHERE,
        "One expert handles 78 % of code tokens and 65 % of math tokens",
        f"{_share(code)} of code, {_share(numbers)} of math, {_share(every)} of all tokens" if runs else "",
        changed(all_of((reaches(code, CODE), reaches(numbers, MATH)))),
        f"The layer and the expert with the largest share of code, so that the number is an upper estimate. {REACHES} "
        f"{OURS}",
    )


def _nouns(runs: Runs) -> Claim:
    nouns = mean(specialists(run.body).nouns for run in runs)
    return Claim(
        WHERE,
        "Another one captures 71 % of proper nouns",
        _share(nouns) if runs else "",
        changed(reaches(nouns, NOUNS)),
        f"The largest share by another expert of that layer. {REACHES} {OURS}",
    )


def _of_high_kappa(runs: Runs) -> list[Claim]:
    """Whether it is κ that tells the specialists from the others."""
    found = [specialists(run.body) for run in runs]
    both = mean(min(s.kappas) - max(s.others) for s in found)
    code = mean(s.kappas[0] - max(s.kappas[1], *s.others) for s in found)
    broad = _over(runs, lambda body: generalist(body)[1])
    least = mean(generalist(run.body)[0] for run in runs)
    return [
        Claim(
            WHERE,
            "These two specialists are the experts of high κ",
            show_mean(both, 2, "+") if runs else "",
            changed(above(both)),
            f"The smaller κ of the two minus the largest of the others of their layer, by seed. {in_doubt(both)} "
            f"{OURS}",
        ),
        Claim(
            VALUES,
            "The expert with the largest κ (4.2) is the specialist of code",
            show_mean(code, 2, "+") if runs else "",
            changed(above(code)),
            f"κ of the specialist of code minus the largest other of its layer, by seed. {in_doubt(code)} {OURS}",
        ),
        Claim(
            VALUES,
            "The expert with the smallest κ (0.4) of the last layer handles function words and punctuation",
            f"{show_mean(broad, 3, '+')}; its κ {show_mean(least, 2)}" if broad else "",
            changed(above(broad)),
            "Its share of these tokens minus its share of all others, by seed. Only the sign decides. "
            f"{in_doubt(broad)} {OURS}",
        ),
    ]


def _entropy(runs: Runs) -> Claim:
    entropies = [type_entropies(run.body) for run in runs]
    found = {name: mean(e[name] for e in entropies if name in e) for name in AMBIGUOUS}
    experts = runs[0].body["experts"] if runs else preset("small").num_experts
    limit = ENTROPY * math.log(experts) / math.log(EXPERTS)
    over = [None if m is None else Mean(m.value - limit, m.half, m.seeds) for m in found.values()]
    return Claim(
        WHERE,
        "Function words and punctuation are routed with mean H > 1.8, 65 % of log N",
        "; ".join(f"{name} {show_mean(value, 2)}" for name, value in found.items()) if runs else "",
        changed(all_of(map(above, over))),
        f"Mean over layers. {limit:.2f} nats is the same share of log N with {experts} experts. {OURS}",
    )


def _ambiguous(runs: Runs) -> Claim:
    found = _over(runs, ambiguity)
    return Claim(
        WHERE,
        "These tokens are the ambiguous ones: their entropy is above that of the others",
        show_mean(found, 3, "+") if runs else "",
        changed(above(found)),
        f"Entropy minus that of all other tokens, by seed. {in_doubt(found)} {OURS}",
    )


def _correlation(runs: Runs) -> list[Claim]:
    r = _over(runs, lambda body: (body["kappa_correlation"] or {}).get("r"))
    inner = _over(runs, lambda body: (body["kappa_correlation_within"] or {}).get("r"))
    strength = None if r is None else Mean(-r.value, r.half, r.seeds)
    return [
        Claim(
            DETAILS,
            "κ of an expert and the entropy of its token types correlate with r = −0.87",
            f"r = {show_mean(r, 2)}; within layers {show_mean(inner, 2)}" if runs else "",
            changed(reaches(strength, -CORRELATION)),
            f"Over the experts of all layers; mean over seeds. Experts of few tokens are left out. {REACHES} {OURS}",
        ),
        Claim(
            DETAILS,
            "High-κ experts are more specialised: the correlation is negative",
            f"r = {show_mean(r, 2)}" if runs else "",
            changed(below(r)),
            f"{in_doubt(r)} {OURS}",
        ),
    ]
