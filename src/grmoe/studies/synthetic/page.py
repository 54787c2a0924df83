"""The synthetic table in the form of a study. Its results are in RESULTS/synthetic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grmoe.studies.page import Figure, Page
from grmoe.studies.study import Place, State
from grmoe.studies.synthetic import figure, oracle, tables
from grmoe.studies.synthetic.claims import claims
from grmoe.studies.synthetic.methods import METHODS, Method
from grmoe.studies.synthetic.questions import BEFORE, Found
from grmoe.studies.synthetic.results import SettingResult, read_all
from grmoe.studies.synthetic.study import SETTINGS, Plan, outdated, run_at, state_of
from grmoe.terminal import Progress

FOLDER = "synthetic"
ORACLE = "oracle"

TASK = """\
**The task.** Eight classes, d = 128. A token of class e is drawn from N(0, P_e + σ²(I − P_e)); P_e projects onto the \
class's own subspace of dimension k = 16. Its target is A_e x, with A_e a random linear map to 16 dimensions. The \
paper states neither k nor the targets; k = 16 is its own heuristic d/N. Easy: overlap ρ* = ‖UᵢᵀUⱼ‖²_F/k = 0.1 and \
σ² = 0.1. Random frames overlap by 0.125, so easy lies below random. Hard: 0.4 and 0.5. Skewed: as easy, but class e \
has a weight ∝ 0.7^e, from 32 % to 2.6 % of the tokens."""
TRAINING = """\
**The training.** A router and eight linear experts train end to end on the squared error, from scratch. They see no \
label and know nothing of the subspaces; only the row "with labels" does. Every method has the same tokens: 1200 steps \
of 256. Adam at 0.01 with a cosine schedule to a tenth; `GrassmannAdam` at 0.6 for frames; the balanced prior moves by \
0.05. Accuracy is that of 4096 held-out tokens per seed, under the best one-to-one matching of experts to classes."""
RATES = """\
**Learning rates.** Both rates are multiplied by one factor. For every method and setting it is the factor with the \
least mean held-out loss on other tasks. Then the tasks of the table are trained and scored with it. The linear gate \
with labels is chosen by accuracy, because its experts are not trained."""
ONE_RATE = "**Learning rates.** All methods had the same one. It was chosen for GrMoE on other tasks."
FORMS = """\
**As in the paper**: the gate κ‖Uᵀx‖², the prior ∝ Z(κ), all experts summed, and the overlap term. **GrMoE** without \
more has our balanced prior, (d/k)·‖Uᵀx‖²/‖x‖² and no overlap term. The amortiser reads the N energies; the paper's \
reads the token. **Softmax** has no noise; the row with noise is softmax(Wx + ε), as in Section 2.1 of the paper, with \
a standard normal ε. Table 1 does not say which of both it has."""
OVERLAP = """\
**The overlap term** is β Σ max(0, ‖U_eᵀU_e'‖² − ρ₀k) with the paper's β = 0.01. Its ρ₀ = 0.3 lies above the overlap \
0.125 of random frames. The other rows put the hinge at half of that overlap."""


class SyntheticStudy:
    """All methods on all settings, each at its best learning rate, and the oracle by rank."""

    name, title, where = "synthetic", "The synthetic routing task", "Table 1, Sections 6.1 and 6.2"
    parts = (*(method.key for method in METHODS), ORACLE)

    def plan(self, results: Path) -> Plan:
        return Plan(out=results / FOLDER)

    def state(self, results: Path) -> State:
        table = state_of(self.plan(results))
        return State(table.done + bool(oracle.read(results / FOLDER)), table.total + 1)

    def run(self, place: Place, progress: Progress) -> None:
        folder = place.results / FOLDER
        if place.wants(ORACLE) and not oracle.read(folder):
            progress("Bayes oracle by rank", 0, 0)
            oracle.write(oracle.measure(), folder)
        run_at(self.plan(place.results), place, progress)

    def page(self, results: Path) -> Page:
        settings, ranks = read_all(results / FOLDER), oracle.read(results / FOLDER)
        old = outdated(self.plan(results))
        shown = [settings[name] for name in SETTINGS if name in settings]
        chosen = any(m.screening for each in shown for m in each.methods)
        rates = [t for t in map(tables.rates_table, shown) if t is not None]
        return Page(
            claims=claims(Found(settings, {m.key for m in old}), ranks),
            tables=[*map(tables.table, shown), *rates, *([oracle.table(ranks)] if ranks else [])],
            figures=[_setting_figure(each) for each in shown],
            notes=[
                *before_note(old),
                TASK,
                TRAINING,
                RATES if chosen or not shown else ONE_RATE,
                FORMS,
                OVERLAP,
                f"**Columns.** {' '.join(tables.NOTES.split())}",
            ],
        )


def before_note(old: Sequence[Method]) -> list[str]:
    """Which results are of other settings than today's."""
    if not old:
        return []
    titles = "; ".join(method.title for method in old)
    return [f'**To be run again**, because their results are of other settings, "{BEFORE}" above: {titles}.']


def _setting_figure(result: SettingResult) -> Figure:
    def draw(path: Path) -> None:
        figure.draw(result, path)

    caption = "Every seed of every method: accuracy, load, the dial, and learned subspaces"
    return Figure(f"synthetic-{result.setting.name}", f"{caption} ({result.setting.name} setting).", draw)


STUDY = SyntheticStudy()
