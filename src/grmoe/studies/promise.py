"""The dial's promise: models with random budgets, each dialled to 1 % of perplexity and checked on other texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grmoe.dial import Plan, Target, run
from grmoe.pictures import COLORS, two_panels
from grmoe.runs.results import plain
from grmoe.studies.budgets import MOST_CV, SEEDS
from grmoe.studies.judging import MIN_SEEDS
from grmoe.studies.language_model import BASE
from grmoe.studies.measured import MeasuredStudy, Models
from grmoe.studies.measuring import Kind, Measured
from grmoe.studies.model_study import Group
from grmoe.studies.models.recipes import BUDGETS, SOFTMAX_BUDGET
from grmoe.studies.models.summary import mean, show_mean
from grmoe.studies.page import OWN, Claim, Figure, Page, Verdict
from grmoe.studies.study import Place
from grmoe.tables import Table, percent
from grmoe.terminal import Progress

GRMOE = BUDGETS[0]
# The dial's margin was chosen from models with seeds 0 to 4. Only others can test it.
GROUP = Group(BASE, (GRMOE, SOFTMAX_BUDGET), SEEDS, first=5)
ASKED = 0.01  # of perplexity
MOST_EXPERTS = 1.1
LEAST_LOAD = 0.01  # of an expert's fair share
_LABELS = {GRMOE.name: "GrMoE", SOFTMAX_BUDGET.name: "softmax"}
_POINT = ("name", "experts_per_token", "perplexity", "increase", "load_cv", "min_load")


def measure_run(folder: Path, place: Place, progress: Progress) -> Mapping[str, Any]:
    """`grmoe dial RUN --max-ppl-increase 1% --check TEXT … --no-speed`, without what no table shows.

    Speeds mean nothing beside the trainings of other models.
    """
    plan = Plan(
        model=folder, checkpoint="last", target=Target("perplexity", ASKED), tokens=place.tokens,
        checks=[str(text) for text in place.texts], timed=False,
    )  # fmt: skip
    found = plain(run(plan, progress).body)
    return {
        "calibration": found["calibration"],
        **{which: {name: found[which][name] for name in _POINT} for which in ("trained", "chosen")},
        "domains": found["domains"],
        "checks": [
            check | {"text": Path(check["text"]).name, "budgets": _nameless(check["budgets"])}
            for check in found["checks"]
        ],
        "budgets": _nameless(found["budgets"]),
        "frontier": [
            {name: p[name] for name in ("name", "experts_per_token", "perplexity")}
            for p in found["points"]
            if p["best"]
        ],
    }


def _nameless(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of budgets. All are of one model."""
    return [{name: value for name, value in row.items() if name != "model"} for row in rows]


def _lacks(place: Place) -> str:
    return "" if place.texts else "the promise is checked on other texts: give them with --text FILE"


KIND = Kind("dial", measure_run, _lacks)


def write(models: Models) -> Page:
    any_model = any(models.values())
    return Page(
        claims=[claim for name, label in _LABELS.items() for claim in _claims(label, models[name])],
        tables=[_promise_table(models), _budget_table(models), _text_table(models)] if any_model else [],
        figures=[
            Figure("promise", "Perplexity by budget: mean and range over seeds", lambda p: _draw(models, p))
        ]
        if any_model
        else [],
        notes=[
            "`grmoe dial RUN --max-ppl-increase 1%` chooses on validation text: the fewest experts per token with the "
            "upper end of the 90 % interval below 0.4 %, and no domain above 1 %. The rest is a margin for text of "
            "another kind. It was chosen from models with seeds 0 to 4, on the same two texts. So the models here "
            "are new to the rule, and the texts are not.",
            "The load is the one on validation text at the chosen setting. A share of one is an expert's fair load.",
        ],
    )


def _claims(label: str, runs: Sequence[Measured]) -> list[Claim]:
    chosen = [run.body["chosen"] for run in runs]
    checks = [check for run in runs for check in run.body["checks"]]
    missed = [check for check in checks if check["missed_by"] > 0]
    decided = len(runs) >= MIN_SEEDS

    def verdict(holds: bool) -> Verdict:
        return Verdict.OPEN if not decided else Verdict.HOLDS if holds else Verdict.FAILS

    experts = [point["experts_per_token"] for point in chosen]
    worst = max((check["increase"]["value"] for check in checks), default=0.0)
    cv = mean(point["load_cv"] for point in chosen)
    least = min((point["min_load"] for point in chosen), default=0.0)
    return [
        Claim(
            OWN,
            f"For {100 * ASKED:g} % more perplexity, {MOST_EXPERTS:g} experts per token are enough: {label}",
            f"{min(experts):.2f} to {max(experts):.2f} over {len(runs)} seeds" if runs else "",
            verdict(max(experts, default=0.0) <= MOST_EXPERTS),
            "The largest number over seeds decides.",
        ),
        Claim(
            OWN,
            f"The promise is kept on other texts, for every seed: {label}",
            f"{len(checks) - len(missed)} of {len(checks)} kept; the worst is {percent(worst)}" if checks else "",
            verdict(not missed) if checks else Verdict.OPEN,
            f"Perplexity at the chosen setting over that of the model as trained. More than {100 * ASKED:g} % misses.",
        ),
        Claim(
            OWN,
            f"At the chosen setting the load is even: CV at most {MOST_CV:g}, no expert below {100 * LEAST_LOAD:g} % "
            f"of its fair load: {label}",
            f"CV {show_mean(cv, 3)}; least loaded expert {least:.2f}" if runs else "",
            verdict(cv is not None and cv.value <= MOST_CV and least >= LEAST_LOAD),
            "The mean of the CV over seeds decides, and the least loaded expert of all layers and seeds.",
        ),
    ]  # fmt: skip


def _promise_table(models: Models) -> Table:
    texts = _texts(models)
    table = Table(
        f"{100 * ASKED:g} % asked for, by seed",
        [
            "model",
            "seed",
            "chosen",
            "experts per token",
            "validation",
            "worst domain",
            *texts,
            "load CV",
            "least load",
        ],
        left=3,
    )
    for name, runs in models.items():
        for one in runs:
            point = one.body["chosen"]
            found = {check["text"]: check["increase"]["value"] for check in one.body["checks"]}
            domains = {name: increase["value"] for name, increase in one.body["domains"].items()}
            worst = max(domains, key=lambda name: domains[name], default=None)
            table.add(
                _LABELS[name], str(one.seed), point["name"], f"{point['experts_per_token']:.2f}",
                percent(point["increase"]["value"]), "–" if worst is None else f"{worst} {percent(domains[worst])}",
                *(percent(found[text]) if text in found else "–" for text in texts),
                f"{point['load_cv']:.3f}", f"{point['min_load']:.2f}",
            )  # fmt: skip
    return table


def _texts(models: Models) -> list[str]:
    """Names of the other texts."""
    return list(
        dict.fromkeys(c["text"] for runs in models.values() for run in runs for c in run.body["checks"])
    )


def _budgets(runs: Sequence[Measured], text: str | None = None) -> dict[float, list[dict[str, Any]]]:
    """Rows of all seeds by the budget asked for, most experts first: on validation text, or on another one."""
    found: dict[float, list[dict[str, Any]]] = {}
    for one in runs:
        bodies = [one.body] if text is None else [c for c in one.body["checks"] if c["text"] == text]
        for row in (row for body in bodies for row in body["budgets"]):
            found.setdefault(row["budget"], []).append(row)
    return dict(sorted(found.items(), reverse=True))


def _budget_table(models: Models) -> Table:
    table = Table(
        "`set_budget`: means over seeds",
        ["model", "budget", "seeds", "experts per token", "perplexity", "increase, %", "load CV"],
    )
    for name, runs in models.items():
        for budget, rows in _budgets(runs).items():
            columns = (
                ([r["experts_per_token"] for r in rows], 3, ""), ([r["perplexity"] for r in rows], 2, ""),
                ([100 * r["increase"]["value"] for r in rows], 2, "+"), ([r["load_cv"] for r in rows], 3, ""),
            )  # fmt: skip
            shown = (show_mean(mean(values), digits, sign) for values, digits, sign in columns)
            table.add(_LABELS[name], f"{budget:g}", str(len(rows)), *shown)
    return table


def _text_table(models: Models) -> Table:
    texts = {"validation": None, **{name: name for name in _texts(models)}}
    table = Table(
        "Increase on each text: mean over seeds, and the worst seed, %", ["model", "budget", *texts]
    )
    for name, runs in models.items():
        on_text = {heading: _budgets(runs, text) for heading, text in texts.items()}
        for budget in on_text["validation"]:
            grown = [
                [100 * r["increase"]["value"] for r in rows.get(budget, [])] for rows in on_text.values()
            ]
            cells = (
                f"{show_mean(mean(found), 2, '+')}; {max(found):+.2f}" if found else "–" for found in grown
            )
            table.add(_LABELS[name], f"{budget:g}", *cells)
    return table


def _draw(models: Models, path: Path) -> None:
    with two_panels(path) as (left, right):
        for color, (name, runs) in zip(COLORS, models.items(), strict=False):
            rows = _budgets(runs)
            for ax, value, title in (
                (left, lambda r: r["perplexity"], "perplexity, validation text"),
                (right, lambda r: 100 * r["increase"]["value"], "increase over the model as trained, %"),
            ):
                found = [[value(r) for r in of] for of in rows.values()]
                if found:
                    ax.fill_between(
                        list(rows),
                        [min(v) for v in found],
                        [max(v) for v in found],
                        color=color,
                        alpha=0.2,
                        lw=0,
                    )
                    means = [sum(v) / len(v) for v in found]
                    ax.plot(list(rows), means, color=color, marker="o", label=_LABELS[name])
                ax.set(title=title, xlabel="experts per token")
        right.axhline(100 * ASKED, color="black", lw=0.8, ls=":")
        left.legend(frameon=False)


STUDY = MeasuredStudy(
    name="promise", title="The dial's promise", where="Section 6.4.2", kind=KIND, group=GROUP, write=write
)
