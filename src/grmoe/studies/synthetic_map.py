"""The synthetic task over overlap ρ* and noise σ². Its results are in RESULTS/synthetic-map."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from grmoe.studies.page import Figure, Page
from grmoe.studies.study import Place, State
from grmoe.studies.synthetic import heatmap
from grmoe.studies.synthetic.questions import Answer, Found, Question, holds, interval, paired, points
from grmoe.studies.synthetic.results import read_all
from grmoe.studies.synthetic.study import Plan, run_at, state_of
from grmoe.terminal import Progress

FOLDER = "synthetic-map"


class MapStudy:
    """GrMoE and the softmax gate over overlap and noise."""

    name, title, where = "synthetic-map", "The synthetic task over overlap and noise", "Experimental Setup"
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
        questions = (
            Question(
                "Experimental Setup",
                "The Grassmannian structure is most valuable precisely when routing is difficult.",
                names,
                heatmap.METHODS,
                _value_when_difficult,
            ),
            Question(
                "Synthetic Task Results",
                "GrMoE outperforms Softmax: tried at every overlap and noise.",
                names,
                heatmap.METHODS,
                _everywhere,
            ),
        )
        picture_ = Figure(
            "synthetic-map",
            "Accuracy of the Bayes oracle, and of each method as a share of it.",
            lambda path: heatmap.draw_map(found, path),
        )
        return Page(
            claims=[question.answer(Found(cells)) for question in questions],
            tables=heatmap.tables(found) if cells else [],
            figures=[picture_] if cells else [],
            notes=[
                "Task, training and choice of learning rates are those of the synthetic table, with 10 seeds per cell. "
                "A factor is chosen for each cell on 4 other tasks. All cells of a method are one tensor program."
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
        holds(interval(more)[0] > 0),
        "Cells are ordered by the accuracy of the Bayes oracle. The rival is the better of top-1 and top-2. The "
        f"difference by seed, {points(more)}, must be above zero with its interval.",
    )


def _everywhere(found: Found) -> Answer:
    above = sum(interval(gaps)[0] > 0 for gaps in _advantages(found).values())
    total = len(found.settings)
    return (
        f"in {above} of {total} cells",
        holds(above == total),
        "A cell counts if the 95 % interval of the difference, paired by seed, lies above zero.",
    )


STUDY = MapStudy()
