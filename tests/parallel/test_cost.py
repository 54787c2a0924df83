"""What `grmoe.parallel.cost` and `memory` work out on paper is what processes really send and hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run
from traffic import COUNTS, Seen, Step, step, wire
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.model import GrmoeForCausalLM, preset
from grmoe.model.count import meta_model
from grmoe.parallel.cost import Plan, Traffic, traffic
from grmoe.parallel.memory import block_activations, memory
from grmoe.parallel.tables import Machine, seconds
from grmoe.parallel.world import ParallelConfig

PAGE = (Path(__file__).parents[2] / "docs" / "results" / "parallel.md").read_text()

# Vocabularies that no number of processes divides: shards are padded.
Model = tuple[str, dict[str, Any]]
TINY: Model = ("tiny", {"vocab_size": 2049})
# Bytes are products of sizes: a quarter of the width takes every path in a tenth of the time.
QUARTER = {
    "hidden_size": 192, "intermediate_size": 768, "moe_intermediate_size": 384, "num_attention_heads": 3,
    "router_rank": 12,
}  # fmt: skip
PAPER: Model = ("350m", QUARTER | {"num_hidden_layers": 2, "vocab_size": 1001})
CASES: dict[str, tuple[Model, Plan]] = {
    "`tiny`, fsdp 2": (TINY, Plan(fsdp=2, sequences=2, length=64)),
    "`tiny`, expert 2": (TINY, Plan(expert=2, sequences=2, length=64)),
    "`tiny`, replicate 2": (TINY, Plan(replicate=2, sequences=2, length=64)),
    "`350m` of two narrow blocks, fsdp 2": (PAPER, Plan(fsdp=2, sequences=1, length=32)),
    "`350m` of two narrow blocks, expert 2": (PAPER, Plan(expert=2, sequences=1, length=32)),
    "fp32, two micro-batches": (TINY, Plan(fsdp=2, sequences=2, length=64, bf16=False, micro_batches=2)),
    "checkpointed, two micro-batches": (
        TINY,
        Plan(expert=2, sequences=2, length=64, checkpointing=True, micro_batches=2),
    ),
    "fsdp 2 × expert 2": (TINY, Plan(fsdp=2, expert=2, sequences=2, length=64)),
    "replicate 2 × fsdp 2": (TINY, Plan(replicate=2, fsdp=2, sequences=2, length=64)),
}
HELD = ("weights", "gradients", "moments", "routers")


def on_paper(model: GrmoeForCausalLM, plan: Plan) -> dict[tuple[str, int], Seen]:
    """Added up as they can be told apart in a measurement."""
    found: dict[tuple[str, int], Seen] = {}
    for t in traffic(model, plan):
        seen = found.setdefault((COUNTS if t.what == "row counts" else t.op, t.n), Seen())
        seen.calls += t.calls
        seen.given += t.given
    return found


@pytest.mark.parametrize("case", CASES)
def test_paper_equals_measurement(case: str) -> None:
    (name, changes), plan = CASES[case]
    mesh = ParallelConfig(plan.fsdp, plan.replicate, plan.expert)
    steps: list[Step] = run(mesh, plan.processes, step, name, changes, plan)
    model = meta_model(preset(name, **changes))
    sent, held = on_paper(model, plan), memory(model, plan)
    for measured in steps:
        assert {key: seen.calls for key, seen in measured.seen.items()} == {
            key: seen.calls for key, seen in sent.items()
        }
        for key, want in sent.items():
            if key[0] != "all-to-all":
                assert measured.seen[key].given == want.given, key
    if plan.expert > 1:
        key = ("all-to-all", plan.expert)
        # A process gives the rows of its tokens, and later those it received: as many on average, whatever the load.
        assert sum(s.seen[key].given for s in steps) == plan.processes * sent[key].given
        # Half of them are for the other process if the load is balanced. Routers before training are not quite.
        share = sum(s.seen[key].sent for s in steps) / (plan.processes * sent[key].given / 2)
        assert 0.7 < share < 1.3
    # The first process has no padding; others may have smaller moments, which are not padded.
    first = steps[0].held
    assert first == {name: getattr(held, name) for name in HELD}
    for measured in steps[1:]:
        assert {**measured.held, "moments": 0} == {**first, "moments": 0}
        assert 0.9 * first["moments"] < measured.held["moments"] <= first["moments"]

    lines = [
        f"| {case} | {op} | {sent[op, n].calls} | {sent[op, n].given:,} | {seen.given:,} |"
        for (op, n), seen in steps[0].seen.items()
    ]
    lines.append(
        f"| {case} | held | | {sum(getattr(held, name) for name in HELD):,} | {sum(first.values()):,} |"
    )
    print("", *lines, sep="\n")
    if case.startswith("`"):
        exact = [line for line in lines if "| all-to-all |" not in line]
        assert [line for line in exact if line not in PAGE] == []


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="needs Linux's counters")
def test_bytes_on_the_wire() -> None:
    """What leaves a process, by the counters of the loopback device."""
    given = 1 << 24
    measured = run(ParallelConfig(), 2, wire, given)[0]
    for op in ("all-gather", "all-reduce", "all-to-all"):
        sent = Traffic("", op, 2, 1, 1, given, hidden=True).sent  # type: ignore[arg-type]
        # Headers and barriers take a little more; what others send at the time, too.
        assert sent <= measured[op] < 1.02 * sent, op


@pytest.mark.parametrize("model", [("tiny", {}), ("350m", {"num_hidden_layers": 4, "vocab_size": 1000})])
def test_activations_are_what_eager_keeps_or_half_of_it(model: Model) -> None:
    config = preset(model[0], **model[1])
    built, tokens = GrmoeForCausalLM(config).train(), 256
    own = {t.untyped_storage().data_ptr() for t in (*built.parameters(), *built.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in own:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        built.model(input_ids=torch.randint(config.vocab_size, (1, tokens)), use_cache=False)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    plan = Plan(fsdp=2, bf16=False)
    estimate = tokens * sum(
        block_activations(config, i, plan, config.num_experts_per_tok)
        for i in range(config.num_hidden_layers)
    )
    assert 1 < measured / estimate < 2


def test_seconds_by_hand() -> None:
    machine = Machine(nvlink=400.0, network=50.0, hop=1e-6, network_hop=1e-5)

    def time(op: Any, n: int, stride: int) -> float:
        return seconds(Traffic("", op, n, stride, 2, 1000, hidden=True), machine)

    # In a node: 7/8 of the bytes at NVLink's rate, 7 hops a call.
    assert time("all-gather", 8, 1) == pytest.approx(875 / 400 + 2 * 7e-6)
    # Two whole nodes use all cards, one GPU of each node its own.
    assert time("reduce-scatter", 16, 1) == pytest.approx(937.5 / 400 + 2 * (14e-6 + 1e-5))
    assert time("all-gather", 4, 8) == pytest.approx(750 / 50 + 2 * 3e-5)
    assert time("all-gather", 4, 4) == pytest.approx(750 / 100 + 2 * (2e-6 + 1e-5))
    assert time("all-reduce", 64, 1) == pytest.approx(2 * 1000 * 63 / 64 / 400 + 2 * (14e-6 + 6e-5))
    assert time("all-to-all", 8, 1) == pytest.approx(875 / 400 + 2 * 1e-6)
    assert time("all-to-all", 16, 1) == pytest.approx(500 / 50 + 2 * 1e-5)


def info(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["info", *arguments])
    return result.exit_code, result.output


def test_what_cannot_be_is_refused() -> None:
    for arguments, message in (
        (("350m", "--gpus", "8", "--expert", "3"), "got 1 × 3 for 8"),
        (("350m", "--gpus", "9", "--expert", "3"), "parallel.expert must divide the number of experts"),
        (("2.7b", "--gpus", "56", "--expert", "8"), "parallel.fsdp must divide a side of the experts"),
        (("350m", "--gpus", "8", "--micro-batches", "3"), "micro_batches must divide the 8 sequences"),
    ):
        code, text = info(*arguments)
        assert code == 2
        assert message in text


def test_the_tables_of_the_page_are_what_the_command_prints() -> None:
    sections = re.findall(r"^## `(\S+?)`\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in sections] == ["350m", "1.3b", "2.7b"]
    for name, text in sections:
        commands = re.findall(rf"^    grmoe info {re.escape(name)} (.*)$", text, re.MULTILINE)
        assert [int(c.split()[1]) for c in commands] == [8, 64, 512]
        _, *table = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
        assert len(table) > 20
        for column, command in enumerate(commands, 1):
            code, printed = info(name, *command.split())
            assert code == 0
            found = re.findall(r"^│ ([^│]*?) +│ +([^│]*?) │", printed.split("GPUs:")[1], re.MULTILINE)
            rows = dict(found)
            assert len(rows) == len(found)
            mesh = re.findall(r"replicate \d+ × fsdp \d+ × expert \d+", printed)
            for row in table:
                if row[0] == "mesh":
                    assert [row[column]] == mesh
                elif row[0] in rows or row[column] != "–":
                    assert row[column] == rows[row[0]], (name, command, row[0])
