"""What a GrMoE language model is made of, as the JSON next to its weights says it."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from transformers import PreTrainedConfig

try:
    from grmoe.routing import ROUTERS, Dense, Mass, Selection, Threshold, TopK
except ImportError:  # this file travels with exported models to where grmoe is not installed
    from .grmoe_routing import (  # type: ignore[import-not-found, no-redef]
        ROUTERS,
        Dense,
        Mass,
        Selection,
        Threshold,
        TopK,
    )

SELECTIONS = ("topk", "mass", "threshold", "dense")
# Routers that choose by themselves, and the experts a token can then get (None: all of them).
OWN_CHOICE: dict[str, int | None] = {"switch": 1, "hash": 1, "expert_choice": None, "soft_moe": None}
# These look at later tokens: a causal model would train on what it has to predict.
NOT_CAUSAL = ("expert_choice", "soft_moe")
# Hugging Face names the inner function, we name the layer it makes.
ACTIVATIONS: dict[str, Literal["swiglu", "gelu"]] = {"silu": "swiglu", "gelu": "gelu"}


class GrmoeConfig(PreTrainedConfig):
    """Configuration of `GrmoeModel` and `GrmoeForCausalLM`.

    hidden_act: "silu" (or "swiglu", the same) for gated feed-forwards, "gelu" for the standard two-layer ones; dense
        blocks and experts alike.
    intermediate_size, moe_intermediate_size: width of a dense feed-forward and of an expert. Default 4·hidden_size,
        and half of it: two experts cost what a dense block costs.
    moe_every: every n-th block has experts: 1 all of them, 2 the even ones counted from one, as in the paper.
    num_experts_per_tok: K, the most experts a token is computed by. Default: 2, or what selection and router imply.
    router: a name of `grmoe.routing.ROUTERS`; router_options: further arguments of that router.
    router_rank, router_kappa: k_r (default hidden_size // num_experts, the paper's rule) and the concentration at the
        start (default: the router's own).
    selection: "topk", "mass" (fewest experts that reach probability selection_tau, at most K), "threshold" (experts of
        at least selection_tau) or "dense". selection_tau: default 0.9 for mass, 1/N for threshold.
    norm_topk_prob: scale the kept weights back to sum one. Default: yes, except at K = 1, where the router would get no
        gradient.
    alpha: the dial, one number or one for each MoE layer. The only place where it is stored.
    shared_experts: so many experts of the same width that every token goes through.
    router_aux_loss_coef: multiplies the sum of the routers' own losses, which carry their coefficients already.
    allow_noncausal_router: accept Expert Choice and Soft MoE in a causal model, to compare losses.
    """

    model_type = "grmoe"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}

    vocab_size: int = 50257
    hidden_size: int = 768
    intermediate_size: int | None = None
    moe_intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 1024
    rope_parameters: dict[str, Any] | None = None
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: float = 0.0

    moe_every: int = 2
    num_experts: int = 8
    num_experts_per_tok: int | None = None
    router: str = "grassmann"
    router_rank: int | None = None
    router_kappa: float | None = None
    router_options: dict[str, Any] | None = None
    selection: str = "topk"
    selection_tau: float | None = None
    norm_topk_prob: bool | None = None
    alpha: float | list[float] = 1.0
    shared_experts: int = 0
    output_router_logits: bool = False
    router_aux_loss_coef: float = 1.0
    allow_noncausal_router: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.hidden_act = "silu" if self.hidden_act == "swiglu" else self.hidden_act
        self._check_sizes()
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.moe_intermediate_size is None:
            self.moe_intermediate_size = max(1, self.intermediate_size // 2)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.router_rank is None:
            self.router_rank = max(1, self.hidden_size // self.num_experts)
        if self.router_options is None:
            self.router_options = {}
        if self.selection_tau is None and self.selection in ("mass", "threshold"):
            self.selection_tau = 0.9 if self.selection == "mass" else 1 / self.num_experts
        if self.num_experts_per_tok is None:
            self.num_experts_per_tok = self._implied_experts() or min(2, self.num_experts)
        if self.norm_topk_prob is None:
            self.norm_topk_prob = self.num_experts_per_tok > 1
        if isinstance(self.alpha, tuple):
            self.alpha = list(self.alpha)
        super().__post_init__(**kwargs)
        self.check()

    # -- what follows from it ------------------------------------------------------------------------------

    @property
    def moe_layers(self) -> list[int]:
        """Blocks with experts, counted from zero."""
        return [i for i in range(self.num_hidden_layers) if (i + 1) % self.moe_every == 0]

    @property
    def alphas(self) -> list[float]:
        """The dial of each MoE layer."""
        if isinstance(self.alpha, list):
            return [float(a) for a in self.alpha]
        return [float(self.alpha)] * len(self.moe_layers)

    @property
    def activation(self) -> Literal["swiglu", "gelu"]:
        """`hidden_act` in the words of `grmoe.MoE`."""
        return ACTIVATIONS[self.hidden_act]

    def selection_policy(self) -> Selection | None:
        """The policy for the router; None where the router chooses by itself."""
        if self.router in OWN_CHOICE:
            return None
        K, tau, norm = self.num_experts_per_tok, self.selection_tau, bool(self.norm_topk_prob)
        assert K is not None  # resolved in __post_init__
        if self.selection == "dense":
            return Dense()
        if self.selection == "topk":
            return TopK(K, renormalize=norm)
        assert tau is not None
        return Mass(tau, cap=K, renormalize=norm) if self.selection == "mass" else Threshold(tau, norm)

    # -- what must hold ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise a `ValueError` that names the field. Models call it too: `from_pretrained(dir, name=value)` writes
        into a finished configuration."""
        self._check_sizes()
        _require(
            self.hidden_act in ACTIVATIONS, f"hidden_act must be 'silu' or 'gelu', got {self.hidden_act!r}"
        )
        heads, groups = self.num_attention_heads, self.num_key_value_heads or 0
        _require(
            groups >= 1 and heads % groups == 0,
            f"num_key_value_heads must divide num_attention_heads = {heads}, got {groups}",
        )
        _require((self.head_dim or 0) % 2 == 0, f"head_dim must be even for RoPE, got {self.head_dim}")
        found = len(self.moe_layers)
        _require(
            found > 0, f"moe_every = {self.moe_every} leaves no MoE layer in {self.num_hidden_layers} blocks"
        )
        values = self.alpha if isinstance(self.alpha, list) else [self.alpha]
        _require(
            not isinstance(self.alpha, list) or len(self.alpha) == found,
            f"alpha must be one number or one for each of the {found} MoE layers, got {self.alpha!r}",
        )
        for value in values:
            ok = isinstance(value, int | float) and not isinstance(value, bool)
            _require(
                ok and math.isfinite(value) and value >= 0, f"alpha must be finite and >= 0, got {value!r}"
            )
        _require(
            isinstance(self.router_options, dict),
            f"router_options must be a dict, got {self.router_options!r}",
        )
        self._check_selection()

    def _check_sizes(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
            "moe_every", "num_experts", "intermediate_size", "moe_intermediate_size", "head_dim", "router_rank",
            "num_experts_per_tok",
        ):  # fmt: skip
            value = getattr(self, name)
            ok = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
            _require(ok, f"{name} must be an integer >= 1, got {value!r}")
        _require(self.num_experts >= 2, f"num_experts must be at least 2, got {self.num_experts}")
        _require(
            isinstance(self.shared_experts, int) and self.shared_experts >= 0,
            f"shared_experts must be an integer >= 0, got {self.shared_experts!r}",
        )
        _require(self.router in ROUTERS, f"router must be one of {', '.join(ROUTERS)}, got {self.router!r}")
        _require(
            self.selection in SELECTIONS,
            f"selection must be one of {', '.join(SELECTIONS)}, got {self.selection!r}",
        )
        tau = self.selection_tau
        ok = tau is None or (isinstance(tau, int | float) and 0 < tau <= 1)
        _require(ok, f"selection_tau must be in (0, 1], got {tau!r}")

    def _check_selection(self) -> None:
        N, K = self.num_experts, self.num_experts_per_tok or 0
        _require(K <= N, f"num_experts_per_tok must be at most num_experts = {N}, got {K}")
        implied = self._implied_experts()
        why = f"router {self.router!r}" if self.router in OWN_CHOICE else f"selection {self.selection!r}"
        _require(
            implied is None or implied == K, f"num_experts_per_tok must be {implied} with {why}, got {K}"
        )
        rank = self.router_rank or 0
        _require(
            self.router != "grassmann" or rank <= self.hidden_size,
            f"router_rank must be at most hidden_size = {self.hidden_size}, got {rank}",
        )

    def _implied_experts(self) -> int | None:
        """K where it is no free choice: of a router that chooses by itself, a dense gate, a threshold."""
        if self.router in OWN_CHOICE:
            return OWN_CHOICE[self.router] or self.num_experts
        if self.selection == "dense":
            return self.num_experts
        if self.selection == "threshold" and self.selection_tau is not None:
            return Threshold(self.selection_tau).max_experts(self.num_experts)
        return None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
