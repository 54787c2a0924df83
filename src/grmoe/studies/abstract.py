"""The paper's abstract, sentence by sentence, with the claims that decide each: the head of docs/results/paper.

Claims of the paper alone decide. Questions of our own hold of models that are trained in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grmoe.studies.page import Claim, Page
from grmoe.tables import Table

_LONG = 160  # characters of a result that a one-page table does not take


@dataclass(frozen=True)
class Sentence:
    text: str
    """What the abstract says, in its own words."""
    claims: tuple[tuple[str, str], ...]
    """(study, how the text of its claim begins) of each claim that decides it."""


SENTENCES = (
    Sentence(
        "standard softmax gating provides no principled mechanism to control the tradeoff between sparsity and "
        "utilization",
        (
            ("alpha-sweep", "Temperature scaling of softmax"),
            ("alpha-sweep", "GrMoE's sparsity is predictable"),
        ),
    ),
    Sentence(
        "a single, interpretable knob […] that continuously controls routing entropy",
        (("alpha-sweep", "Varying α gives a smooth"),),
    ),
    Sentence(
        "an amortized variational inference procedure […] that naturally resists expert collapse",
        (("synthetic", "GrMoE + Amort. collapses in 0 %"), ("language-model", "GrMoE + Amort. never collapses")),
    ),
    Sentence(
        "tight bounds relating the Bingham concentration spectrum to routing entropy",
        (("alpha-sweep", "Entropy stays within"), ("alpha-sweep", "The bounds of concentration")),
    ),
    Sentence(
        "[…] expected top-k mass, and an exponential bound on expert collapse",
        (("separation", "G_k ≥ 1"), ("separation", "The subspace regulariser fulfils"), ("separation", "CV ≤")),
    ),
    Sentence(
        "0 % routing collapse across all seeds",
        (
            ("synthetic", "GrMoE collapses in 0 %"),
            ("language-model", "GrMoE never collapses"),
            ("scaling", "GrMoE + Amort. keeps 0 % collapse"),
        ),
    ),
    Sentence(
        "comparable or better perplexity",
        (
            ("language-model", "GrMoE has a comparable or better perplexity"),
            ("scaling", "GrMoE + Amort. has the lowest perplexity"),
        ),
    ),
    Sentence("15–30 % improved load balance", (("language-model", "Load balance improves"),)),
    Sentence(
        "a smooth monotonic relationship between concentration and effective sparsity",
        (("post-hoc", "A larger α has fewer effective experts"),),
    ),
    Sentence(
        "post-hoc sparsity tuning without retraining",
        (("post-hoc", "α = 2 costs 0.2"), ("post-hoc", "One GrMoE model dominates")),
    ),
    Sentence(
        "heterogeneous concentration values that correlate with linguistic specialization",
        (
            ("token-analysis", "Two experts have κ > 3.0"),
            ("token-analysis", "High-κ experts are more specialised"),
        ),
    ),
)  # fmt: skip


def find_claims(pages: Mapping[str, Page], sentence: Sentence) -> list[tuple[str, Claim]]:
    """(study, claim) of each claim that decides a sentence, of the studies that have pages here."""
    return [
        (study, claim)
        for study, start in sentence.claims
        if study in pages
        for claim in pages[study].claims
        if claim.text.startswith(start)
    ]


def abstract_table(pages: Mapping[str, Page]) -> Table:
    """One row per claim. pages: by the name of their study."""
    table = Table("", ["the abstract says", "what decides it", "here", "verdict"])
    for sentence in SENTENCES:
        for place, (study, claim) in enumerate(find_claims(pages, sentence)):
            found = claim.ours or "–"
            table.add(
                f"“{sentence.text}”" if place == 0 else "",
                claim.text,
                found if len(found) <= _LONG else f"[numbers]({study}.md)",
                f"[{claim.verdict.value}]({study}.md)",
            )
    return table
