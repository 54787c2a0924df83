"""A setting of the dial: α of each layer, and the rule that selects experts. Parameters are not part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grmoe import checks
from grmoe.model import GrmoeForCausalLM
from grmoe.model.configuration_grmoe import OWN_CHOICE, GrmoeConfig


@dataclass(frozen=True)
class Setting:
    """α of each MoE layer, and one selection rule for all layers.

    Rule "mass" with (τ, cap): the fewest experts that reach probability τ, at most `cap`. A larger α makes the gate
    sharper, so fewer experts reach τ. α also sets the weights of the selected experts.
    """

    alphas: tuple[float, ...]
    selection: str
    tau: float | None
    cap: int

    @property
    def fields(self) -> dict[str, Any]:
        """The same in the words of config.json."""
        return {
            "alpha": self.alphas[0] if self.uniform else list(self.alphas),
            "selection": self.selection,
            "selection_tau": self.tau,
            "num_experts_per_tok": self.cap,
        }

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same α."""
        return len(set(self.alphas)) == 1

    def __str__(self) -> str:
        numbers = ", ".join(f"{a:.3g}" for a in self.alphas)
        alpha = f"{self.alphas[0]:.3g}" if self.uniform else f"[{numbers}]"
        if self.selection == "topk":
            return f"α {alpha}, top-{self.cap}"
        if self.tau is None:
            return f"α {alpha}, {self.selection}"
        return f"α {alpha}, {self.selection} {self.tau:.3g}, cap {self.cap}"


def mass(alphas: tuple[float, ...], tau: float, cap: int) -> Setting:
    """A mass setting, rounded to four digits: what is measured is exactly what config.json will say."""
    return Setting(tuple(_rounded(a) for a in alphas), "mass", _rounded(tau), cap)


def top_k(alphas: tuple[float, ...], k: int) -> Setting:
    """The k most probable experts."""
    return Setting(alphas, "topk", None, k)


def current(config: GrmoeConfig) -> Setting:
    """The setting of a configuration without its budget: as it was trained, or as `apply` left it."""
    assert config.num_experts_per_tok is not None  # filled in by the configuration itself
    tau = config.selection_tau if config.selection in ("mass", "threshold") else None
    return Setting(tuple(config.alphas), config.selection, tau, config.num_experts_per_tok)


def apply(model: GrmoeForCausalLM, setting: Setting) -> None:
    """Put a setting into a model and its configuration, or raise and change nothing. Ends a budget."""
    config = model.config
    check_router(config)
    found, given = len(config.moe_layers), len(setting.alphas)
    checks.require(given == found, f"alphas must be one for each of the {found} MoE layers, got {given}")
    before, budget = current(config), config.budget
    try:
        _write(config, setting)
        config.check()
    except ValueError:
        _write(config, before)
        config.budget = budget
        raise
    model.set_budget(None)


def check_router(config: GrmoeConfig) -> None:
    """Refuse a router that has no selection rule to set."""
    checks.require(
        config.router not in OWN_CHOICE,
        f"router {config.router!r} selects its experts by itself: it has no dial to set",
    )


def _write(config: GrmoeConfig, setting: Setting) -> None:
    for name, value in setting.fields.items():
        setattr(config, name, value)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
