"""The synthetic task over overlap ρ* and noise σ². Its results are in RESULTS/synthetic-map."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from grmoe.studies.judging import above, all_of, changed
from grmoe.studies.models.summary import mean as over_seeds
from grmoe.studies.page import Figure, Page, Verdict
from grmoe.studies.study import Place, State
from grmoe.studies.synthetic import heatmap
from grmoe.studies.synthetic.page import before_note
from grmoe.studies.synthetic.questions import Answer, Found, Question, paired, points
from grmoe.studies.synthetic.results import read_all
from grmoe.studies.synthetic.study import Plan, outdated, run_at, state_of
from grmoe.terminal import Progress

FOLDER = "synthetic-map"
_CHANGE = "With our prior and scaling."


class MapStudy:
    """GrMoE and the softmax gate over overlap and noise."""

    name, title, where = "synthetic-map", "The synthetic task over overlap and noise", "Section 6.1"
    parts = heatmap.METHODS

    def plan(self, results: Path) -> Plan:
        return heatmap.map_plan(results / FOLDER)

    def state(self, results: Path) -> State:
        return state_of(self.plan(results))

    def run(self, place: Place, progress: Progress) -> None:
        run_at(self.plan(place.results), place, progress)

    def page(self, results: Path) -> Page:
        names = tuple(setting.name for setting in heatmap.grid())
        cells = {name: cell for name, cell in read_all(results / FOLDER).items() if name in names}
        found = heatmap.Map.of(list(cells.values()))
        old = outdated(self.plan(results))
        questions = (
            Question(
                "Section 6.1, Experimental Setup",
                "The Grassmannian structure is most valuable precisely when routing is difficult.",
                names,
                heatmap.METHODS,
                _value_when_difficult,
            ),
            Question(
                "Section 6.2, Synthetic Task Results",
                "GrMoE outperforms Softmax: tried at every overlap and noise.",
                names,
                heatmap.METHODS,
                _everywhere,
            ),
        )
        picture_ = Figure(
            "synthetic-map",
            "Accuracy of the Bayes classifier, and of each method as a share of it.",
            lambda path: heatmap.draw_map(found, path),
        )
        return Page(
            claims=[question.answer(Found(cells, {m.key for m in old})) for question in questions],
            tables=heatmap.tables(found) if cells else [],
            figures=[picture_] if cells else [],
            notes=[
                *before_note(old),
                "Task, training and choice of learning rates are those of the synthetic table, with 10 seeds per cell. "
                "A factor is chosen for each cell on 4 other tasks. All cells of a method are one tensor program.",
            ],
        )


def _advantages(found: Found) -> dict[str, list[float]]:
    """Accuracy of GrMoE above the better of the two softmax rows, by cell and seed."""
    gaps = {}
    for name in found.settings:
        rivals = [found(name, key) for key in heatmap.METHODS if key != "grmoe"]
        best = max(rivals, key=lambda m: fmean(s.accuracy for s in m.scores))
        gaps[name] = paired(found(name, "grmoe"), best)
    return gaps


def _value_when_difficult(found: Found) -> Answer:
    gaps = _advantages(found)
    ease = {name: cell.methods[0].oracle_accuracy for name, cell in found.settings.items()}
    order = sorted(gaps, key=lambda name: ease[name])
    half = len(order) // 2
    hard, easy = (
        [fmean(seed) for seed in zip(*(gaps[n] for n in part), strict=False)]
        for part in (order[:half], order[-half:])
    )
    more = [a - b for a, b in zip(hard, easy, strict=False)]
    return (
        f"{points(hard)} points above Softmax in the {half} hardest cells, {points(easy)} in the {half} easiest",
        changed(above(over_seeds(more))),
        f"{_CHANGE} Cells are ordered by the accuracy of the Bayes classifier. The rival is the better of top-1 and "
        f"top-2. The difference by seed, {points(more)}, must be above zero with its interval.",
    )


def _everywhere(found: Found) -> Answer:
    verdicts = [above(over_seeds(gaps)) for gaps in _advantages(found).values()]
    return (
        f"in {verdicts.count(Verdict.HOLDS)} of {len(verdicts)} cells",
        changed(all_of(verdicts)),
        f"{_CHANGE} A cell counts if the 95 % interval of the difference, paired by seed, lies above zero. It fails if "
        "one lies below.",
    )


STUDY = MapStudy()
