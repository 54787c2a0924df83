"""Claims on the size of a router that follow from shapes: bytes of frames, parameters of the amortiser, bytes sent."""

from __future__ import annotations

from typing import Any

import torch

from grmoe.model.count import meta_model
from grmoe.model.presets import PRESETS, preset
from grmoe.parallel.cost import Plan, traffic
from grmoe.routing.amortizer import AmortizerKind, build_amortizer
from grmoe.studies.judging import with_change
from grmoe.studies.page import Claim, Verdict

PARALLEL = "Section 6.4.5, Expert Parallelism Considerations"
SIZES = ("350m", "1.3b")
HIDDEN = 64  # width of the amortiser, the router's default
LIMIT = 0.005
GPUS = 8


def counted_claims() -> list[Claim]:
    return [_amortizer_claim(), _frames_claim(), _communication_claim()]


def _amortizer_claim() -> Claim:
    inputs, energies = ([amortizer_share(size, kind) for size in SIZES] for kind in ("input", "affinity"))
    verdicts = [Verdict.HOLDS if max(shares) < LIMIT else Verdict.FAILS for shares in (inputs, energies)]
    shown = [" and ".join(f"{100 * share:.2g} %" for share in shares) for shares in (inputs, energies)]
    return Claim(
        "Section 5.2, Amortized Posterior with Learned Uncertainty",
        "The amortisation network adds fewer than 0.5 % parameters to the router",
        f"{shown[0]} if it reads the token, {shown[1]} if it reads the energies (`350m` and `1.3b`)",
        with_change(*verdicts),
        f"With a network that reads the N energies; the paper's reads the token. Two layers, {HIDDEN} wide inside: the "
        f"paper states no width. One on the token stays below the limit with at most {_widest('350m')} and "
        f"{_widest('1.3b')} units inside.",
    )


def amortizer_share(size: str, kind: AmortizerKind, hidden: int = HIDDEN) -> float:
    """Parameters of the network over those of frames and κ, in a preset's router."""
    shape: dict[str, Any] = PRESETS[size]
    dim, experts, rank = (shape[name] for name in ("hidden_size", "num_experts", "router_rank"))
    with torch.device("meta"):
        network = build_amortizer(kind, dim, experts, hidden)
    return sum(p.numel() for p in network.parameters()) / (experts * dim * rank + experts)


def _widest(size: str) -> int:
    """Units inside a network on the token that stays below the limit."""
    return max(width for width in range(1, HIDDEN) if amortizer_share(size, "input", width) < LIMIT)


def _frames_claim() -> Claim:
    size = 16 * 2048 * 64 * 4
    return Claim(
        PARALLEL,
        '"each frame set occupies 16 × 2048 × 64 × 4 bytes ≈ 8.4 MB in float32"',
        f"{size / 1e6:.2f} MB per MoE layer, {12 * size / 1e6:.0f} MB in all 12 of the 1.3B",
        Verdict.HOLDS,
        "Arithmetic.",
    )


def _communication_claim() -> Claim:
    shown = [f"`{size}` {_sent(size)}" for size in SIZES]
    return Claim(
        PARALLEL,
        "The routing computation adds negligible communication overhead",
        f"bytes that a step sends for routers, of all: {', '.join(shown)}",
        Verdict.UNTESTABLE,
        f"On paper, for experts divided among {GPUS} GPUs; it was not run on several GPUs, and the paper states no "
        "number. Frames are on every GPU, so a forward sends none of them. Their gradients are summed once per step.",
    )


def _sent(size: str) -> str:
    found = traffic(meta_model(preset(size)), Plan.on(GPUS, expert=GPUS))
    routers, total = sum(t.sent for t in found if t.what == "routers"), sum(t.sent for t in found)
    return f"{routers / 1e6:.0f} MB of {total / 1e9:.1f} GB ({100 * routers / total:.1f} %)"
