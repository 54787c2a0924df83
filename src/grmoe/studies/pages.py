"""Pages of docs/results/paper, made from results alone: the same results give the same bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from grmoe.files import write_file
from grmoe.studies.abstract import abstract_table
from grmoe.studies.page import OWN, Claim, Figure, Page, Verdict
from grmoe.studies.study import Study
from grmoe.tables import Table

_GENERATED = "<!-- Made by `grmoe reproduce --pages` from results/. Change the study, not this page. -->"
_INTRO = (
    "Which claims of the paper hold here, with smaller models. Each has its place in the paper, what was measured, a "
    "verdict, and the command that repeats it. Intervals are 95 %: Student's over seeds, Wilson's for counts. Brackets "
    "of benchmarks are the middle 80 % of their rounds. Where the paper has a ±, it is a standard deviation. Each "
    "verdict looks at its own interval, and where nothing differs, one interval of twenty excludes zero all the same. "
    "[Gates](gates.md#many-comparisons-at-once-on-validation-text) has what stands of many comparisons at once."
)
_WORDS = (
    "- **GrMoE** alone is ours: a balanced prior, and energies scaled by d/k. In language models it also has an "
    "overlap penalty whose *hinge* is low enough to act on random subspaces, and two experts per token. "
    "[What we changed, and why](../../explanation/mathematics.md#what-we-changed-and-why).\n"
    "- **As in the paper** is the paper's gate. What holds for ours alone *holds with a change*.\n"
    "- **Language models** are `small`, 30 M active parameters, unless a row says otherwise. Losses are in nats per "
    "token; a difference of 0.01 is 1 % of perplexity. Differences are taken seed by seed.\n"
    "- **The rule of 1 %** is the paper's for collapse: some expert receives less than 1 % of the tokens.\n"
    "- **Never**: one seed refutes it. It takes five without one, the paper's number: of three, half of all seeds may "
    "do it too."
)
_CLAIMS = ("paper", "it says", "here", "verdict", "why")
_MEANING = {
    Verdict.HOLDS: "It was measured or computed here, and is so",
    Verdict.CHANGED: "It is so after a change that the reason names",
    Verdict.FAILS: "It was measured or computed here, and is not so",
    Verdict.UNDECIDED: "It was measured here, and the interval allows both",
    Verdict.UNTESTABLE: "It cannot be decided here, and the reason says why",
    Verdict.OPEN: "What would decide it has no results yet, or too few seeds",
}


def page_text(study: Study, page: Page, results: Path) -> str:
    """A study's page as Markdown."""
    state = study.state(results)
    where = "Not in the paper" if study.where == OWN else f"The paper: {study.where}"
    head = (
        f"{where}. Run it with `grmoe reproduce {study.name}`. "
        f"Jobs with results: {state.done} of {state.total}."
    )
    parts = [_GENERATED, f"# {study.title}", head]
    for title, claims in _by_origin(page.claims).items():
        parts += [f"## {title}", _claims(claims).markdown()]
    for figure in page.figures:
        parts.append(f"![{figure.caption}](../../images/paper/{figure.name}.png)\n\n{figure.caption}")
    for table in page.tables:
        parts += [f"## {table.title}", table.markdown()]
    if page.notes:
        parts += ["## Notes", *page.notes]
    return "\n\n".join(parts) + "\n"


def index_text(studies: Sequence[Study], pages: Sequence[Page], results: Path) -> str:
    """The paper's abstract with verdicts, how many claims hold, how much was run, then every claim."""
    links = [f"[{study.title}]({study.name}.md)" for study in studies]
    status = Table("", ["study", "the paper", "jobs", *(v.value for v in Verdict)], left=2)
    for study, link, page in zip(studies, links, pages, strict=True):
        state, of_study = study.state(results), verdict_counts(page.claims)
        jobs, numbers = f"{state.done}/{state.total}", [str(of_study[v]) for v in Verdict]
        status.add(link, study.where, jobs, *numbers)
    every = [claim for page in pages for claim in page.claims]
    theirs, own = (verdict_counts(c for c in every if (c.where == OWN) is mine) for mine in (False, True))
    counts = Table("", ["verdict", "claims of the paper", "questions of our own", "meaning"], left=1)
    for verdict, meaning in _MEANING.items():
        counts.add(f"**{verdict.value}**", str(theirs[verdict]), str(own[verdict]), meaning)
    parts = [_GENERATED, "# The paper, reproduced", _INTRO, _WORDS]
    abstract = abstract_table({study.name: page for study, page in zip(studies, pages, strict=True)})
    if abstract.rows:
        parts += ["## The paper's abstract, sentence by sentence", abstract.markdown()]
    parts += ["## All verdicts", counts.markdown(), "## Studies", status.markdown()]
    for study, page in zip(studies, pages, strict=True):
        if page.claims:
            parts += [f"## {study.title}", f"`grmoe reproduce {study.name}`", _claims(page.claims).markdown()]
    return "\n\n".join(parts) + "\n"


def _by_origin(claims: Sequence[Claim]) -> dict[str, list[Claim]]:
    """The paper's claims and our own questions, without kinds that there are none of."""
    found = {
        "What the paper claims": [claim for claim in claims if claim.where != OWN],
        "Questions of our own": [claim for claim in claims if claim.where == OWN],
    }
    return {title: part for title, part in found.items() if part}


def verdict_counts(claims: Iterable[Claim]) -> dict[Verdict, int]:
    found = Counter(claim.verdict for claim in claims)
    return {verdict: found[verdict] for verdict in Verdict}


def _claims(claims: Sequence[Claim]) -> Table:
    table = Table("", _CLAIMS)
    for claim in claims:
        table.add(claim.where, claim.text, claim.ours or "–", f"**{claim.verdict.value}**", claim.reason)
    return table


def page_files(studies: Sequence[Study], results: Path) -> tuple[dict[str, str], dict[str, Figure]]:
    """(Markdown by file name, figures by file name). Nothing is drawn yet."""
    pages = [study.page(results) for study in studies]
    texts = {"index.md": index_text(studies, pages, results)}
    figures: dict[str, Figure] = {}
    for study, page in zip(studies, pages, strict=True):
        texts[f"{study.name}.md"] = page_text(study, page, results)
        figures |= {f"{figure.name}.png": figure for figure in page.figures}
    return texts, figures


def write_pages(studies: Sequence[Study], results: Path, docs: Path) -> dict[str, Path]:
    """Write docs/results/paper/*.md and docs/images/paper/*.png, and remove what is no longer made.

    Returns where they are.
    """
    texts, figures = page_files(studies, results)
    written = {"Pages": docs / "results" / "paper", "Figures": docs / "images" / "paper"}
    for folder, made in ((written["Pages"], set(texts)), (written["Figures"], set(figures))):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            if old.name not in made and _is_ours(old):
                old.unlink()
    for name, text in texts.items():
        write_file(written["Pages"] / name, text.encode())
    for name, figure in figures.items():
        figure.draw(written["Figures"] / name)
    return written


def _is_ours(path: Path) -> bool:
    """Whether a file was made here. A page says so in its first line; pictures in the folder of figures all are."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8").startswith(_GENERATED)
    return path.suffix == ".png"


def status_table(studies: Sequence[Study], results: Path) -> Table:
    """Jobs done, and verdicts so far, for a terminal: a column per verdict would leave no room for words."""
    table = Table("", ["study", "the paper", "jobs", "verdicts"], left=2, notes=True)
    for study in studies:
        state, counts = study.state(results), verdict_counts(study.page(results).claims)
        verdicts = ", ".join(f"{verdict.value}: {n}" for verdict, n in counts.items() if n)
        table.add(study.name, study.where, f"{state.done}/{state.total}", verdicts)
    return table
