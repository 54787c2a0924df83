"""Memory, communication and time of a training step as a table: what `grmoe info PRESET --gpus` prints."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.table import Table

from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.model.count import count, meta_model
from grmoe.parallel.cost import Plan, Traffic, traffic
from grmoe.parallel.memory import memory


@dataclass(frozen=True)
class Machine:
    """What times are reckoned with; assumptions, not measurements. Bytes a second are a GPU's, in one direction."""

    node: int = 8  # GPUs with NVLink between them
    nvlink: float = 450e9  # H100, H200
    network: float = 50e9  # one 400 Gb/s card for each GPU
    flops: float = 400e12  # that a GPU achieves: 40 % of what an H100 could
    # From one process to the next, within a node and between nodes: what NCCL's own planner reckons with for rings
    # (src/graph/tuning.cc, protocol Simple).
    hop: float = 3.4e-6
    network_hop: float = 14e-6


def seconds(t: Traffic, machine: Machine) -> float:
    """How long the collectives of one kind take if nothing else is sent: bytes over bandwidth, and hops.

    A group has m members in a node, on k nodes. Rings enter and leave a node once, and NCCL lays one through each
    network card: between nodes min(NVLink, m · network), within one NVLink. An all-to-all has no ring: what goes to
    other nodes takes a GPU's own card. Hops of one call:
        all-gather, reduce-scatter   n − k within nodes, k − 1 between them
        all-reduce                   a tree and back: 2(m − 1) within, 2⌈log₂ k⌉ between
        all-to-all                   one
    """
    m = max(1, min(t.n, machine.node // t.stride))
    k = math.ceil(t.n / m)
    if t.op == "all-to-all":
        across = t.given * (t.n - m) / t.n
        time = max(across / machine.network, (t.sent - across) / machine.nvlink)
        hops = machine.network_hop if k > 1 else machine.hop
    else:
        time = t.sent / (min(machine.nvlink, m * machine.network) if k > 1 else machine.nvlink)
        inside, between = (
            (2 * (m - 1), 2 * math.ceil(math.log2(k))) if t.op == "all-reduce" else (t.n - k, k - 1)
        )
        hops = inside * machine.hop + between * machine.network_hop
    return time + t.calls * hops


@dataclass(frozen=True)
class Times:
    """Seconds of a step."""

    compute: float
    hidden: float  # FSDP's collectives, one after the other
    exposed: float  # collectives that the computation waits for

    @property
    def step(self) -> float:
        """At best: FSDP's collectives entirely beside the computation."""
        return max(self.compute, self.hidden) + self.exposed

    @property
    def limit(self) -> str:
        parts = {"computation": self.compute, "weights and gradients": self.hidden}
        parts["rows and routers"] = self.exposed
        return max(parts, key=lambda name: parts[name])


def times(config: GrmoeConfig, plan: Plan, machine: Machine) -> Times:
    """Products at the machine's rate, a third more of them where the forward runs twice; collectives by `seconds`."""
    flops = plan.tokens * count(config, plan.length).train_flops * (4 / 3 if plan.checkpointing else 1)
    found = traffic(meta_model(config), plan)
    hidden, exposed = (sum(seconds(t, machine) for t in found if t.hidden is kind) for kind in (True, False))
    return Times(flops / machine.flops, hidden, exposed)


def rows(config: GrmoeConfig, plan: Plan, machine: Machine) -> list[list[tuple[str, str, str]]]:
    """(what, how much, how) in sections: memory, communication, time."""
    model = meta_model(config)
    held, sent = memory(model, plan), traffic(model, plan)
    each = {
        "weights": "fp32 shards",
        "gradients": "fp32 shards",
        "moments": "fp32 shards, two of AdamW",
        "routers": "whole: weights, gradients, moments, workspace",
        "gathered": "estimate: root, a block and the next, their gradients",
        "activations": "estimate" + (", checkpointed" if plan.checkpointing else ""),
        "logits": "estimate: of 16384 tokens at a time, and the output matrix's gradient",
    }
    first = [(name, _bytes(getattr(held, name)), how) for name, how in each.items()]
    first += [
        ("in all", _bytes(held.total), ""),
        (
            "at the start",
            _bytes(held.start),
            "while it is built: shards, routers, the embedding and a block in fp32",
        ),
    ]
    second = [
        (
            f"sent: {t.what}",
            _bytes(t.sent),
            f"{t.op} among {t.n}, {t.calls} × {_bytes(t.given / t.calls)}: {_time(seconds(t, machine))}",
        )
        for t in sent
    ]
    second.append(("sent in all", _bytes(sum(t.sent for t in sent)), ""))
    time = times(config, plan, machine)
    third = [
        ("computation", _time(time.compute), f"at {machine.flops / 1e12:.0f} TFLOP/s"),
        ("weights and gradients", _time(time.hidden), "beside it"),
        ("rows and routers", _time(time.exposed), "between"),
        (
            "a step at best",
            _time(time.step),
            f"{plan.processes * plan.tokens / time.step / 1e6:.3g} M tokens/s",
        ),
        ("longest", time.limit, ""),
    ]
    return [first, second, third]


def describe_step(name: str, config: GrmoeConfig, plan: Plan, machine: Machine) -> Table:
    """The table `grmoe info` prints under the model's own."""
    mesh = f"replicate {plan.replicate} × fsdp {plan.fsdp} × expert {plan.expert}"
    batch = f"{plan.sequences} × {plan.length:,} tokens a GPU"
    if plan.micro_batches > 1:
        batch += f" in {plan.micro_batches} parts"
    title = f"{name} on {plan.processes} GPUs: {mesh}; {batch}; {'bf16' if plan.bf16 else 'fp32'}"
    table = Table(title=title, title_justify="left")
    table.add_column("a GPU, in a step", style="bold")
    table.add_column(justify="right")
    table.add_column()
    for section in rows(config, plan, machine):
        for row in section:
            table.add_row(*row)
        table.add_section()
    return table


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 100 * size else f"{value / size:.0f} {unit}"
    return f"{value:.0f} B"


def _time(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.0f} µs"
