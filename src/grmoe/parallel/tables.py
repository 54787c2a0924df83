"""Memory, communication and time of a training step: the table of `grmoe info PRESET --gpus N`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.model.count import count, meta_model
from grmoe.parallel.cost import Plan, Traffic, traffic
from grmoe.parallel.memory import memory
from grmoe.tables import Table


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The rates behind the times: assumptions, not measurements. Bandwidths are per GPU, in one direction.

    The latencies are those of NCCL's own planner for rings (src/graph/tuning.cc, protocol Simple).
    """

    node: int = 8
    """GPUs connected by NVLink."""
    nvlink: float = 450e9
    """Bytes per second within a node: H100, H200."""
    network: float = 50e9
    """Bytes per second between nodes: one 400 Gb/s card per GPU."""
    flops: float = 400e12
    """FLOP/s that a GPU achieves: 40 % of an H100's peak."""
    hop: float = 3.4e-6
    """Seconds from one process to the next within a node."""
    network_hop: float = 14e-6
    """Seconds from one process to the next between nodes."""


def seconds(t: Traffic, machine: Machine) -> float:
    """Time of the collectives of one kind if nothing else is sent: bytes / bandwidth + hops · latency.

    A group of n processes has m members per node on k nodes. A ring enters and leaves each node once, and NCCL runs
    one ring through each network card. Its bandwidth is NVLink's within a node, min(NVLink, m · network) across nodes.
    An all-to-all has no ring: bytes for other nodes go through the GPU's own card. Hops per call:
        all-gather, reduce-scatter   n − k within nodes, k − 1 between them
        all-reduce                   up and down a tree: 2(m − 1) within, 2⌈log₂ k⌉ between
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
    """Seconds per step."""

    compute: float
    hidden: float  # FSDP's collectives, one after the other
    exposed: float  # collectives that the computation waits for

    @property
    def step(self) -> float:
        """At best: FSDP's collectives overlap the computation completely."""
        return max(self.compute, self.hidden) + self.exposed

    @property
    def limit(self) -> str:
        parts = {"computation": self.compute, "weights and gradients": self.hidden}
        parts["rows and routers"] = self.exposed
        return max(parts, key=lambda name: parts[name])


def times(config: GrmoeConfig, plan: Plan, machine: Machine) -> Times:
    """Matrix products at the machine's rate (a third more if the forward runs twice), collectives by `seconds`."""
    flops = plan.tokens * count(config, plan.length).train_flops * (4 / 3 if plan.checkpointing else 1)
    found = traffic(meta_model(config), plan)
    hidden, exposed = (sum(seconds(t, machine) for t in found if t.hidden is kind) for kind in (True, False))
    return Times(flops / machine.flops, hidden, exposed)


def rows(config: GrmoeConfig, plan: Plan, machine: Machine) -> list[list[tuple[str, str, str]]]:
    """(what, amount, note) in three sections: memory, communication, time."""
    model = meta_model(config)
    held, sent = memory(model, plan), traffic(model, plan)
    each = {
        "weights": "fp32 shards",
        "gradients": "fp32 shards",
        "moments": "fp32 shards, two per weight (AdamW)",
        "routers": "not sharded: weights, gradients, moments, workspace",
        "gathered": "estimate: the root, two blocks, their gradients",
        "activations": "estimate" + (", checkpointed" if plan.checkpointing else ""),
        "logits": "estimate: 16384 tokens at a time, and the gradient of the output matrix",
    }
    first = [(name, _bytes(getattr(held, name)), how) for name, how in each.items()]
    built = "while the model is built: shards, routers, the embedding and one block in fp32"
    first += [("total", _bytes(held.total), ""), ("at the start", _bytes(held.start), built)]
    second = []
    for t in sent:
        how = f"{t.op} among {t.n}, {t.calls} × {_bytes(t.given / t.calls)}: {_time(seconds(t, machine))}"
        second.append((f"sent: {t.what}", _bytes(t.sent), how))
    second.append(("sent in total", _bytes(sum(t.sent for t in sent)), ""))
    time = times(config, plan, machine)
    rate = f"{plan.processes * plan.tokens / time.step / 1e6:.3g} M tokens/s"
    third = [
        ("computation", _time(time.compute), f"at {machine.flops / 1e12:.0f} TFLOP/s"),
        ("weights and gradients", _time(time.hidden), "overlaps the computation"),
        ("rows and routers", _time(time.exposed), "the computation waits"),
        ("step at best", _time(time.step), rate),
        ("bottleneck", time.limit, ""),
    ]
    return [first, second, third]


def describe_step(name: str, config: GrmoeConfig, plan: Plan, machine: Machine) -> Table:
    """The table that `grmoe info --gpus` prints below the model's own."""
    mesh = f"replicate {plan.replicate} × fsdp {plan.fsdp} × expert {plan.expert}"
    batch = f"{plan.sequences} × {plan.length:,} tokens per GPU"
    if plan.micro_batches > 1:
        batch += f" in {plan.micro_batches} parts"
    title = f"{name} on {plan.processes} GPUs: {mesh}; {batch}; {'bf16' if plan.bf16 else 'fp32'}"
    table = Table(title, ["per GPU and step", "", ""], notes=True)
    for section in rows(config, plan, machine):
        for row in section:
            table.add(*row)
        table.end_section()
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
