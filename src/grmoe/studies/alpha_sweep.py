"""Entropy along α after training, for both gates of the synthetic task. It reads RESULTS/synthetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from grmoe.pictures import picture
from grmoe.studies.page import Figure, Page, Verdict
from grmoe.studies.study import Place, State
from grmoe.studies.synthetic import figure
from grmoe.studies.synthetic.forms import FORMS, by_form, why
from grmoe.studies.synthetic.methods import find_methods
from grmoe.studies.synthetic.page import FOLDER, before_note
from grmoe.studies.synthetic.questions import Answer, Found, Question, holds
from grmoe.studies.synthetic.results import MethodResult, SettingResult, read_all
from grmoe.studies.synthetic.study import DIALED, Plan, outdated, run_at, state_of
from grmoe.tables import Table
from grmoe.terminal import Progress


class AlphaStudy:
    """Entropy along α after training, for both gates."""

    name, title, where = "alpha-sweep", "Post-hoc sparsity control", "Figure 1, Section 6.2"
    parts = DIALED

    def plan(self, results: Path) -> Plan:
        return Plan(out=results / FOLDER, methods=find_methods(DIALED))

    def state(self, results: Path) -> State:
        return state_of(self.plan(results))

    def run(self, place: Place, progress: Progress) -> None:
        run_at(self.plan(place.results), place, progress)

    def page(self, results: Path) -> Page:
        old = outdated(self.plan(results))
        found = Found(_dialed(read_all(results / FOLDER)), {m.key for m in old})
        dialed = [
            m for s in found.settings for key in DIALED if (m := found.get(s, key)) is not None and m.dial
        ]
        shown = Table("Entropy along the dial, mean over seeds, nats", _SWEEP_HEADINGS, left=2)
        for result in dialed:
            shown.add(*_sweep_cells(result))
        draw = Figure(
            "alpha-sweep",
            "Routing entropy along α, turned after training at α = 1, between certified bounds.",
            lambda path: draw_sweep(dialed, path),
        )
        return Page(
            claims=[question.answer(found) for question in _ALPHA_QUESTIONS],
            tables=[shown] if dialed else [],
            figures=[draw] if dialed else [],
            notes=[
                *before_note(old),
                "For the softmax gate α is the inverse temperature. The models are those of the synthetic table. "
                "For any logits s, H of softmax(αs) has dH/dα = −α·Var(s) ≤ 0, with the variance under the gate. "
                "Band: mean width of the certified bounds over α. Outside: tokens with an entropy outside them, "
                "over all α and seeds.",
            ],
        )


def _dialed(settings: dict[str, SettingResult]) -> dict[str, SettingResult]:
    """Easy and hard, with the methods that have a sweep."""
    kept = {
        name: [m for m in settings[name].methods if m.dial] for name in ("easy", "hard") if name in settings
    }
    return {name: SettingResult(setting=m[0].setting, methods=m) for name, m in kept.items() if m}


_SWEEP_ALPHAS = (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)
_SWEEP_HEADINGS = (
    "setting", "gate", *(f"α = {alpha:g}" for alpha in _SWEEP_ALPHAS), "falling seeds", "band", "outside",
    "outside, paper's",
)  # fmt: skip


def _sweep_cells(result: MethodResult) -> list[str]:
    dial: Any = result.dial
    entropy = {alpha: fmean(row) for alpha, row in zip(dial.alphas, dial.entropy_AS, strict=True)}
    outside = ["–" if n is None else f"{n}/{dial.tokens}" for n in (dial.outside, dial.paper_outside)]
    return [
        result.setting.name,
        result.title,
        *(f"{entropy[alpha]:.2f}" if alpha in entropy else "–" for alpha in _SWEEP_ALPHAS),
        f"{dial.falling_seeds()}/{len(result.scores)}",
        f"{_band(result):.2f}",
        *outside,
    ]


def _band(result: MethodResult) -> float:
    """Mean width of the certified band over α, in nats."""
    dial: Any = result.dial
    return fmean(high - low for low, high in zip(dial.lower, dial.upper, strict=True))


def _falling(found: Found, keys: tuple[str, ...]) -> tuple[int, int]:
    """Seeds with an entropy that never rises, of all seeds of these methods on both settings."""
    results = [found(s, key) for s in ("easy", "hard") for key in keys]
    dials: Any = [m.dial for m in results]
    return sum(dial.falling_seeds() for dial in dials), sum(len(m.scores) for m in results)


def _monotone(found: Found) -> Answer:
    counts = {key: _falling(found, (key,)) for key in FORMS}
    verdict = by_form(lambda key: holds(counts[key][0] == counts[key][1]))
    paper, ours = ("{} of {}".format(*counts[key]) for key in FORMS)
    return (
        f"seeds that fall throughout: as in the paper {paper}; ours {ours}",
        verdict,
        why(verdict, "It holds for any softmax gate."),
    )


def _erratic(found: Found) -> Answer:
    falling, seeds = _falling(found, ("softmax_top1", "softmax_top2"))
    reason = "α is an inverse temperature for both gates, and dH/dα ≤ 0 for any logits."
    return f"{seeds - falling} of {seeds} seeds rise somewhere", holds(falling < seeds), reason


_UNCOUNTED: Answer = "", Verdict.OPEN, "The stored results do not count tokens outside the bounds."


def _bounds(found: Found) -> Answer:
    dials: Any = {key: [found(s, key).dial for s in ("easy", "hard")] for key in FORMS}
    if any(dial.paper_outside is None for of in dials.values() for dial in of):
        return _UNCOUNTED
    outside = {key: sum(dial.paper_outside for dial in of) for key, of in dials.items()}
    verdict = by_form(lambda key: holds(outside[key] == 0))
    paper, ours = (f"{outside[key]} of {sum(dial.tokens for dial in dials[key])}" for key in FORMS)
    return (
        f"tokens outside: as in the paper {paper}; ours {ours}",
        verdict,
        why(verdict, "Both bounds of Theorem 1 for every token at every α, up to rounding."),
    )


def _tight(found: Found) -> Answer:
    """At the α of training. No entropy is below zero, so a lower bound below zero says nothing."""
    dials: Any = {key: [found(s, key).dial for s in ("easy", "hard")] for key in FORMS}
    lower = {key: [_at_one(dial, dial.paper_lower) for dial in of] for key, of in dials.items()}
    upper = [_at_one(dial, dial.paper_upper) for of in dials.values() for dial in of]
    verdict = by_form(lambda key: holds(min(lower[key]) > 0))
    paper, ours = ("{:.1f} easy, {:.1f} hard".format(*lower[key]) for key in FORMS)
    return (
        f"mean lower bound at α = 1, nats: as in the paper {paper}; ours {ours}; upper bounds {min(upper):.2f} to "
        f"{max(upper):.2f}",
        verdict,
        why(
            verdict,
            f"Without a theorem, an entropy of eight experts lies between zero and log 8 = {math.log(8):.2f}. It holds "
            "if the mean lower bound is above zero in both settings.",
        ),
    )


def _at_one(dial: Any, bound: Sequence[float]) -> float:
    return bound[min(range(len(bound)), key=lambda i: abs(dial.alphas[i] - 1))]


def _predictable(found: Found) -> Answer:
    rows = [found(s, key) for s in ("easy", "hard") for key in DIALED]
    dials: Any = [m.dial for m in rows]
    if any(dial.outside is None for dial in dials):
        return _UNCOUNTED
    ours = sum(m.dial.outside for m in rows if m.dial and m.dial.outside and m.method in FORMS)
    theirs = sum(m.dial.outside for m in rows if m.dial and m.dial.outside and m.method not in FORMS)
    widths = {m.title: f"{_band(m):.2f}" for m in rows if m.setting.name == "hard"}
    return (
        f"tokens outside the certified band: {ours} for GrMoE, {theirs} for softmax; mean width in the hard setting "
        + ", ".join(f"{title} {width}" for title, width in widths.items()),
        holds(ours == 0 and theirs > 0),
        "The same certificates hold for every gate, because they need the logits only.",
    )


_FIGURE = "Figure 1"
_ALPHA_QUESTIONS = (
    Question(
        _FIGURE,
        "Varying α gives a smooth, monotonic decrease in entropy.",
        ("easy", "hard"),
        FORMS,
        _monotone,
    ),
    Question(
        "Section 6.2, Synthetic Task Results",
        "Temperature scaling of softmax gives erratic, non-monotonic entropy for some seeds.",
        ("easy", "hard"),
        ("softmax_top1", "softmax_top2"),
        _erratic,
    ),
    Question(
        "Theorem 1", "Entropy stays within the bounds of the theorem.", ("easy", "hard"), FORMS, _bounds
    ),
    Question(
        "Abstract", "The bounds of concentration on entropy are tight.", ("easy", "hard"), FORMS, _tight
    ),
    Question(
        "Section 6.2, Synthetic Task Results",
        "GrMoE's sparsity is predictable from learned parameters, that of softmax needs calibration.",
        ("easy", "hard"),
        DIALED,
        _predictable,
    ),
)


def draw_sweep(dialed: list[MethodResult], path: Path) -> None:
    """A row of panels per setting, a column per gate."""
    settings = list(dict.fromkeys(m.setting.name for m in dialed))
    gates = list(dict.fromkeys(m.method for m in dialed))
    with picture(path, 4.6 * len(gates), 3.8 * len(settings)) as drawn:
        axes = drawn.subplots(len(settings), len(gates), squeeze=False)
        for ax in axes.flat:
            ax.axis("off")
        for result in dialed:
            ax = axes[settings.index(result.setting.name)][gates.index(result.method)]
            ax.axis("on")
            figure.draw_dial(ax, result)
            dial: Any = result.dial
            fallen = f"{dial.falling_seeds()}/{len(result.scores)} seeds fall"
            ax.set_title(f"{result.title}, {result.setting.name}: {fallen}", loc="left", fontsize=10)


STUDY = AlphaStudy()
