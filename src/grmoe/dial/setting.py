"""A setting of the dial: α of each layer, and the rule that selects experts. Parameters are not part of it.

Some rules have no field of their own in config.json: a cap per layer, and a bias for the choice of experts. They are a
budget, on a curve of one point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grmoe import checks
from grmoe.model import GrmoeForCausalLM
from grmoe.model.choices_grmoe import OWN_CHOICE
from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.routing.curve import NO_WEIGHT

_RULE = ("budget_curve",)
_LARGEST_MASS = 0.9999999  # below 1 in fp32 too


@dataclass(frozen=True)
class Setting:
    """α of each MoE layer, and one selection rule for all layers.

    Rule "at_least" with (τ, cap): the most probable expert and those with a weight of at least τ, at most `cap`.
    Rule "mass" with (τ, cap): the fewest experts that reach probability τ, at most `cap`. A larger α makes the gate
    sharper, so fewer experts reach τ. α also sets the weights of the selected experts.

    caps: with rule "topk", the number of experts of each layer, where layers differ. `cap` is the largest.
    norms: mean output norm of each expert in each layer. Experts are then chosen by gate × norm.
    level: bias of each expert in each layer that evens out the load (`grmoe.dial.level`).
    """

    alphas: tuple[float, ...]
    selection: str
    tau: float | None
    cap: int
    caps: tuple[int, ...] | None = None
    norms: tuple[tuple[float, ...], ...] | None = None
    level: tuple[tuple[float, ...], ...] | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The same in the words of config.json, where a point of `budget_curve` has the caps of layers.

        rank, load: only said. The bias itself is in `point`.
        """
        return {
            "alpha": self.alphas[0] if self.uniform else list(self.alphas),
            "selection": self.selection,
            "selection_tau": self.tau,
            "num_experts_per_tok": self.cap,
            **({"cap": list(self.caps)} if self.caps else {}),
            **({"rank": "gate × norm"} if self.norms else {}),
            **({"load": "even"} if self.level else {}),
        }

    @property
    def point(self) -> dict[str, Any]:
        """As a point of the curve of budgets, without its number of experts. Not for a threshold."""
        rule = {"weight": self.tau} if self.selection == "at_least" else {"tau": self.tau or 1.0}
        cap = list(self.caps) if self.caps else self.cap
        biased = {} if self.bias is None else {"bias": self.bias}
        return {**rule, "alpha": self.fields["alpha"], "cap": cap, **biased}

    @property
    def bias(self) -> list[list[float]] | None:
        """Of the choice, for each layer and expert: log n of the norms, and what evens out the load."""
        if self.norms is None and self.level is None:
            return None
        shape = self.norms or self.level or ()
        norms = self.norms or [[1.0] * len(layer) for layer in shape]
        level = self.level or [[0.0] * len(layer) for layer in shape]
        return [
            [round(math.log(n) + b, 4) for n, b in zip(*pair, strict=True)]
            for pair in zip(norms, level, strict=True)
        ]

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same α."""
        return len(set(self.alphas)) == 1

    def __str__(self) -> str:
        numbers = ", ".join(f"{a:.3g}" for a in self.alphas)
        alpha = f"{self.alphas[0]:.3g}" if self.uniform else f"[{numbers}]"
        by = (", by gate × norm" if self.norms else "") + (", even load" if self.level else "")
        if self.caps is not None:
            return f"α {alpha}, top-[{', '.join(map(str, self.caps))}]{by}"
        if self.selection == "topk":
            return f"α {alpha}, top-{self.cap}{by}"
        if self.tau is None:
            return f"α {alpha}, {self.selection}"
        if self.selection == "at_least":
            return f"α {alpha}, weight ≥ {self.tau:.3g}, cap {self.cap}{by}"
        return f"α {alpha}, {self.selection} {self.tau:.3g}, cap {self.cap}{by}"


Norms = tuple[tuple[float, ...], ...]


def mass(alphas: tuple[float, ...], tau: float, cap: int, norms: Norms | None = None) -> Setting:
    """A mass setting, rounded to four digits: what is measured is exactly what config.json will say.

    A curve reads τ = 1 as "the cap alone decides". So τ stays below, also where gates are so sharp that it rounds to 1.
    """
    rounded = _rounded(tau)
    rounded = rounded if rounded < 1 else min(round(tau, 7), _LARGEST_MASS)
    return Setting(rounded_alphas(alphas), "mass", rounded, cap, norms=norms)


def at_least(alphas: tuple[float, ...], weight: float, cap: int, norms: Norms | None = None) -> Setting:
    """The most probable expert and those with at least this weight, rounded as in `mass`."""
    return Setting(rounded_alphas(alphas), "at_least", rounded_weight(weight), cap, norms=norms)


def top_k(alphas: tuple[float, ...], k: int, norms: Norms | None = None) -> Setting:
    """The k most probable experts, or those with the largest gate × norm."""
    return Setting(alphas, "topk", None, k, norms=norms)


def k_per_layer(alphas: tuple[float, ...], caps: Sequence[int]) -> Setting:
    """Top-k with another k in each layer."""
    if len(set(caps)) == 1:
        return top_k(alphas, caps[0])
    return Setting(alphas, "topk", None, max(caps), caps=tuple(caps))


def current(config: GrmoeConfig) -> Setting:
    """The setting of a configuration without its budget: as it was trained, or as `apply` left it."""
    assert config.num_experts_per_tok is not None  # filled in by the configuration itself
    tau = config.selection_tau if config.selection in ("mass", "at_least", "threshold") else None
    return Setting(tuple(config.alphas), config.selection, tau, config.num_experts_per_tok)


def apply(model: GrmoeForCausalLM, setting: Setting) -> None:
    """Put a setting into a model and its configuration, or raise and change nothing. Ends a budget.

    A cap per layer and a bias replace the curve of budgets by one point. The next setting removes that.
    """
    config = model.config
    check_router(config)
    found, given = len(config.moe_layers), len(setting.alphas)
    checks.require(given == found, f"alphas must be one for each of the {found} MoE layers, got {given}")
    before = {name: getattr(config, name) for name in (*current(config).fields, *_RULE, "budget")}
    try:
        _write(config, setting)
        config.check()
    except ValueError:
        for name, value in before.items():
            setattr(config, name, value)
        raise
    model.set_budget(config.budget)


def check_router(config: GrmoeConfig) -> None:
    """Refuse a router that has no selection rule to set."""
    checks.require(
        config.router not in OWN_CHOICE,
        f"router {config.router!r} selects its experts by itself: it has no dial to set",
    )


def _write(config: GrmoeConfig, setting: Setting) -> None:
    if setting.caps is None and setting.bias is None:
        if len(config.budget_curve or ()) == 1:  # no calibration: an earlier setting left it
            config.budget_curve = None
        for name, value in setting.fields.items():
            setattr(config, name, value)
        config.budget = None
        return
    count = float(setting.cap)  # any number, because the curve has one point
    config.budget_curve = [{"experts_per_token": count, **setting.point}]
    config.budget = count


def rounded_alphas(alphas: tuple[float, ...]) -> tuple[float, ...]:
    """As settings have them."""
    return tuple(_rounded(a) for a in alphas)


def rounded_weight(value: float) -> float:
    """Four digits, and more than the weight that a curve reads as "the cap alone decides"."""
    return max(_rounded(value), 2 * NO_WEIGHT)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
