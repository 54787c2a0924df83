"""The router of a MoE layer, as a configuration describes it.

This file is copied beside every exported model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .choices_grmoe import SLOT_ROUTERS
from .configuration_grmoe import GrmoeConfig
from .parts_grmoe import AtLeast, Dense, Mass, Router, Selection, Threshold, TopK, build_router


def config_router(config: GrmoeConfig, number: int) -> Router:
    """The router of MoE layer `number`, counted from zero; in fp32 whatever the default dtype is."""
    options = dict(config.router_options or {})
    _check_options(config, options)
    if config.router == "hash":
        options["seed"] = _layer_seed(options.get("seed", 0), number, len(config.moe_layers))
    if config.router in SLOT_ROUTERS and "slots" not in options:
        options.setdefault("max_tokens", config.max_position_embeddings)
    if config.router == "grassmann":
        options["rank"] = config.router_rank
    if config.router_kappa is not None:
        options["kappa"] = config.router_kappa
    if config.identity_experts:
        options["identity"] = config.identity_experts
    selection, numbers = config_policy(config), config.numbers[number]
    if selection is not None:
        options["selection"] = selection
    try:
        router = build_router(
            config.router, config.hidden_size, config.gate_experts, alpha=numbers.alpha, **options
        )
    except TypeError as error:
        raise ValueError(f"router_options must fit the router {config.router!r}: {error}") from error
    # α is stored in the configuration alone, because `from_pretrained(dir, alpha=2)` must have one answer.
    router.register_buffer("alpha_value", router.alpha_value, persistent=False)
    router.budget.layer = number
    router.budget.biased = config.biased
    if selection is not None:
        router.budget.set_numbers(numbers.tau, numbers.cap, numbers.bias)
    router.budget.set_weight_alpha(config.weight_alphas[number])
    # A router's constructor fills it, except on the meta device.
    for module in router.modules():
        module._is_hf_initialized = not router.log_prior.is_meta  # type: ignore[assignment]
    return router


def config_policy(config: GrmoeConfig) -> Selection | None:
    """The routers' selection policy, of the classes that this file knows: transformers loads the code beside a model
    twice, once for the configuration, so that its classes are not ours."""
    policy = config.router_policy(config.budget)
    if policy is None:
        return None
    own = next(
        kind for kind in (TopK, Mass, AtLeast, Threshold, Dense) if kind.__name__ == type(policy).__name__
    )
    return own(**vars(policy))


def _check_options(config: GrmoeConfig, options: Mapping[str, Any]) -> None:
    """Raise for options that the configuration sets under another name: they would have no effect."""
    named = {
        "alpha": "alpha", "identity": "identity_experts", "rank": "router_rank", "selection": "selection",
        "top_k": "num_experts_per_tok",
    }  # fmt: skip
    if config.router_kappa is not None:
        named["kappa"] = "router_kappa"
    for option in options:
        if option in named and options[option] != getattr(config, named[option]):
            raise ValueError(f"router_options.{option} has no effect: set {named[option]}")


def _layer_seed(seed: Any, number: int, layers: int) -> Any:
    """Hash routing: one seed per MoE layer. With a common seed every layer would group the tokens in the same way."""
    if not isinstance(seed, list | tuple):
        return seed + number if isinstance(seed, int) else seed  # the router refuses what is not a number
    if len(seed) != layers:
        wanted = f"one number or {layers}, one per MoE layer"
        raise ValueError(f"router_options.seed must be {wanted}, got {seed!r}")
    return seed[number]
