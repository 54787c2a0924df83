"""What a configuration may say: the choices that fields have by name, and the checks of all fields.

Each check raises a `ValueError` that names the field. This file is copied beside every exported model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .parts_grmoe import ROUTERS, Selection, Threshold, TopK, check_curve, checks

if TYPE_CHECKING:  # it imports this file
    from .configuration_grmoe import GrmoeConfig

SELECTIONS = ("topk", "mass", "at_least", "threshold", "dense")
# Routers that choose by themselves, and the most experts a token can then get (None: all of them).
OWN_CHOICE: dict[str, int | None] = {
    "switch": 1, "hash": 1, "expert_choice": None, "soft_moe": None, "grassmann_soft_moe": None,
}  # fmt: skip
SLOT_ROUTERS = ("soft_moe", "grassmann_soft_moe")
# These look at later tokens: a causal model would train on what it must predict.
NOT_CAUSAL = ("expert_choice", *SLOT_ROUTERS)
# Hugging Face names the inner function, `grmoe.MoE` the layer built from it.
ACTIVATIONS: dict[str, Literal["swiglu", "gelu"]] = {"silu": "swiglu", "gelu": "gelu"}
# Larger values are mistakes. Only to list a billion blocks would take minutes.
MAX_BLOCKS, MAX_SIZE = 1000, 2**31 - 1
# Kinds of rotary embedding in transformers, and the options each of them needs.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
# Sizes that follow from others where they are None.
_FOLLOW_OTHERS = (
    "intermediate_size", "moe_intermediate_size", "num_key_value_heads", "head_dim", "router_rank",
    "num_experts_per_tok",
)  # fmt: skip


def check_sizes(config: GrmoeConfig) -> None:
    """Sizes, and the names of router, selection and rotary embedding. The sizes that follow from others may be None."""
    for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
        "moe_every", "num_experts", *_FOLLOW_OTHERS,
    ):  # fmt: skip
        value = getattr(config, name)
        most = MAX_BLOCKS if name == "num_hidden_layers" else MAX_SIZE
        if value is None and name in _FOLLOW_OTHERS:
            continue
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        checks.require(ok, f"{name} must be an integer >= 1, got {value!r}")
        checks.require(value <= most, f"{name} must be at most {most}, got {value}")
    checks.require(config.num_experts >= 2, f"num_experts must be at least 2, got {config.num_experts}")
    for name in ("shared_experts", "identity_experts"):
        value = getattr(config, name)
        checks.require(
            isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIZE,
            f"{name} must be an integer >= 0, got {value!r}",
        )
    checks.require(
        config.router in list(ROUTERS), f"router must be one of {', '.join(ROUTERS)}, got {config.router!r}"
    )
    checks.require(
        config.selection in SELECTIONS,
        f"selection must be one of {', '.join(SELECTIONS)}, got {config.selection!r}",
    )
    _check_rope(config)


def check_fields(config: GrmoeConfig) -> None:
    """Everything but sizes and the budget, in a configuration that is filled in."""
    _check_numbers(config)
    checks.require(
        config.hidden_act in list(ACTIVATIONS),
        f"hidden_act must be 'silu' or 'gelu', got {config.hidden_act!r}",
    )
    heads, groups = config.num_attention_heads, config.num_key_value_heads or 0
    checks.require(
        groups >= 1 and heads % groups == 0,
        f"num_key_value_heads must divide num_attention_heads = {heads}, got {groups}",
    )
    chosen = config.attention_heads_per_token
    checks.require(
        chosen is None or (isinstance(chosen, int) and not isinstance(chosen, bool) and 1 <= chosen <= heads),
        f"attention_heads_per_token must be from 1 to num_attention_heads = {heads}, or None, got {chosen!r}",
    )
    checks.require(
        chosen is None or heads > 1, "attention_heads_per_token needs more than one head to choose from"
    )
    checks.require((config.head_dim or 0) % 2 == 0, f"head_dim must be even for RoPE, got {config.head_dim}")
    found = len(config.moe_layers)
    checks.require(
        found > 0, f"moe_every = {config.moe_every} leaves no MoE layer in {config.num_hidden_layers} blocks"
    )
    for name in ("alpha", "weight_alpha"):
        value = getattr(config, name)
        checks.require(
            not isinstance(value, list) or len(value) == found,
            f"{name} must be one number or one for each of the {found} MoE layers, got {value!r}",
        )
    checks.require(
        isinstance(config.router_options, dict),
        f"router_options must be a dict, got {config.router_options!r}",
    )
    _check_selection(config)
    if config.budget_curve is not None:
        check_curve(config.budget_curve, found, config.gate_experts)


def check_budget(config: GrmoeConfig, budget: float, policy: Selection | None) -> None:
    """policy: of the configuration, without the budget."""
    checks.finite("budget", budget, above=0)
    checks.require(
        policy is not None,
        f"budget must be left out, got {budget:g}: router {config.router!r} selects its experts by itself",
    )
    plain = isinstance(policy, TopK) and budget == policy.k
    checks.require(
        config.budget_curve is not None or plain,
        f"budget {budget:g} is not calibrated: this model has no budget_curve. "
        "Run `grmoe dial` first; with --write it saves a model that has one",
    )


def _check_numbers(config: GrmoeConfig) -> None:
    checks.finite("rms_norm_eps", config.rms_norm_eps, above=0)
    checks.finite("initializer_range", config.initializer_range, at_least=0)
    checks.finite("router_aux_loss_coef", config.router_aux_loss_coef, at_least=0)
    checks.finite("residual_loss_coef", config.residual_loss_coef, at_least=0)
    if config.router_kappa is not None:
        checks.finite("router_kappa", config.router_kappa, above=0)
    if config.trained_length is not None:
        checks.positive_int("trained_length", config.trained_length)
    checks.finite("attention_dropout", config.attention_dropout, at_least=0)
    checks.require(
        config.attention_dropout < 1, f"attention_dropout must be below 1, got {config.attention_dropout!r}"
    )


def _check_rope(config: GrmoeConfig) -> None:
    options = config.rope_parameters
    if options is None:
        return
    checks.require(isinstance(options, dict), f"rope_parameters must be a dict, got {options!r}")
    kind = options.get("rope_type", options.get("type", "default"))
    checks.one_of("rope_parameters.rope_type", kind, tuple(ROPE_TYPES))
    missing = [name for name in ROPE_TYPES[kind] if options.get(name) is None]
    checks.require(not missing, f"rope_parameters must have {', '.join(missing)} with rope_type {kind!r}")
    for name, value in options.items():
        place = f"rope_parameters.{name}"
        if name in ("short_factor", "long_factor"):  # one number per frequency
            half = (config.head_dim or config.hidden_size // config.num_attention_heads) // 2
            right = isinstance(value, list) and len(value) == half
            checks.require(right, f"{place} must be a list of {half} numbers, got {value!r}")
        if name not in ("rope_type", "type") and value is not None and not isinstance(value, bool):
            for number in value if isinstance(value, list) else [value]:
                checks.finite(place, number, above=0)


def _check_selection(config: GrmoeConfig) -> None:
    N, K = config.num_experts, config.num_experts_per_tok or 0
    checks.require(
        not config.identity_experts or config.router not in OWN_CHOICE,
        f"identity_experts must be 0 with router {config.router!r}, which chooses by itself, "
        f"got {config.identity_experts}",
    )
    checks.require(K <= N, f"num_experts_per_tok must be at most num_experts = {N}, got {K}")
    implied = implied_experts(config)
    why = f"router {config.router!r}" if config.router in OWN_CHOICE else f"selection {config.selection!r}"
    checks.require(
        implied is None or implied == K, f"num_experts_per_tok must be {implied} with {why}, got {K}"
    )
    rank = config.router_rank or 0
    frames = config.router == "grassmann" or config.attention_heads_per_token is not None
    checks.require(
        not frames or rank <= config.hidden_size,
        f"router_rank must be at most hidden_size = {config.hidden_size}, got {rank}",
    )


def implied_experts(config: GrmoeConfig) -> int | None:
    """K where router or selection fixes it: a router that chooses by itself, a dense gate, a threshold."""
    if config.router in OWN_CHOICE:
        return OWN_CHOICE[config.router] or config.num_experts
    if config.selection == "dense":
        return config.num_experts
    if config.selection == "threshold" and config.selection_tau is not None:
        return Threshold(config.selection_tau).max_experts(config.num_experts)
    return None
