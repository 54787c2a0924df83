"""`grmoe bench breakdown`: time goes to the part that spends it, and ranges change no result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from grmoe.bench import breakdown as bench
from grmoe.bench import ranges as room
from grmoe.bench.measure import Result
from grmoe.bench.models import ModelShape, ours
from grmoe.bench.slowest import slowest
from grmoe.cli import app
from grmoe.model import PRESETS, GrmoeForCausalLM

CPU = torch.device("cpu")
MICRO: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "router_rank": 4,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def micro(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "micro", MICRO)


def shape() -> ModelShape:
    return ModelShape("micro", 2, 16, "silu")


def model(router: str = bench.GRASSMANN) -> GrmoeForCausalLM:
    torch.manual_seed(0)
    return ours(bench.router_config(shape(), router)).train()


def loss_of(built: GrmoeForCausalLM) -> Tensor:
    ids = torch.arange(32).view(2, 16)
    loss: Tensor = built(input_ids=ids, labels=ids, use_cache=False, skip_logits=True).loss
    return loss


class Clock:
    """Time passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def slow(self, owner: Any, name: str, forward: float, backward: float) -> None:
        """Let a function take time, in its forward and in the backward of its result."""
        clock, function = self, getattr(owner, name)

        class Slow(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                clock.now += forward
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                clock.now += backward
                return grad

        setattr(owner, name, lambda *given, **named: Slow.apply(function(*given, **named)))


def slow_model(clock: Clock) -> GrmoeForCausalLM:
    built = model()
    for layer in built.model.layers:
        block: Any = layer
        clock.slow(block.self_attn.o_proj, "forward", 1.0, 10.0)
        clock.slow(block.input_layernorm, "forward", 0.001, 0.002)
        if hasattr(block.mlp, "router"):
            clock.slow(block.mlp.router, "gate", 2.0, 20.0)
            clock.slow(block.mlp, "_run_experts", 3.0, 30.0)
        else:
            clock.slow(block.mlp.up_proj, "forward", 4.0, 40.0)
    return built


def test_time_goes_to_the_part_that_spends_it() -> None:
    clock = Clock()
    built, marks = slow_model(clock), room.Marks(CPU, clock)
    with room.ranges(built, marks):
        times = marks.times(lambda: loss_of(built).backward())  # type: ignore[no-untyped-call]
    # Four blocks, every second with experts.
    expected = {
        "attention": 4 * 11e3, "routing": 2 * 22e3, "experts": 2 * 33e3, "dense feed-forward": 2 * 44e3,
        "head and loss": 0.0, "optimisers": 0.0, "rest": 4 * 3.0,
    }  # fmt: skip
    assert times == pytest.approx(expected)
    assert sum(times.values()) == pytest.approx(1e3 * clock.now)


def test_a_forward_without_gradients_has_parts_too() -> None:
    clock = Clock()
    built, marks = slow_model(clock), room.Marks(CPU, clock)
    with room.ranges(built, marks), torch.no_grad():
        times = marks.times(lambda: loss_of(built))
    assert times["routing"] == pytest.approx(2 * 2e3)
    assert times["experts"] == pytest.approx(2 * 3e3)


@pytest.mark.parametrize("router", bench.NAMES)
@pytest.mark.parametrize("compiled", [False, True])
def test_ranges_change_no_result(router: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[..., Any]] = []
    monkeypatch.setattr(room, "_compiled", lambda function: calls.append(function) or function)
    plain, ranged = model(router), model(router)
    loss = loss_of(plain)
    loss.backward()  # type: ignore[no-untyped-call]
    before = set(vars(ranged.model.layers[1].mlp))
    marks, losses = room.Marks(CPU), list[Tensor]()
    with room.ranges(ranged, marks, compiled):
        marks.times(lambda: losses.append(loss_of(ranged)) or losses[0].backward())  # type: ignore[func-returns-value]
    assert torch.equal(losses[0], loss)
    # 4 attentions, 2 dense feed-forwards, 2 routers, 2 of experts, and 9 norms, without ranges.
    assert len(calls) == (19 if compiled else 0)
    for (name, a), (_, b) in zip(plain.named_parameters(), ranged.named_parameters(), strict=True):
        # Router and experts give their gradients of x in another order: sums of three terms.
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-8, msg=name)
    assert set(vars(ranged.model.layers[1].mlp)) == before
    assert "_loss_alone" not in vars(ranged)


def test_the_amortised_gate_has_a_network() -> None:
    names = {router: dict(model(router).named_parameters()) for router in bench.NAMES}
    last = {router: names[router].get("model.layers.1.mlp.router.amortizer_net.2.bias") for router in names}
    sizes = {router: None if bias is None else bias.numel() for router, bias in last.items()}
    assert (sizes[bench.AMORTIZED], sizes[bench.MATRIX]) == (4, 16)  # h of N, H of N × N
    assert not any("amortizer_net" in name for name in names[bench.GRASSMANN])
    assert not any("frames" in name for name in names[bench.SOFTMAX])


def test_shares_and_ratios_follow_from_the_times() -> None:
    def passes(routing: float, experts: float) -> list[dict[str, float]]:
        return [dict.fromkeys(room.PARTS, 0.0) | {"routing": routing, "experts": experts}] * 3

    summary = bench._summary(
        {("grassmann", "forward"): passes(1.0, 3.0), ("softmax", "forward"): passes(0.5, 3.0)}
    )
    assert [entry["total_ms"] for entry in summary] == [4.0, 3.5]
    assert set(summary[0]["parts"]) == {"routing", "experts"}
    assert summary[0]["parts"]["routing"]["share"] == 0.25
    result = Result(shape(), [], extra={"parts": summary, "form": "eager", "empty_range_ms": 0.0})
    (ratio,) = bench.compare(result).ratios
    assert ratio.name == "routing, Grassmann gate / softmax gate, forward"
    assert ratio.value == 2.0
    summary = bench._summary(
        {("amortized", "forward"): passes(2.0, 3.0), ("matrix", "forward"): passes(3.0, 3.0)}
    )
    result = Result(shape(), [], extra={"parts": summary, "form": "eager", "empty_range_ms": 0.0})
    (ratio,) = bench.compare(result).ratios
    assert (ratio.name, ratio.value) == ("routing, matrix gate / amortised gate, forward", 1.5)


def test_the_papers_table_adds_up() -> None:
    totals = {router: sum(times.values()) for router, times in bench.PAPER.items()}
    assert totals == pytest.approx({"softmax": 12.4, "amortized": 12.5})


def test_command(tmp_path: Path) -> None:
    command = ["bench", "breakdown", "--preset", "micro", "--device", "cpu", "--batch", "2", "--length", "16"]
    chosen = ["--router", "softmax", "--router", "amortized", "--rounds", "2", "--kernels", "3"]
    result = CliRunner().invoke(app, [*command, *chosen, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (found,) = json.loads((tmp_path / "results.json").read_text())["shapes"]
    assert {(e["router"], e["pass"]) for e in found["parts"]} == {
        (router, kind) for router in ("softmax", "amortized") for kind in ("forward", "step")
    }
    for entry in found["parts"]:
        assert entry["passes"] == 2
        used = {"attention", "routing", "experts", "dense feed-forward", "head and loss", "rest"}
        assert set(entry["parts"]) == used | ({"optimisers"} if entry["pass"] == "step" else set())
    assert [set(row["times"]) for row in found["rows"]] == [{"forward", "step"}] * 2
    assert "an empty range takes" in result.output
    assert set(found["kernels"]) == {
        f"{name} gate, {kind}" for name in ("softmax", "amortised") for kind in ("forward", "step")
    }
    assert all(len(kernels) == 3 for kernels in found["kernels"].values())
    assert "amortised gate, step: slowest kernels" in result.output


def test_the_slowest_kernels_are_those_that_take_the_time() -> None:
    x = torch.randn(256, 256)

    def run() -> None:
        for _ in range(20):
            x.mm(x)
        x.add(1.0)

    first, *others = slowest(run, CPU, 2)
    assert (first["name"], first["calls"]) == ("aten::mm", 20)
    assert len(others) == 1
    assert first["ms"] >= others[0]["ms"] > 0
    everything = slowest(run, CPU, 100)
    assert {"aten::mm", "aten::add"} <= {kernel["name"] for kernel in everything}
    assert sum(kernel["share"] for kernel in everything) == pytest.approx(1)


def test_mistakes_get_one_clear_line(tmp_path: Path) -> None:
    for option, value, message in (
        ("--router", "vmf", "router must be one of 'grassmann', 'softmax', 'amortized', 'matrix', got 'vmf'"),
        ("--pass", "backward", "pass must be one of 'forward', 'step', got 'backward'"),
        ("--form", "fast", "form must be one of 'eager', 'compiled', 'graphs', got 'fast'"),
    ):
        command = [
            "bench",
            "breakdown",
            "--preset",
            "micro",
            "--length",
            "16",
            "--device",
            "cpu",
            option,
            value,
        ]
        result = CliRunner().invoke(app, [*command, "--out", str(tmp_path)])
        assert result.exit_code == 2
        assert message in result.output
