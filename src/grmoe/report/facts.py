"""The numbers in a page's summary and its curves, from a model's configuration and its log."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from grmoe.data import TokenDataset, unigram_perplexity
from grmoe.model.choices_grmoe import OWN_CHOICE
from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.model.count import count
from grmoe.runs.folder import ENVIRONMENT, load_keys, read_log, saved_config
from grmoe.runs.open import LoadedModel

MAX_STEPS = 400  # of a curve: more are closer together than pixels
VALIDATION = (
    "step", "loss", "perplexity", "domains", "entropy", "load_cv", "min_load", "experts_per_token", "max_overlap",
)  # fmt: skip

Line = dict[str, Any]


def model_facts(loaded: LoadedModel) -> dict[str, Any]:
    config: GrmoeConfig = loaded.model.config
    cost = count(config)
    return {
        "router": config.router,
        "rank": config.router_rank if config.router == "grassmann" else None,
        "blocks": config.num_hidden_layers,
        "width": config.hidden_size,
        "moe_layers": list(config.moe_layers),
        "experts": config.num_experts,
        "identity_experts": config.identity_experts,
        "expert_width": config.moe_intermediate_size,
        "shared_experts": config.shared_experts,
        "total": cost.total,
        "active": cost.active,
        "alphas": [numbers.alpha for numbers in config.numbers],
        "budget": config.budget,
        "curve": config.budget_curve,
        "dial": config.router not in OWN_CHOICE,
        "selection": _selection(config),
        "step": loaded.step,
    }


def _selection(config: GrmoeConfig) -> dict[str, Any]:
    """How experts are selected, in the form of the page's controls.

    "own": by a rule that looks at all tokens, such as Expert Choice. Gates alone do not tell which experts compute.
    """
    if config.budget is not None:
        taus, _, caps, _ = zip(*config.numbers, strict=True)
        tau = fmean(taus)
        kind = "at_least" if tau < 0 else "mass"
        return {"kind": kind, "tau": min(1.0, abs(tau)), "k": max(caps)}
    kind, k = config.selection, config.num_experts_per_tok
    if config.router in OWN_CHOICE:
        kind = "topk" if OWN_CHOICE[config.router] else "own"
    return {"kind": kind, "tau": config.selection_tau, "k": k}


def training_facts(folder: Path, loaded: LoadedModel | None) -> dict[str, Any]:
    """How a run was trained, and its last validation up to the checkpoint that is shown."""
    config, lines = saved_config(folder), read_log(folder)
    reached = loaded.step if loaded is not None and loaded.step is not None else config.steps
    trained = [line for line in lines if line["kind"] == "train"]
    validated = [line for line in lines if line["kind"] == "validation" and line["step"] <= reached]
    speeds = sorted(line["tokens_per_second"] for line in trained if line.get("tokens_per_second"))
    last = trained[-1] if trained else {}
    batch = last["tokens"] / last["step"] if trained else None
    data = None if loaded is None else loaded.data
    return {
        "preset": config.model.get("preset"),
        "steps": config.steps,
        "logged": last.get("step"),
        "tokens": round(batch * reached) if batch and loaded is not None else last.get("tokens"),
        "text": config.data.path,
        "device": _device(folder),
        "tokens_per_second": speeds[len(speeds) // 2] if speeds else None,
        "validation": {key: validated[-1].get(key) for key in VALIDATION} if validated else None,
        "unigram": None if data is None or not data.tokens else unigram_perplexity(data),
        "data": None if loaded is None or loaded.checkpoint is None else loaded.checkpoint.meta["data"],
        "bits_per_byte": bits_per_byte(validated[-1]["domains"], data) if validated and data else None,
    }


def bits_per_byte(losses: dict[str, float], data: TokenDataset) -> float | None:
    """Σ loss · tokens / (bytes · ln 2) over the domains of the validation split. None without bytes or losses.

    Runs on different data have different tokens, so their losses per token cannot be compared. Bits per byte can.
    """
    domains = data.index["splits"][data.split]["domains"]
    known = {name: loss for name, loss in losses.items() if loss is not None and name in domains}
    size = sum(domains[name]["bytes"] for name in known)
    nats = sum(loss * domains[name]["tokens"] for name, loss in known.items())
    return nats / (size * math.log(2)) if size and math.isfinite(nats) else None


def _device(folder: Path) -> str | None:
    try:
        device: str = json.loads((folder / ENVIRONMENT).read_text())["device"]
    except (OSError, ValueError, KeyError):
        return None
    return device


def curves(folder: Path) -> dict[str, Any] | None:
    """Series over logged steps. [mean, smallest, largest] over layers where layers differ. None without a log."""
    lines = read_log(folder)
    train = [line for line in lines if line["kind"] == "train"]
    if not train:
        return None
    held_out = [line for line in lines if line["kind"] == "validation"]
    train = [*train[:: -(-len(train) // MAX_STEPS)], *train[-1:]]
    train = list({line["step"]: line for line in train}.values())
    key, cv = load_keys(train[-1])
    loads = [[share for layer in line["layers"] for share in layer[key]] for line in train]
    return {
        "steps": [line["step"] for line in train],
        "loss": [line["loss"] for line in train],
        "load_cv": _over_layers(train, cv),
        "entropy": _over_layers(train, "entropy"),
        "load": [[min(shares), max(shares)] for shares in loads],
        "fair": fmean(loads[-1]),
        "validation": {
            "steps": [line["step"] for line in held_out],
            "loss": [line["loss"] for line in held_out],
        },
    }


def _over_layers(train: list[Line], key: str) -> list[list[float]]:
    layers = [[layer[key] for layer in line["layers"]] for line in train]
    return [[line[key], min(values), max(values)] for line, values in zip(train, layers, strict=True)]
