"""Measured numbers of README and the pages are found in results/, or come with a command."""

from __future__ import annotations

import json
import random
import re
import statistics
from typing import Any

import pytest
from doc_numbers import MARK, Number, blocks, found, missing, numbers
from doc_pages import NAMES, ROOT

from grmoe.studies.intervals import student

PAGES = [n for n in NAMES if n != "CHANGELOG.md" and not n.startswith("docs/results/paper/")]
READ_ALONE = ("README.md", "docs/results/index.md")


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize("name", PAGES)
def test_measured_numbers_have_a_source(name: str) -> None:
    wrong = missing(text_of(name), alone=name in READ_ALONE)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", PAGES)
def test_every_mark_is_read(name: str) -> None:
    """A mark with a line break in its first words would be a comment like any other, and cover nothing."""
    comments = re.findall(r"<!--.*?-->", re.sub(r"`[^`\n]*`", "", text_of(name)), re.DOTALL)
    unread = [c for c in comments if re.search(r"numbers|not\s+measured", c) and not MARK.fullmatch(c)]
    assert not unread, "\n".join(unread)


def test_a_changed_number_is_noticed() -> None:
    """Change each number that a mark covers by 2 to 20 %, one at a time. Large files hide some mistakes, not many."""
    draw = random.Random(0)
    caught = {}
    for name in PAGES:
        marked = [(n, b) for b in blocks(text_of(name)) if b.sources for n in b.measured]
        changed = [(shift(number, draw), block) for number, block in marked]
        noticed = [not found(number, block.sources) for number, block in changed if number is not None]
        if noticed:
            caught[name] = (sum(noticed), len(noticed))
    total = sum(c for c, _ in caught.values()) / sum(n for _, n in caught.values())
    assert total > 0.8, caught
    assert all(c > 0.6 * n for c, n in caught.values() if n >= 10), caught


def shift(number: Number, draw: random.Random) -> Number | None:
    """Another number of the same form; None for one with too few digits to change a little."""
    digits = re.sub(r"[^\d.]", "", number.text.partition("e")[0])
    decimals = len(digits.partition(".")[2])
    factor = 1 + draw.choice((-1, 1)) * draw.uniform(0.02, 0.2)
    other = f"{float(digits) * factor:.{decimals}f}"
    suffix = number.text[-1] if number.text[-1] in "%kM" else ""
    return None if float(other) == float(digits) or "e" in number.text else Number(other + suffix)


def test_the_readme_with_one_wrong_digit_fails() -> None:
    page = text_of("README.md")
    for right, wrong in (("53.37", "53.84"), ("75.0 %", "75.3 %"), ("2.46×", "2.64×"), ("25.6 %", "25.9 %")):
        assert right in page
        text = numbers(wrong)[0].text
        assert any(
            line.startswith(f"{text}: not found") for line in missing(page.replace(right, wrong), True)
        )


def test_the_rule() -> None:
    def measured(text: str) -> list[str]:
        return [number.text for number in numbers(text) if number.measured]

    assert measured("61.18 (+0.40 %), .032 ± .018, 3e-7, −0.51, 2.46×, 38 µs, 2.21 M, 455,691 tokens/s") == [
        "61.18", "+0.40%", ".032", ".018", "3e-7", "−0.51", "2.46", "38", "2.21M", "455,691",
    ]  # fmt: skip
    assert not measured(
        "8 experts of 768 × 1536, top-2, 16,384 tokens, torch 2.11, Liger fused MoE 0.8.2, 10⁴"
    )
    assert not measured(
        "κ₀ = 2.5, ρ* = 0.4, κ in 0.4–4.2, α = 0.5 and 1.5, a 95 % interval, `lr=0.1`, [a](b#1.5)"
    )
    assert missing("# A\n\nIt takes 3.5 ms.\n")
    assert missing("# A\n\n`grmoe bench gate`\n\n## B\n\nIt takes 3.5 ms.\n")
    assert not missing("# A\n\nIt takes 3.5 ms (`grmoe bench gate`).\n")
    assert not missing("# A\n\nIt takes 3.5 ms.\n\n    grmoe bench gate\n")
    assert not missing("# A\n\nIt took 3.5 ms. No command\nrepeats it.\n")
    assert not missing("# A\n\nNo command repeats them.\n\n## B\n\nIt took 3.5 ms.\n")
    assert not missing("# A\n\nAt most 3.5 ms. <!-- not measured: a limit -->\n")
    assert missing("- 1.5 ms\n- 2.5 ms: `grmoe bench gate`\n", alone=True)
    assert missing("| a | b |\n|---|---|\n| x | 1.5 |\n| 1.5 | `grmoe bench gate` 2.5 |\n", alone=True)


def test_what_a_mark_covers() -> None:
    mark, table = (
        "<!-- numbers: results/demo.json -->",
        "| a | b |\n|---|---|\n| 9.9 | 51.72 |\n| 9.9 | {} |\n",
    )
    assert not missing(f"{mark}\n{table.format('51.56')}")
    assert missing(f"{mark}\n{table.format('51.65')}") == [
        "51.65: not found in results/demo.json: 9.9 | 51.65"
    ]
    assert len(missing(f"{mark}\n{table.format('51.56')}\n51.56\n")) == 1, "the next paragraph is not covered"
    assert not missing(f"# A\n\n{mark}\n\n{table.format('51.56')}\n51.56\n\n    51.56\n")
    assert len(missing(f"# A\n\n{mark}\n\n51.56\n\n    61.94\n\n- 62.94\n")) == 2
    assert len(missing(f"# A\n\n{mark}\n\n51.56\n\n## B\n\n51.56\n")) == 1
    assert len(missing(f"- 51.56 {mark}\n- 51.56\n")) == 1
    with pytest.raises(AssertionError, match="there is no file"):
        missing("1.5 <!-- numbers: results/none.json -->")


def test_differences_of_gates_follow_from_the_runs() -> None:
    runs = json.loads((ROOT / "results/elastic-small.json").read_text())["runs"]
    for row in json.loads((ROOT / "results/gates-small.json").read_text())["differences"]:
        ours = losses(runs, row["recipe"], row["text"], row["setting"])
        theirs = losses(runs, row["minus"], row["text"], row["its_setting"])
        by_seed = [ours[seed] - theirs[seed] for seed in sorted(ours) if seed in theirs]
        assert row["by_seed"] == pytest.approx(by_seed, abs=1e-5)
        assert row["mean"] == pytest.approx(statistics.fmean(by_seed), abs=1e-5)
        assert row["interval_95"] == (pytest.approx(student(by_seed), abs=1e-5) if len(by_seed) > 2 else None)


def losses(runs: list[dict[str, Any]], recipe: str, text: str, setting: str) -> dict[int, float]:
    """{seed: loss}"""
    return {
        run["seed"]: row["loss"]
        for run in runs
        if run["recipe"] == recipe
        for row in run["rows"]
        if (row["text"], row["setting"]) == (text, setting)
    }
