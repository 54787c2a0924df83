"""A benchmark as a JSON file and as tables."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from grmoe import __version__
from grmoe.bench.measure import SEED, Result, Row
from grmoe.files import write_file
from grmoe.kernels import runtime
from grmoe.probe.timing import Times, figure_digits
from grmoe.tables import Table

LIBRARIES = ("torch", "triton", "transformers", "liger_kernel", "scattermoe", "sonicmoe", "triton_kernels")

# Columns of the errors. The first parameter of either gate (frames, weight) has the same column.
COLUMNS = {
    "probs": "max|Δp|", "y": "err y", "x": "∂x", "frames": "∂gate", "weight": "∂gate",
    "log_kappa": "∂log κ", "gate_up_proj": "∂up", "down_proj": "∂down",
}  # fmt: skip


def version(library: str) -> str:
    if library == "grmoe":
        return __version__
    if importlib.util.find_spec(library) is None:
        return "not installed"
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return str(getattr(importlib.import_module(library), "__version__", "unknown"))
    except ImportError:  # found, but something it needs is missing: its row says what
        return "unknown"


def describe_machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"


def write_json(
    command: str,
    results: list[Result],
    lines: list[list[str]],
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    path: Path,
) -> None:
    """lines: the text below each result's table."""
    versions = {library: version(library) for library in ("grmoe", *LIBRARIES)}
    content = {
        "command": f"bench {command}",
        "command_line": sys.argv,
        "device": describe_machine(device),
        "dtype": str(dtype).removeprefix("torch."),
        "rounds": rounds,
        "seed": SEED,
        "python": platform.python_version(),
        "versions": versions,
        "kernels_replaced_by_torch": runtime.failures(),
        "shapes": [
            _plain(result, versions) | {"lines": text} for result, text in zip(results, lines, strict=True)
        ],
    }
    write_file(path, json.dumps(content, indent=1, ensure_ascii=False).encode())


def _plain(result: Result, versions: dict[str, str]) -> dict[str, Any]:
    return {
        "shape": asdict(result.shape),
        "rows": [_plain_row(row, versions) for row in result.rows],
        "ratios": [asdict(ratio) for ratio in result.ratios],
        **result.extra,
    }


def _plain_row(row: Row, versions: dict[str, str]) -> dict[str, Any]:
    return {
        "contender": row.name,
        "kind": row.kind,
        "library": f"{row.library} {versions[row.library]}",
        "failure": row.failure,
        "times": {mode: _plain_times(times) for mode, times in row.times.items()},
        "peak_bytes": row.peak,
        "errors": row.errors,
        **row.facts,
    }


def _plain_times(times: Times) -> dict[str, Any]:
    low, high = times.interval
    plain = {"median_ms": times.median, "p10_ms": low, "p90_ms": high, "rounds_ms": times.rounds}
    return plain | ({"host_ms": statistics.median(times.host)} if times.host else {})


def row_table(result: Result, title: str, facts: dict[str, str]) -> Table:
    """One row per contender. `facts` names the facts to show, if a row has them, and how to format each."""
    rows = result.rows
    modes = list(dict.fromkeys(mode for row in rows for mode in row.times))
    errors = [label for label in dict.fromkeys(COLUMNS.values()) if any(label in _errors(r) for r in rows)]
    memory = any(row.peak is not None for row in rows)
    host = any(times.host for row in rows for times in row.times.values())
    machine = (["host ms"] if host else []) + (["peak MB"] if memory else [])
    facts = {name: spec for name, spec in facts.items() if any(name in row.facts for row in rows)}
    headings = ["contender", *facts, *(f"{mode} ms" for mode in modes), *machine, *errors]
    table = Table(f"{title}: {result.shape}", headings)
    for row in rows:
        cells = [format(row.facts[f], spec) if f in row.facts else "–" for f, spec in facts.items()]
        missing = "failed" if row.failure else "–"
        cells += [_show(row.times[mode]) if mode in row.times else missing for mode in modes]
        if host:
            each = [statistics.median(t.host) for m in modes if (t := row.times.get(m)) and t.host]
            cells.append(" / ".join(f"{ms:.2f}" for ms in each) or "–")
        if memory:
            cells.append("–" if row.peak is None else f"{row.peak / 1e6:.0f}")
        shown = _errors(row)
        cells += [f"{shown[label]:.1e}" if label in shown else "–" for label in errors]
        table.add(row.name, *cells)
    return table


def ratio_table(result: Result) -> Table:
    table = Table("", ["ratio", "value (middle 80 % of the rounds)"], notes=True)
    for ratio in result.ratios:
        table.add(ratio.name, str(ratio))
    return table


def _errors(row: Row) -> dict[str, float]:
    return {COLUMNS[name]: value for name, value in row.errors.items() if name in COLUMNS}


def _show(times: Times) -> str:
    low, high = times.interval
    digits = figure_digits(times.median)
    return f"{times.median:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"
