"""A setting of the dial: which experts a token gets, and with what weights. No parameter is part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grmoe import checks
from grmoe.model import GrmoeForCausalLM
from grmoe.model.configuration_grmoe import OWN_CHOICE, GrmoeConfig
from grmoe.routing import routers


@dataclass(frozen=True)
class Setting:
    """α of each MoE layer, and one selection for all of them.

    selection "mass" with (τ, cap): the fewest experts that reach probability τ, at most `cap`. As α grows a gate needs
    fewer experts for the same τ: α and τ together set experts per token, α alone the weights of those that are kept.
    """

    alphas: tuple[float, ...]
    selection: str
    tau: float | None
    cap: int

    @property
    def fields(self) -> dict[str, Any]:
        """The same in the words of `GrmoeConfig`."""
        uniform = len(set(self.alphas)) == 1
        return {
            "alpha": self.alphas[0] if uniform else list(self.alphas),
            "selection": self.selection,
            "selection_tau": self.tau,
            "num_experts_per_tok": self.cap,
        }

    def __str__(self) -> str:
        how = {"topk": f"top-{self.cap}", "dense": "dense"}.get(
            self.selection, f"{self.selection} {self.tau:.3g}, cap {self.cap}" if self.tau else self.selection
        )
        return f"α {show_alphas(self.alphas)}, {how}"


def show_alphas(alphas: tuple[float, ...]) -> str:
    return " ".join(f"{a:.3g}" for a in (alphas[:1] if len(set(alphas)) == 1 else alphas))


def mass(alphas: tuple[float, ...], tau: float, cap: int) -> Setting:
    """A mass setting in numbers a person can read: what is measured is what a configuration says."""
    return Setting(tuple(_readable(a) for a in alphas), "mass", _readable(tau), cap)


def top_k(alphas: tuple[float, ...], k: int) -> Setting:
    return Setting(alphas, "topk", None, k)


def current(config: GrmoeConfig) -> Setting:
    """What a configuration says now."""
    assert config.num_experts_per_tok is not None  # resolved by the configuration itself
    tau = config.selection_tau if config.selection in ("mass", "threshold") else None
    return Setting(tuple(config.alphas), config.selection, tau, config.num_experts_per_tok)


def apply(model: GrmoeForCausalLM, setting: Setting) -> None:
    """Put a setting into a model and its configuration, or raise and change nothing."""
    config = model.config
    checks.require(
        config.router not in OWN_CHOICE,
        f"router {config.router!r} chooses its experts by itself: it has no selection to set",
    )
    found, given = len(config.moe_layers), len(setting.alphas)
    checks.require(given == found, f"alphas must be one for each of the {found} MoE layers, got {given}")
    before = current(config)
    try:
        _write(config, setting)
        config.check()
        policy = config.selection_policy()
    except ValueError:
        _write(config, before)
        raise
    assert policy is not None
    for router in routers(model):
        router.selection = policy
    model.set_alpha(setting.fields["alpha"])


def _write(config: GrmoeConfig, setting: Setting) -> None:
    for name, value in setting.fields.items():
        setattr(config, name, value)


def _readable(value: float) -> float:
    return float(f"{value:.4g}")
