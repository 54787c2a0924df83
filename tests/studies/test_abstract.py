"""The paper's abstract with verdicts: every reference to a claim means exactly one, and verdicts are the pages' own."""

from __future__ import annotations

from pathlib import Path

from grmoe.studies.abstract import SENTENCES, abstract_table, find_claims
from grmoe.studies.page import OWN, Claim, Page, Verdict
from grmoe.studies.pages import index_text
from grmoe.studies.registry import find_studies

RESULTS = Path(__file__).parents[2] / "results"


def test_each_reference_is_one_claim_with_and_without_results(tmp_path: Path) -> None:
    for results in (RESULTS, tmp_path):
        pages = {study.name: study.page(results) for study in find_studies([])}
        for sentence in SENTENCES:
            found = find_claims(pages, sentence)
            assert [study for study, _ in found] == [study for study, _ in sentence.claims], sentence.text
            assert all(claim.where != OWN for _, claim in found), sentence.text


def test_rows_have_the_verdicts_of_the_pages() -> None:
    def claim(text: str, ours: str, verdict: Verdict) -> Claim:
        return Claim(OWN, text, ours, verdict, "")

    pages = {
        "alpha-sweep": Page(
            [
                claim("Varying α gives a smooth fall.", "", Verdict.OPEN),
                claim("Temperature scaling of softmax is erratic.", "x" * 500, Verdict.FAILS),
                claim("GrMoE's sparsity is predictable.", "0 tokens", Verdict.HOLDS),
            ]
        ),
    }
    rows = abstract_table(pages).rows
    assert [row[1:] for row in rows] == [
        (
            "Temperature scaling of softmax is erratic.",
            "[numbers](alpha-sweep.md)",
            "[does not hold](alpha-sweep.md)",
        ),
        ("GrMoE's sparsity is predictable.", "0 tokens", "[holds](alpha-sweep.md)"),
        ("Varying α gives a smooth fall.", "–", "[not measured yet](alpha-sweep.md)"),
    ]
    # A sentence stands before its first claim alone.
    assert [bool(row[0]) for row in rows] == [True, False, True]


def test_it_is_on_top_of_the_index_if_one_of_its_studies_is_there() -> None:
    heading = "## The paper's abstract, sentence by sentence"
    studies = find_studies(["separation", "normalizer"])
    text = index_text(studies, [study.page(RESULTS) for study in studies], RESULTS)
    assert text.index(heading) < text.index("## All verdicts")
    (normalizer,) = find_studies(["normalizer"])
    assert heading not in index_text([normalizer], [normalizer.page(RESULTS)], RESULTS)
