"""What `grmoe.parallel.cost` works out on paper is what processes really send and hold."""

from __future__ import annotations

from typing import Any

import pytest
from processes import run
from traffic import COUNTS, Seen, Step, step

from grmoe.model import preset
from grmoe.model.count import meta_model
from grmoe.parallel.cost import Plan, traffic
from grmoe.parallel.memory import memory
from grmoe.parallel.world import ParallelConfig

# A vocabulary that no number of processes divides: shards are padded.
TINY: tuple[str, dict[str, Any]] = ("tiny", {"vocab_size": 2049})
PAPER: tuple[str, dict[str, Any]] = ("350m", {"num_hidden_layers": 2, "vocab_size": 1001})
CASES: dict[str, tuple[tuple[str, dict[str, Any]], Plan]] = {
    "tiny, fsdp 2": (TINY, Plan(fsdp=2, sequences=2, length=64)),
    "tiny, expert 2": (TINY, Plan(expert=2, sequences=2, length=64)),
    "tiny, replicate 2": (TINY, Plan(replicate=2, sequences=2, length=64)),
    "350m of two blocks, fsdp 2": (PAPER, Plan(fsdp=2, sequences=1, length=128)),
    "350m of two blocks, expert 2": (PAPER, Plan(expert=2, sequences=1, length=128)),
    "tiny, fsdp 2, fp32, two micro-batches": (
        TINY,
        Plan(fsdp=2, sequences=2, length=64, bf16=False, micro_batches=2),
    ),
    "tiny, expert 2, checkpointing, two micro-batches": (
        TINY,
        Plan(expert=2, sequences=2, length=64, checkpointing=True, micro_batches=2),
    ),
    "tiny, fsdp 2 × expert 2": (TINY, Plan(fsdp=2, expert=2, sequences=2, length=64)),
    "tiny, replicate 2 × fsdp 2": (TINY, Plan(replicate=2, fsdp=2, sequences=2, length=64)),
}


def measure(plan: Plan, name: str, changes: dict[str, Any]) -> list[Step]:
    mesh = ParallelConfig(plan.fsdp, plan.replicate, plan.expert)
    return run(mesh, plan.processes, step, name, changes, plan)


def expected(plan: Plan, name: str, changes: dict[str, Any]) -> dict[tuple[str, int], Seen]:
    """The paper's numbers, added up as they can be told apart in a measurement."""
    found: dict[tuple[str, int], Seen] = {}
    for t in traffic(meta_model(preset(name, **changes)), plan):
        key = (COUNTS if t.what == "row counts" else t.op, t.n)
        seen = found.setdefault(key, Seen())
        seen.calls += t.calls
        seen.given += t.given
    return found


@pytest.mark.parametrize("case", CASES)
def test_bytes_on_paper_are_the_bytes_measured(case: str) -> None:
    (name, changes), plan = CASES[case]
    steps = measure(plan, name, changes)
    want = expected(plan, name, changes)
    for measured in steps:
        assert measured.seen.keys() == want.keys()
        for key, seen in measured.seen.items():
            print(case, key, seen, want[key])
            assert seen.calls == want[key].calls, key
            # A process gets back as many rows as it gave, but not as many as it received.
            if key[0] != "all-to-all":
                assert seen.given == want[key].given, key
    print(steps[0].held, memory(meta_model(preset(name, **changes)), plan))
