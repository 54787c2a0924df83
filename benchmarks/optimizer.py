"""Time of one optimiser step: `GrassmannAdam` against geoopt's `RiemannianAdam` on `EuclideanStiefel`.

    python benchmarks/optimizer.py [--json PATH]

Both update the frames of 6 layers × 8 experts, 768×48, in fp32 on the CPU. They take turns in one run, and the order
alternates, so a slow phase of the machine hits both. A second table shows where the time of our step goes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import geoopt
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from grmoe.geometry import haar_frames, orthonormality_error
from grmoe.optim import GrassmannAdam
from grmoe.tables import Table
from grmoe.terminal import say_all

NAMES = ("GrassmannAdam", "geoopt RiemannianAdam")
KINDS = {"matrix products": ("bmm", "baddbmm"), "stacking and copying back": ("cat", "copy", "_foreach_copy")}


def milliseconds(step: Callable[[], object]) -> float:
    start = perf_counter()
    step()
    return 1e3 * (perf_counter() - start)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return low, median, high


def shares(step: Callable[[], object], repeats: int) -> dict[str, float]:
    """Share of a step's time by kind of operation, from the profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for _ in range(repeats):
            step()
    times = dict.fromkeys([*KINDS, "everything else"], 0.0)
    for event in trace.key_averages():
        name = event.key.removeprefix("aten::").removesuffix("_")
        kind = next((kind for kind, names in KINDS.items() if name in names), "everything else")
        times[kind] += event.self_cpu_time_total
    return {kind: time / sum(times.values()) for kind, time in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Time one step of GrassmannAdam and of geoopt's RiemannianAdam."
    )
    parser.add_argument("--layers", type=int, default=6, help="layers, one parameter each")
    parser.add_argument("--experts", type=int, default=8, help="frames per layer")
    parser.add_argument("--dim", type=int, default=768, help="rows of a frame")
    parser.add_argument("--rank", type=int, default=48, help="columns of a frame")
    parser.add_argument("--rounds", type=int, default=30, help="timed steps per optimiser")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()

    generator = torch.Generator().manual_seed(0)
    frames = haar_frames(args.dim, args.rank, (args.layers, args.experts), generator=generator)
    ours: list[Tensor] = [nn.Parameter(layer.clone()) for layer in frames]
    manifold = geoopt.EuclideanStiefel()
    theirs: list[Tensor] = [geoopt.ManifoldParameter(layer.clone(), manifold=manifold) for layer in frames]
    # The gradient is fixed: its values do not change the work, and computing it is not part of a step.
    for p in (*ours, *theirs):
        p.grad = torch.randn(p.shape, generator=generator)
    steps: tuple[Callable[[], object], ...] = (
        GrassmannAdam(ours, lr=0.02).step,
        geoopt.optim.RiemannianAdam(theirs, lr=0.02).step,
    )
    for step in steps:
        for _ in range(3):
            step()
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(args.rounds):
        for who in (0, 1) if turn % 2 == 0 else (1, 0):
            times[who].append(milliseconds(steps[who]))

    # The ratio is taken round by round, because the two steps of a round ran within a fraction of a second.
    ratio = quartiles([slow / fast for fast, slow in zip(*times, strict=True)])
    rows = {name: quartiles(values) for name, values in zip(NAMES, times, strict=True)}
    drift = [float(orthonormality_error(torch.stack(ps).detach().double())) for ps in (ours, theirs)]
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, geoopt {geoopt.__version__}, {threads} threads, fp32")
    title = f"{args.layers} layers × {args.experts} frames of {args.dim}×{args.rank}, {args.rounds} rounds"
    table = Table(title, ["one step", "median ms", "quartiles", "max|UᵀU−I|"])
    for (name, (low, median, high)), error in zip(rows.items(), drift, strict=True):
        table.add(name, f"{median:.2f}", f"{low:.2f} – {high:.2f}", f"{error:.1e}")
    where = shares(steps[0], 10)
    parts = Table("A GrassmannAdam step", ["operations", "share of the time"])
    for kind, share in where.items():
        parts.add(kind, f"{share:.1%}")
    faster = f"GrassmannAdam is {ratio[1]:.2f}× faster (quartiles {ratio[0]:.2f} – {ratio[2]:.2f})"
    say_all([table, faster, parts])
    if args.json is not None:
        result = {
            "torch": torch.__version__,
            "geoopt": geoopt.__version__,
            "threads": threads,
            "shape": [args.layers, args.experts, args.dim, args.rank],
            "rounds": args.rounds,
            "step_ms_quartiles": rows,
            "speedup_quartiles": ratio,
            "share_of_our_step": where,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
