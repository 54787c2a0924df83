"""The paper's three sizes on one GPU: real optimiser steps, and the paper's training priced from them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from grmoe.bench import scale
from grmoe.bench.train_step import STEP
from grmoe.hardware import peak_flops
from grmoe.model import Cost, count, preset
from grmoe.model.presets import PRESETS
from grmoe.studies.benchmarks import BenchJob, BenchStudy, model_shape
from grmoe.studies.judging import with_change
from grmoe.studies.page import Claim, Page, Verdict
from grmoe.tables import Table

WHERE = "Appendix, Extended Experimental Details"
WHERE_SETUP = "Section 6.1"  # steps and batch
NEAR = 0.1  # of the size in a name
SIZES = {
    name: scale.DEFAULTS[name.removesuffix("-fine")]
    for name in ("350m", "350m-fine", "1.3b", "1.3b-fine", "2.7b")
}


def _job(name: str, usual: scale.Usual) -> BenchJob:
    return BenchJob(
        name=name,
        command=f"grmoe bench scale --preset {name} --batch {usual.batch} --length 1024 --steps {usual.steps}",
        benchmark=lambda device: scale.benchmark(peak_flops(device)),
        shapes=model_shape(name, usual.batch),
        measure=partial(scale.run, steps=usual.steps, form="graphs"),
        rounds=1,
    )


class ScaleStudy(BenchStudy):
    title = "The paper's sizes on one GPU"
    where = f"Sections 6.1 and 6.3, {WHERE}"

    def __init__(self) -> None:
        super().__init__("scale", tuple(_job(name, usual) for name, usual in SIZES.items()))

    def page(self, results: Path) -> Page:
        found = {name: self.results(results, name) for name in SIZES}
        rows = {name: content["shapes"][0] for name, content in found.items() if content is not None}
        claims = [
            *_size_claims(),
            *(_training_claim(name, rows.get(name)) for name in _ASSUMED),
        ]
        return Page(claims, [_table(rows)] if rows else [], notes=_notes())


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


def _notes() -> list[str]:
    return [
        "Tokens are random, drawn by Zipf's law, so that only their frequencies can be learned. Load CV is the mean "
        "over MoE layers, min load the smallest share of a fair load. Both are of the last three quarters of the "
        "steps.",
        "16 bytes per parameter are fp32 weights, gradients and moments; 8 are bf16, where fp32 does not fit.",
    ]


STUDY = ScaleStudy()
