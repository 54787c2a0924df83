"""`grmoe bench` on tiny sizes: every contender has its row, errors are small, ratios follow from the rounds."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.experts import BACKENDS
from grmoe.kernels import runtime

RUN = ["--device", "cpu", "--rounds", "2"]
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without them, whatever this one has."""
    # A submodule that is loaded already would be found without its package.
    for name in (
        "transformers",
        "transformers.models.olmoe.modeling_olmoe",
        "liger_kernel",
        "scattermoe",
        "sonicmoe",
        "triton_kernels",
    ):
        monkeypatch.setitem(sys.modules, name, None)


def run(command: str, shape: str, out: Path, *options: str) -> tuple[Json, str]:
    result = CliRunner().invoke(app, ["bench", command, "--shape", shape, "--out", str(out), *RUN, *options])
    assert result.exit_code == 0, result.output
    figure = out / f"{command}.png"
    assert str(figure) in result.output.splitlines()[-1]
    assert figure.stat().st_size > 10_000
    return json.loads((out / "results.json").read_text()), result.output


def rows_of(content: Json) -> dict[str, Json]:
    (shape,) = content["shapes"]
    return {row["contender"]: row for row in shape["rows"]}


def ratios_of(content: Json) -> dict[str, float]:
    return {ratio["name"]: ratio["value"] for ratio in content["shapes"][0]["ratios"]}


def median(row: Json, mode: str) -> float:
    return float(row["times"][mode]["median_ms"])


def ratio(over: Json, under: Json, mode: str) -> float:
    """The median round."""
    pairs = zip(*(row["times"][mode]["rounds_ms"] for row in (over, under)), strict=True)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def test_gate(tmp_path: Path) -> None:
    content, output = run("gate", "64,32,4,8", tmp_path)
    rows, ratios = rows_of(content), ratios_of(content)
    assert list(rows) == [
        "softmax gate as people write it",
        "one bare GEMM (three with backward)",
        "naive Grassmann gate",
        "ours",
        "ours, with metrics",
    ]
    for name in ("ours", "ours, with metrics", "naive Grassmann gate"):
        assert set(rows[name]["errors"]) == {"probs", "x", "frames", "log_kappa"}
        assert max(rows[name]["errors"].values()) < 1e-5
    gemm = rows["one bare GEMM (three with backward)"]
    for mode, count in (("forward", "one bare GEMM"), ("forward+backward", "three bare GEMMs")):
        assert ratios[f"ours / {count}, {mode}"] == ratio(rows["ours"], gemm, mode)
    assert content["shapes"][0]["shape"] == {"tokens": 64, "dim": 32, "experts": 4, "rank": 8}
    assert content["seed"] == 0
    assert content["versions"]["transformers"] == "not installed"
    assert content["versions"]["torch"][0].isdigit()
    assert "ours / softmax gate, forward" in output


def test_the_rank_of_a_gate_replaces_that_of_its_shape(tmp_path: Path) -> None:
    content, _ = run("gate", "64,32,4,8", tmp_path, "--rank", "4", "--contender", "bare GEMM")
    assert content["shapes"][0]["shape"]["rank"] == 4


def test_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)  # as for users: a CPU has no kernels
    content, output = run("layer", "64,32,4,32,2", tmp_path)
    rows, ratios = rows_of(content), ratios_of(content)
    peers = {
        "Hugging Face OLMoE block": "transformers",
        "Liger fused MoE": "liger_kernel",
        "ScatterMoE": "scattermoe",
        "SonicMoE": "sonicmoe",
        "triton_kernels": "triton_kernels",
        "Hugging Face OLMoE block, batched_mm": "transformers",
    }
    same = "ours, softmax gate, same experts"
    ours = ["ours", "ours, softmax gate", same, *(f"ours, {name}" for name in BACKENDS)]
    assert set(rows) == {*peers, "dense GEMMs, same FLOPs", *ours}
    for name, library in peers.items():
        assert rows[name]["failure"].startswith(f"not installed: {library}")
        assert rows[name]["times"] == {}
        assert f"{name}: not installed: {library}" in output
    for name in ("ours", "ours, softmax gate", "ours, reference", "ours, grouped"):
        assert max(rows[name]["errors"].values()) < 1e-5
        assert rows[name]["failure"] is None
    assert "CUDA" in rows["ours, triton"]["failure"]
    dense = rows["dense GEMMs, same FLOPs"]
    for mode in ("forward", "forward+backward"):
        assert ratios[f"share of the dense rate, {mode}"] == ratio(dense, rows["ours"], mode)
        expected = ratio(rows["ours"], rows["ours, softmax gate"], mode)
        assert ratios[f"Grassmann gate over softmax gate, {mode}"] == expected
    own = rows["ours"]
    assert own["touched experts"] == 4
    assert own["touched bytes"] == 4 * (4 * 3 * 32 * 32 + 4 * 32 * 8)  # experts and frames, fp32
    assert own["floor ms"] == pytest.approx(1e3 * own["touched bytes"] / own["bandwidth"])
    floor = ratios["ours / floor (its experts and frames read once), forward"]
    assert floor == pytest.approx(median(own, "forward") / own["floor ms"])
    assert "µs above that" in output
    assert [line for line in content["shapes"][0]["lines"] if "µs above that" in line]


def test_layer_of_many_tokens(tmp_path: Path) -> None:
    content, output = run("layer", "256,32,4,32,2", tmp_path, "--rank", "4", "--contender", "ours")
    (own,) = rows_of(content).values()
    # x·U of 4 × 4 columns beside 2 experts of three products of width 32; 4 times, and 3 times with the backward.
    assert own["gate's share of the FLOPs, forward"] == pytest.approx(16 / (16 + 2 * 3 * 32))
    assert own["gate's share of the FLOPs, forward+backward"] == pytest.approx(64 / (64 + 2 * 9 * 32))
    assert "a gate of rank 4 takes 7.7 % forward, 10.0 % forward+backward" in " ".join(output.split())
    assert "floor ms" not in own


def test_layer_runs_only_the_contenders_asked_for(tmp_path: Path) -> None:
    content, _ = run(
        "layer", "64,32,4,32,2", tmp_path, "--contender", "grouped", "--contender", "Liger", "--dtype", "bf16"
    )
    rows = rows_of(content)
    assert list(rows) == ["Liger fused MoE", "ours, grouped"]
    assert content["dtype"] == "bfloat16"
    assert 1e-4 < rows["ours, grouped"]["errors"]["y"] < 2e-2  # bf16 has 8 bits


def test_dial(tmp_path: Path) -> None:
    content, output = run("dial", "64,32,8,16", tmp_path, "--rank", "4")
    rows, ratios = rows_of(content), ratios_of(content)
    given = [f"{1 + i / 4:.2f} experts" for i in range(13)]
    own = [f"own gate, α = {alpha}" for alpha in (0.5, 1, 2, 5)]
    assert list(rows) == [*given, *own]
    assert [rows[name]["experts"] for name in given] == [1 + i / 4 for i in range(13)]
    assert all(max(row["errors"].values()) < 1e-5 for row in rows.values())
    experts = [rows[name]["experts"] for name in own]
    assert experts == sorted(experts, reverse=True)
    for name in own:
        assert 0 <= rows[name]["dropped"] < 1
        assert rows[name]["bound"] >= 0
    expected = ratio(rows["1.00 experts"], rows["2.00 experts"], "forward")
    assert ratios["time at 1 expert / at 2, forward"] == expected
    assert content["shapes"][0]["fits"].keys() == {"forward", "forward+backward"}
    assert "R² =" in output


def test_no_line_through_one_number_of_experts(tmp_path: Path) -> None:
    """One token cannot have 1.25 experts. Before, the command ended after all was measured."""
    options = ("--contender", "1.00", "--contender", "1.25")
    content, _ = run("dial", "1,32,8,16", tmp_path, *options)
    assert [row["experts"] for row in rows_of(content).values()] == [1, 1]
    assert "fits" not in content["shapes"][0]


def test_train_step(tmp_path: Path) -> None:
    content, output = run("train-step", "64,32,4,32,2", tmp_path)
    rows, ratios = rows_of(content), ratios_of(content)
    assert list(rows) == ["Hugging Face OLMoE block", "ours", "ours, softmax gate"]
    assert rows["Hugging Face OLMoE block"]["failure"].startswith("not installed: transformers")
    for name in ("ours", "ours, softmax gate"):
        step = median(rows[name], "step")
        assert rows[name]["tokens/s"] == pytest.approx(64e3 / step)
        assert max(rows[name]["errors"].values()) < 1e-5
    parameters = 4 * (3 * 32 * 32) + 4 * 32  # experts and the gate, fp32, with two moments each
    assert rows["ours, softmax gate"]["held MB"] == pytest.approx(12e-6 * parameters, rel=1e-3)
    expected = ratio(rows["ours"], rows["ours, softmax gate"], "step")
    assert ratios["Grassmann gate over softmax gate, step"] == expected
    assert "tokens/s" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gate", "--shape", "64,32"], "--shape must be tokens,dim,experts,rank, got 2 numbers in '64,32'"),
        (["layer", "--shapes", "all"], "--shapes must be one of 'hopper', 'decode', got 'all'"),
        (["layer", "--dtype", "fp8"], "dtype must be one of 'bf16', 'fp32', got 'fp8'"),
        (["layer", "--device", "abacus"], "device must be auto, cpu, cuda or cuda:N, got 'abacus'"),
        (["layer", "--device", "cuda:99"], "device must exist, got cuda:99"),
        (["layer", "--shape", "8,16,4,16,2", "--rank", "17"], "rank must be at most dim = 16, got 17"),
        (["dial", "--shape", "8,16,4,16", "--rank", "17"], "rank must be at most dim = 16, got 17"),
        (
            ["layer", "--contender", "nobody"],
            "--contender must be part of a contender's name (Hugging Face OLMoE block; Liger",
        ),
    ],
)
def test_mistakes_get_one_clear_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
