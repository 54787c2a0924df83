"""The paper's overhead: what routing costs beside the softmax gate, and where the time of a model goes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grmoe.bench import breakdown, gate, prefill, train_model
from grmoe.bench.breakdown import (
    AMORTIZED,
    FORWARD,
    GRASSMANN,
    MATRIX,
    NAMES,
    PAPER,
    ROUTERS,
    SOFTMAX,
    STEP,
    routing_name,
)
from grmoe.bench.ranges import ATTENTION, DENSE, EXPERTS, PARTS, REST, ROUTING
from grmoe.hardware import peak_flops
from grmoe.studies.benchmarks import BenchJob, BenchStudy, Measured, at_most, find_ratio, model_shape
from grmoe.studies.counted import counted_claims
from grmoe.studies.judging import changed, with_change
from grmoe.studies.page import Claim, Page, Verdict
from grmoe.tables import Table

WHERE = "Section 6.4.3, Table 6"
BATCH = {"350m": 16, "1.3b": 8}
MATRIX_COST = 0.03  # of the paper
_GATES = ("350M", "1.3B", "2.7B")  # the shapes of `grmoe bench gate` on a GPU, in order
_TRAINED = f"tokens/s, {train_model.OURS}, CUDA graphs over {train_model.SOFTMAX}, CUDA graphs"


def _breakdown(preset: str, kind: str, routers: tuple[str, ...] = ROUTERS) -> BenchJob:
    """All three routers, or the named ones. The job has the name of the last of these."""
    named = routers if routers != ROUTERS else ()
    chosen = "".join(f" --router {router}" for router in named)
    batch = BATCH[preset]
    return BenchJob(
        name="-".join((kind, preset, *named[-1:])),
        command=f"grmoe bench breakdown --preset {preset} --batch {batch} --length 1024 --pass {kind}{chosen}",
        benchmark=lambda device: breakdown.benchmark(),
        shapes=model_shape(preset, batch),
        measure=partial(breakdown.run, routers=routers, passes=(kind,), form="graphs"),
        rounds=5,
    )


def _train(preset: str, rounds: int, steps: int) -> BenchJob:
    batch = BATCH[preset]
    sizes = f"--preset {preset} --batch {batch} --length 1024 --form graphs --rounds {rounds} --steps {steps}"
    return BenchJob(
        name=f"train-{preset}",
        command=f"grmoe bench train-model {sizes} --contender ours",
        benchmark=lambda device: train_model.benchmark(("graphs",), peak_flops(device)),
        shapes=model_shape(preset, batch),
        measure=partial(train_model.run, steps=steps, apart=None),
        rounds=rounds,
        wanted=["ours"],
    )


def _prefill(preset: str) -> BenchJob:
    return BenchJob(
        name=f"prefill-{preset}",
        command=f"grmoe bench prefill --preset {preset} --batch {BATCH[preset]} --length 1024",
        benchmark=lambda device: prefill.benchmark("graphs"),
        shapes=model_shape(preset, BATCH[preset]),
    )


JOBS = (
    BenchJob(
        name="gate",
        command="grmoe bench gate",
        benchmark=lambda device: gate.BENCHMARK,
        shapes=lambda device: list(gate.CUDA_SHAPES),
    ),
    _breakdown("350m", FORWARD),
    _breakdown("350m", STEP),
    _breakdown("350m", FORWARD, (AMORTIZED, MATRIX)),
    _breakdown("1.3b", FORWARD),
    *(_breakdown("1.3b", STEP, (router,)) for router in ROUTERS),  # each of them fills most of a GPU
    _train("350m", rounds=4, steps=10),
    _train("1.3b", rounds=1, steps=30),
    _prefill("350m"),
    _prefill("1.3b"),
)


class OverheadStudy(BenchStudy):
    title = "What routing costs"
    where = WHERE

    def __init__(self) -> None:
        super().__init__("overhead", JOBS)

    def page(self, results: Path) -> Page:
        found = {job.name: self.results(results, job.name) for job in self.jobs}
        shares = {
            (preset, kind): _shares([found[job.name] for job in JOBS if job.name in _parts_of(preset, kind)])
            for preset in BATCH
            for kind in (FORWARD, STEP)
        }
        claims = [
            *_gate_claims(found["gate"]),
            *(_routing_claim(preset, found[f"{FORWARD}-{preset}"]) for preset in BATCH),
            *_share_claims(shares),
            *_cost_claims(found),
            *counted_claims(),
        ]
        tables = [_parts_table(preset, kind, parts) for (preset, kind), parts in shares.items() if parts]
        tables += [_prefill_table(p, content) for p in BATCH if (content := found[f"prefill-{p}"])]
        return Page(claims, tables, notes=_notes())


Parts = dict[str, dict[str, Any]]


def _parts_of(preset: str, kind: str) -> set[str]:
    """Jobs with the parts of the three routers."""
    return {f"{kind}-{preset}", *(f"{kind}-{preset}-{router}" for router in ROUTERS)}


def _shares(contents: list[dict[str, Any] | None]) -> Parts:
    """Entries of a breakdown by router."""
    entries = [e for content in contents if content for e in content["shapes"][0]["parts"]]
    return {entry["router"]: entry for entry in entries}


def _share(entry: dict[str, Any] | None, *parts: str) -> float | None:
    """The share of some parts in a pass."""
    return None if entry is None else sum(entry["parts"].get(part, {"share": 0.0})["share"] for part in parts)


# -- claims ----------------------------------------------------------------------------------------------------


def _gate_claims(content: dict[str, Any] | None) -> list[Claim]:
    found = []
    for number, size in enumerate(_GATES):
        naive, ours = (
            find_ratio(content, number, f"{name} / softmax gate, {gate.FORWARD}")
            for name in ("naive", gate.OURS)
        )
        verdict = with_change(at_most(naive, 1.3), at_most(ours, 1.3))
        shown = [
            f"{name} {ratio.times()}" for name, ratio in (("PyTorch", naive), ("one kernel", ours)) if ratio
        ]
        found.append(
            Claim(
                WHERE,
                f'"GrMoE\'s routing computation […] takes 1.3× the time of standard softmax gating": {size}',
                ", ".join(shown),
                verdict,
                ("With a fused kernel. " if verdict is Verdict.CHANGED else "")
                + "The gate alone, forward, 16384 tokens. The softmax gate is written as in other models. Inside a "
                "model, where it is compiled, it is faster: see below.",
            )
        )
    return found


def _routing_claim(preset: str, content: dict[str, Any] | None) -> Claim:
    """Of the part that routes, with the amortiser, as in the paper's table."""
    amortized, plain = (
        find_ratio(content, 0, routing_name(r, SOFTMAX, FORWARD)) for r in (AMORTIZED, GRASSMANN)
    )
    limit = PAPER[AMORTIZED][ROUTING] / PAPER[SOFTMAX][ROUTING]
    shown = [
        f"{name} {ratio.value:.2f} times"
        for name, ratio in (("with it", amortized), ("without", plain))
        if ratio
    ]
    return Claim(
        WHERE,
        "In the model, routing takes 0.4 ms with GrMoE + Amort. and 0.3 ms with softmax, 1.3 times as much: "
        f"`{preset}`",
        ", ".join(shown),
        changed(at_most(amortized, limit)),
        f"Medians of the part that routes, each part compiled by itself. It holds up to {limit:.2f} times, with the "
        "amortiser. Our network reads the energies, the paper's the token.",
    )


def _share_claims(shares: dict[tuple[str, str], Parts]) -> list[Claim]:
    """Claims on shares of a forward pass, with the Grassmann gate at both sizes."""
    gates = {preset: shares[preset, FORWARD].get(GRASSMANN) for preset in BATCH}
    routing = {preset: _share(e, ROUTING) for preset, e in gates.items()}
    ranges = "Shares of the sum of parts, forward with loss. "
    table = "The paper's own table has "
    return [
        _share_claim(
            '"routing accounts for fewer than 5 % of total MoE forward time"', routing, 0.0, 0.05,
            f"{ranges}The whole model's: the paper's next sentences count attention in.{_of_layers(gates)}",
        ),
        _share_claim(
            '"the expert FFN computation, which accounts for 85–90 % of the total time"',
            {p: _share(e, EXPERTS, DENSE) for p, e in gates.items()}, 0.85, 0.90,
            f"{ranges}Dense feed-forwards count as well. {table}{_paper_share(EXPERTS)}.",
        ),
        _share_claim(
            '"The routing computation (whether softmax or GrMoE) accounts for 3–5 %"',
            routing, 0.03, 0.05,
            f"{ranges}{table}{_paper_share(ROUTING)}.",
        ),
        _share_claim(
            '"the remaining 5–10 % is attention and embedding"',
            {p: _share(e, ATTENTION, REST) for p, e in gates.items()}, 0.05, 0.10,
            f"{ranges}Norms and residuals count as well, the output matrix does not. {table}"
            f"{_paper_share(ATTENTION)} of attention alone.",
        ),
    ]  # fmt: skip


def _of_layers(gates: dict[str, dict[str, Any] | None]) -> str:
    """Routing as a share of routing and experts: another reading of "MoE forward time"."""
    shown = [
        f"`{preset}` {100 * part / whole:.1f} %"
        for preset, e in gates.items()
        if (part := _share(e, ROUTING)) is not None and (whole := _share(e, ROUTING, EXPERTS))
    ]
    return f" Of routing and experts of the MoE layers alone: {', '.join(shown)}." if shown else ""


def _share_claim(text: str, values: dict[str, float | None], low: float, high: float, reason: str) -> Claim:
    known = {preset: value for preset, value in values.items() if value is not None}
    verdict = Verdict.OPEN
    if known:
        inside = [low <= value <= high for value in known.values()]
        verdict = (
            Verdict.FAILS if not all(inside) else Verdict.HOLDS if len(known) == len(values) else verdict
        )
    ours = ", ".join(f"`{preset}` {100 * value:.1f} %" for preset, value in known.items())
    return Claim(WHERE, text, ours, verdict, reason)


def _paper_share(part: str) -> str:
    times = PAPER[AMORTIZED]
    return f"{100 * times[part] / sum(times.values()):.0f} %"


def _cost_claims(found: dict[str, dict[str, Any] | None]) -> list[Claim]:
    whole = "Whole models in CUDA graphs, forward, timed in turn in one run."
    claims = []
    for preset in BATCH:
        forward = found[f"{FORWARD}-{preset}"]
        gates = find_ratio(forward, 0, f"{NAMES[GRASSMANN]} over {NAMES[SOFTMAX]}, {FORWARD}")
        amortized = find_ratio(forward, 0, f"{NAMES[AMORTIZED]} over {NAMES[GRASSMANN]}, {FORWARD}")
        rate = find_ratio(found[f"train-{preset}"], 0, _TRAINED)
        trained = None if rate is None else rate.inverse()
        text = '"the end-to-end overhead is below 2 %"'
        network = f'"The amortization MLP adds another 0.5 %": `{preset}`'
        claims += [
            _excess(f"{text}: `{preset}`, forward", gates, 1.02, whole),
            _excess(f"{text}: `{preset}`, training", trained, 1.02, "A training step, optimisers included."),
            _other_network(_excess(network, amortized, 1.005, whole)),
        ]
    return [*claims, _matrix_claim(found[f"{FORWARD}-350m-{MATRIX}"])]


def _excess(text: str, ratio: Measured | None, limit: float, reason: str) -> Claim:
    if ratio is None:
        return Claim(WHERE, text, "", Verdict.OPEN, reason)
    verdict = at_most(ratio, limit)
    if verdict is Verdict.UNDECIDED:
        reason += " The interval includes the limit."
    return Claim(WHERE, text, ratio.excess(), verdict, reason)


def _other_network(claim: Claim) -> Claim:
    """Of the amortiser: ours is not the paper's."""
    reason = f"Our network reads the energies, the paper's the token. {claim.reason}"
    return replace(claim, verdict=changed(claim.verdict), reason=reason)


def _matrix_claim(content: dict[str, Any] | None) -> Claim:
    ratio = find_ratio(content, 0, routing_name(MATRIX, AMORTIZED, FORWARD))
    verdict = Verdict.OPEN
    if ratio is not None:
        verdict = changed(Verdict.HOLDS if ratio.value >= 1 + MATRIX_COST / 2 else Verdict.FAILS)
    return Claim(
        "Section 5.2, Amortized Posterior with Learned Uncertainty",
        "A full N × N concentration matrix per token increases routing overhead by 3 %",
        "" if ratio is None else f"{100 * (ratio.value - 1):+.1f} % of the time that routing takes, `350m`",
        verdict,
        "With our form of the matrix: the paper gives none. Medians of the part that routes, beside the amortised "
        "gate. It holds from half of the paper's 3 % on.",
    )


# -- tables ----------------------------------------------------------------------------------------------------


def _parts_table(preset: str, kind: str, parts: Parts) -> Table:
    shown = [router for router in ROUTERS if router in parts]
    paper = [r for r in (SOFTMAX, AMORTIZED) if (preset, kind) == ("350m", FORWARD)]
    headings = [
        "part",
        *(f"{NAMES[r]}, ms" for r in shown),
        *(f"the paper, {NAMES[r]}, ms (A100)" for r in paper),
    ]
    table = Table(f"{kind.capitalize()} of {preset}, {BATCH[preset]} × 1024 tokens", headings)
    for part in PARTS:
        if any(part in parts[r]["parts"] for r in shown):
            cells = [_ms(parts[r]["parts"].get(part)) for r in shown]
            table.add(part, *cells, *(_paper_ms(r, part) for r in paper))
    totals = [f"{parts[r]['total_ms']:.2f}" for r in shown]
    table.add("sum", *totals, *(f"{sum(PAPER[r].values()):.1f}" for r in paper))
    return table


def _ms(part: dict[str, float] | None) -> str:
    return "–" if part is None else f"{part['median_ms']:.2f} ({100 * part['share']:.1f} %)"


def _paper_ms(router: str, part: str) -> str:
    times = PAPER[router]
    return f"{times[part]:.1f} ({100 * times[part] / sum(times.values()):.1f} %)" if part in times else "–"


def _prefill_table(preset: str, content: dict[str, Any]) -> Table:
    table = Table(f"Prefill of {preset} with fewer experts", ["experts per token", "ms", "tokens/s"], left=0)
    for row in content["shapes"][0]["rows"]:
        times = row["times"].get(prefill.MODE)
        if times:
            table.add(f"{row['experts']:.2f}", f"{times['median_ms']:.2f}", f"{row['tokens/s']:,.0f}")
    return table


def _notes() -> list[str]:
    return [
        "Parts come from ranges around the modules, in the forward and in the backward. A compiled model has no parts, "
        "so each part is compiled by itself; `grmoe bench breakdown` prints the time of the whole model beside them.",
        "Brackets are the middle 80 % of the ratios of single rounds. The ratios of `350m` are those of two medians "
        "over all rounds, so that one of them lies outside of its brackets. Later ones are medians of the rounds.",
        "The paper's Table 6 and its text disagree. In the table experts take "
        f"{_paper_share(EXPERTS)} of the total and attention {_paper_share(ATTENTION)}, in the text 85 to 90 % and at "
        "most 10 %. The table's milliseconds are of another GPU and are not compared.",
    ]


STUDY = OverheadStudy()
