"""Time of the MoE layer's backends on this machine: the loop against grouped GEMMs, forward and backward.

    python benchmarks/experts.py [--tokens 2048] [--json PATH]

For each number of experts both backends take turns on the same layer, input and selection within one run. The
dense GEMMs of the same FLOPs stand beside them: nothing with these experts can be faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from grmoe import GrassmannRouter, MoE
from grmoe.experts import pick_backend
from grmoe.experts.dispatch import Dispatch
from grmoe.routing import TopK


def milliseconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return 1e3 * (perf_counter() - start)


def contenders(layer: MoE, x_TD: Tensor, top_k: int) -> dict[str, Callable[[], object]]:
    """Forward and backward of the experts alone, the selection given."""
    with torch.no_grad():
        routing = layer.router(x_TD)
    dispatch = Dispatch.build(routing.weights, routing.selected, top_k)
    rows = x_TD.repeat(top_k, 1)

    def run(backend: str) -> None:
        layer.zero_grad()
        leaf = x_TD.clone().requires_grad_()
        pick_backend(backend, leaf)(leaf, dispatch, layer.experts).sum().backward()

    def dense() -> None:
        leaf = rows.clone().requires_grad_()
        up = layer.experts.up[0].detach().requires_grad_()
        down = layer.experts.down_proj[0].detach().requires_grad_()
        (layer.experts.activate(leaf @ up.T) @ down.T).sum().backward()

    return {"loop": lambda: run("reference"), "grouped": lambda: run("grouped"), "dense GEMMs": dense}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="MoE backends on this machine, forward and backward, SwiGLU, fp32"
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--experts", type=int, nargs="+", default=[4, 8, 16, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the medians here")
    args = parser.parse_args()

    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, fp32, {args.tokens} tokens, dim {args.dim}, ",
        end="",
    )
    print(f"width {args.hidden}, top-{args.top_k}; median ms of {args.rounds} rounds, forward + backward\n")
    print(f"{'experts':>8}{'loop':>10}{'grouped':>10}{'dense GEMMs':>14}{'loop / grouped':>17}")
    results = []
    for num_experts in args.experts:
        torch.manual_seed(0)
        router = GrassmannRouter(
            args.dim, num_experts, max(1, args.dim // num_experts), selection=TopK(args.top_k)
        )
        layer = MoE(args.dim, args.hidden, num_experts, router)
        runs = contenders(layer, torch.randn(args.tokens, args.dim), args.top_k)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run()
        for _ in range(args.rounds):
            for name, run in runs.items():
                times[name].append(milliseconds(run))
        median = {name: statistics.median(values) for name, values in times.items()}
        ratio = statistics.median(a / b for a, b in zip(times["loop"], times["grouped"], strict=True))
        columns = f"{median['loop']:>10.1f}{median['grouped']:>10.1f}{median['dense GEMMs']:>14.1f}"
        print(f"{num_experts:>8}{columns}{ratio:>17.2f}")
        results.append({"experts": num_experts, "median_ms": median, "loop_over_grouped": ratio})
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
