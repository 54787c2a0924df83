"""The paper's three sizes on one GPU: real optimiser steps, and the paper's training priced from them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from grmoe.bench import scale
from grmoe.bench.train_step import STEP
from grmoe.hardware import peak_flops
from grmoe.model import Cost, count, preset
from grmoe.model.presets import PRESETS
from grmoe.studies.benchmarks import BenchJob, BenchStudy, model_shape
from grmoe.studies.judging import all_of, with_change
from grmoe.studies.page import OWN, Claim, Page, Verdict
from grmoe.studies.study import Place
from grmoe.tables import Table
from grmoe.terminal import Progress

WHERE = "Appendix, Extended Experimental Details"
WHERE_SETUP = "Section 6.1"  # steps and batch
NEAR = 0.1  # of the size in a name
FALLEN = 1.0  # nats per token that the loss must fall: losses of batches differ by far less
LEAST_LOAD = 0.1  # of a fair share: an expert with less is collapsed
SIZES = {
    name: scale.DEFAULTS[name.removesuffix("-fine")]
    for name in ("350m", "350m-fine", "1.3b", "1.3b-fine", "2.7b")
}


def _job(name: str, usual: scale.Usual, data: Path | None = None) -> BenchJob:
    command = f"grmoe bench scale --preset {name} --batch {usual.batch} --length 1024 --steps {usual.steps}"
    return BenchJob(
        name=name,
        command=command if data is None else f"{command} --data {data.name}",
        benchmark=lambda device: scale.benchmark(peak_flops(device)),
        shapes=model_shape(name, usual.batch),
        measure=partial(scale.run, steps=usual.steps, form="graphs", data=data),
        rounds=1,
    )


def _jobs(data: Path | None = None) -> tuple[BenchJob, ...]:
    return tuple(_job(name, usual, data) for name, usual in SIZES.items())


class ScaleStudy(BenchStudy):
    title = "The paper's sizes on one GPU"
    where = f"Sections 6.1 and 6.3, {WHERE}"

    def __init__(self) -> None:
        super().__init__("scale", _jobs())

    def run(self, place: Place, progress: Progress) -> None:
        """On the prepared data, if there is any: only text tells whether experts share the load."""
        BenchStudy(self.name, _jobs(place.data)).run(place, progress)

    def page(self, results: Path) -> Page:
        found = {name: self.results(results, name) for name in SIZES}
        rows = {name: content["shapes"][0] for name, content in found.items() if content is not None}
        claims = [
            *_size_claims(),
            *(_training_claim(name, rows.get(name)) for name in _ASSUMED),
            *_step_claims(rows),
        ]
        return Page(claims, [_table(rows)] if rows else [], notes=_notes(rows))


def _size_claims() -> list[Claim]:
    """Counts of parameters, which need no measurement."""
    small, middle, large = (count(preset(name), scale.LENGTH) for name in ("350m", "1.3b", "2.7b"))
    stated = count(preset("1.3b", hidden_act="gelu"), scale.LENGTH)
    return [
        Claim(
            f"{WHERE_SETUP}; {WHERE}",
            "350M model",
            _sizes(small),
            _named(small.total, 350e6),
            "Counted. The total must be within 10 % of the name. Embeddings are tied here; the paper does not say. "
            "Untied ones have 39 M more.",
        ),
        _as_a_dense_layer(),
        Claim(
            WHERE,
            '"The total active parameter count per forward pass […] is approximately 1.3B"',
            f"{_sizes(middle)}; with two-layer experts {stated.active / 1e6:,.0f} M active",
            with_change(_named(stated.active, 1.3e9), _named(middle.active, 1.3e9)),
            "Counted. The active ones must be within 10 %. They are with SwiGLU and untied embeddings, which the paper "
            "does not state, and are not with two-layer experts as in its 350M.",
        ),
        Claim(
            "Section 6.3",
            "2.7B model with 32 experts",
            _sizes(large),
            Verdict.UNTESTABLE,
            "The paper states neither width nor depth of it. The sizes of our preset are our choice.",
        ),
    ]  # fmt: skip


def _as_a_dense_layer() -> Claim:
    shape: dict[str, Any] = PRESETS["350m"]
    one, dense = (2 * shape["hidden_size"] * shape[f"{kind}intermediate_size"] for kind in ("moe_", ""))
    two = 2 * one
    return Claim(
        WHERE,
        '"The total parameter count per MoE layer matches a dense model with d_ffn = 3072 when 2 experts are active": '
        "350M",
        f"two experts {two / 1e6:.2f} M weights, the dense layer {dense / 1e6:.2f} M",
        Verdict.HOLDS if two == dense else Verdict.FAILS,
        "Arithmetic, of the active experts. The layer has eight, and a router beside them.",
    )


def _sizes(cost: Cost) -> str:
    return f"{cost.total / 1e6:,.0f} M parameters, {cost.active / 1e6:,.0f} M of them active"


def _named(size: float, name: float) -> Verdict:
    return Verdict.HOLDS if abs(size / name - 1) < NEAR else Verdict.FAILS


# What the paper does not state of the training of a size.
_ASSUMED = {
    "350m": "",
    "1.3b": " (the batch of the 350M: the paper states none)",
    "2.7b": " (batch and steps of the others: the paper states none)",
}


def _training_claim(name: str, shape: dict[str, Any] | None) -> Claim:
    steps = scale.STEPS[name]
    text = f"`{name}` trains for {steps:,} steps of {scale.BATCH} × {scale.LENGTH} tokens{_ASSUMED[name]}"
    if shape is None:
        return Claim(WHERE_SETUP, text, "", Verdict.OPEN, "Will be priced from a few steps on one GPU.")
    row, paper = shape["rows"][0], shape["paper"]
    ours = f"{paper['gpu_hours']:,.0f} GPU-hours at {row['tokens/s']:,.0f} tokens/s"
    reason = f"Priced from {shape['steps']} steps on one GPU. The whole training was not run."
    return Claim(WHERE_SETUP, text, ours, Verdict.UNTESTABLE, reason)


def _step_claims(shapes: Mapping[str, dict[str, Any]]) -> list[Claim]:
    """Questions of our own, of all sizes. shapes: by size, those with results."""
    rows = {name: shape["rows"][0] for name, shape in shapes.items()}
    drawn = [name for name, shape in shapes.items() if shape["data"] == scale.ZIPF]

    def verdict(holds: Mapping[str, bool]) -> Verdict:
        return all_of(
            Verdict.OPEN if name not in holds else Verdict.HOLDS if holds[name] else Verdict.FAILS
            for name in SIZES
        )

    def join(shown: Mapping[str, str]) -> str:
        return "; ".join(f"`{name}` {text}" for name, text in shown.items())

    falls = {name: row["first loss"] - row["last loss"] >= FALLEN for name, row in rows.items()}
    even = verdict({name: row["min load"] > LEAST_LOAD for name, row in rows.items() if name not in drawn})
    return [
        Claim(
            OWN,
            "The paper's sizes take optimiser steps on one GPU",
            join({name: _speed(shapes[name], row) for name, row in rows.items()}),
            verdict({name: STEP in row["times"] for name, row in rows.items()}),
            "Steps of `grmoe train`: forward, backward, clipping and both optimisers. Of the last three quarters of "
            "the steps: tokens/s, MFU and the most memory that was allocated.",
        ),
        Claim(
            OWN,
            "The loss falls over these steps",
            join({name: f"{row['first loss']:.2f} to {row['last loss']:.2f}" for name, row in rows.items()}),
            verdict(falls),
            f"From the first step to the mean of the last twentieth. It must fall by {FALLEN:g} nat per token in "
            "each size. A first part of any fall is that tokens differ in frequency.",
        ),
        Claim(
            OWN,
            "No expert is starved: the least loaded one receives more than a tenth of a fair share",
            join({name: f"{row['min load']:.2f} of it" for name, row in rows.items()}),
            Verdict.UNTESTABLE if drawn and even is not Verdict.FAILS else even,
            "The smallest load over experts and layers, of the last three quarters of the steps. On tokens that are "
            "drawn one by one it is not testable: only their frequencies tell them apart. A size on text can "
            "refute it all the same.",
        ),
    ]  # fmt: skip


def _speed(shape: dict[str, Any], row: dict[str, Any]) -> str:
    parts = [f"{shape['steps']} steps", f"{row['tokens/s']:,.0f} tokens/s"] if STEP in row["times"] else []
    if row.get("MFU %") is not None:
        parts.append(f"MFU {row['MFU %']:.1f} %")
    if row["peak_bytes"] is not None:
        parts.append(f"{row['peak_bytes'] / 1e9:.1f} GB")
    return ", ".join(parts) or "no step"


HEADINGS = (
    "preset", "parameters", "bytes per parameter", "tokens per step", "steps", "tokens/s", "MFU", "peak memory",
    "first loss", "last loss", "load CV", "min load", "GPU-hours of the paper's training",
)  # fmt: skip


def _table(rows: dict[str, dict[str, Any]]) -> Table:
    table = Table("Steps on one GPU", HEADINGS)
    for name, shape in rows.items():
        row, sizes = shape["rows"][0], shape["shape"]
        if STEP not in row["times"]:
            continue
        memory, mfu = row["peak_bytes"], row.get("MFU %")
        table.add(
            name,
            f"{row['B parameters']:.2f} G",
            f"{row['bytes per parameter']:g}",
            f"{sizes['batch']} × {sizes['length']}",
            str(shape["steps"]),
            f"{row['tokens/s']:,.0f}",
            "–" if mfu is None else f"{mfu:.1f} %",
            "–" if memory is None else f"{memory / 1e9:.1f} GB",
            f"{row['first loss']:.3f}",
            f"{row['last loss']:.3f}",
            f"{row['load CV']:.3f}",
            f"{row['min load']:.3f}",
            f"{shape['paper']['gpu_hours']:,.0f}" if "paper" in shape else "–",
        )
    return table


def _notes(shapes: Mapping[str, dict[str, Any]]) -> list[str]:
    texts = sorted({shape["data"] for shape in shapes.values()} - {scale.ZIPF})
    drawn = any(shape["data"] == scale.ZIPF for shape in shapes.values())
    tokens = (
        [f"The text is {', '.join(f'`{name}`' for name in texts)}, in the preset's vocabulary."]
        if texts
        else []
    )
    if drawn or not shapes:
        tokens.append(
            "Without prepared text, tokens are random, drawn by Zipf's law, so that only their frequencies can be "
            "learned."
        )
    return [
        f"{' '.join(tokens)} Load CV is the mean over MoE layers, min load the smallest share of a fair load. Both are "
        "of the last three quarters of the steps.",
        "16 bytes per parameter are fp32 weights, gradients and moments; 8 are bf16, where fp32 does not fit.",
    ]


STUDY = ScaleStudy()
