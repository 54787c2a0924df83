"""The configuration of a GrMoE language model: the `config.json` beside its weights.

Fields, and the values that follow from them. This file is copied beside every exported model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from transformers import PreTrainedConfig

from .choices_grmoe import ACTIVATIONS, OWN_CHOICE, check_budget, check_fields, check_sizes, implied_experts
from .parts_grmoe import (
    AtLeast,
    Dense,
    LayerNumbers,
    Mass,
    Selection,
    Threshold,
    TopK,
    checks,
    curve_numbers,
    curve_room,
)
from .parts_grmoe import numbers as policy_numbers

# The setting without a budget. A budget replaces it, so setting one of these ends the budget.
_SETTING = ("alpha", "selection", "selection_tau", "num_experts_per_tok")


def _check_one_setting(changes: Mapping[str, Any]) -> None:
    """Raise for a budget beside what it replaces: the last one named would win, and the trained setting be lost."""
    beside = [name for name in _SETTING if changes.get(name) is not None]
    checks.require(
        changes.get("budget") is None or not beside,
        f"give budget or {', '.join(beside)}, not both: a budget sets α and the selection too",
    )


class GrmoeConfig(PreTrainedConfig):
    """Configuration of `GrmoeModel` and of the models on it. Each field is described below it."""

    model_type = "grmoe"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}

    vocab_size: int = 50257
    """Size of the vocabulary."""
    hidden_size: int = 768
    """Model width."""
    intermediate_size: int | None = None
    """Width of a dense feed-forward. Default: 4·hidden_size."""
    moe_intermediate_size: int | None = None
    """Width of an expert. Default: intermediate_size // 2, so that two experts cost what a dense block costs."""
    num_hidden_layers: int = 12
    """Number of blocks."""
    num_attention_heads: int = 12
    """Attention heads per block."""
    num_key_value_heads: int | None = None
    """Key and value heads per block (grouped-query attention). Default: num_attention_heads."""
    head_dim: int | None = None
    """Width of a head, even. Default: hidden_size // num_attention_heads."""
    hidden_act: str = "silu"
    """"silu" (or "swiglu", the same) for gated feed-forwards, "gelu" for two-layer ones. Holds for dense blocks and
    experts."""
    max_position_embeddings: int = 1024
    """Longest sequence the model is made for, in tokens."""
    rope_parameters: dict[str, Any] | None = None
    """Options of the rotary embedding, as in Hugging Face models."""
    initializer_range: float = 0.02
    """Standard deviation of new weights."""
    rms_norm_eps: float = 1e-5
    """Epsilon of the RMS norms."""
    use_cache: bool = True
    """Return a key-value cache."""
    pad_token_id: int | None = None
    """Id of the padding token."""
    bos_token_id: int | None = None
    """Id of the first token of a text."""
    eos_token_id: int | list[int] | None = None
    """Id or ids of the token that ends a text."""
    tie_word_embeddings: bool = False
    """Use one matrix for input and output embeddings."""
    embedding_multiplier: float = 1.0
    """Multiplies the input embeddings, also those given as `inputs_embeds`. √hidden_size brings embeddings that start
    at `initializer_range` to the scale of what the blocks add to them."""
    residual_loss_coef: float = 0.0
    """Weight, in training, of the mean of (log mean square)² of the residual stream before each MoE layer. It keeps the
    stream's scale near one, which models otherwise leave. A part of the routers' losses."""
    attention_bias: bool = False
    """Add biases to the attention projections."""
    attention_dropout: float = 0.0
    """Dropout of attention weights in training."""
    attention_heads_per_token: int | None = None
    """Heads that a token uses, chosen in every block by a Grassmann gate of rank router_rank and weighted by it. The
    others are computed and multiplied by zero: this saves no time. Default: all heads, without a gate."""

    moe_every: int = 2
    """Every n-th block has experts: 1 all of them, 2 blocks 1, 3, 5, … counted from 0 (the paper's
    "even layers" count from 1)."""
    num_experts: int = 8
    """N, experts per MoE layer."""
    num_experts_per_tok: int | None = None
    """K, the most experts that compute a token. Default: 2, or what selection and router imply."""
    router: str = "grassmann"
    """A name of `grmoe.routing.ROUTERS`."""
    router_rank: int | None = None
    """k, the rank of an expert's subspace. Default: hidden_size // num_experts, the paper's rule."""
    router_kappa: float | None = None
    """Concentration at the start. Default: the router's own."""
    router_options: dict[str, Any] | None = None
    """Further arguments of the router. For "hash", `seed` may be one number (layer i adds i) or a list with one per MoE
    layer. For "soft_moe" and "grassmann_soft_moe", `slots` fixes the slots per expert; by default a sequence of T
    tokens uses T/N."""
    selection: str = "topk"
    """"topk", "mass" (the fewest experts that reach probability selection_tau, at most K), "at_least" (experts with a
    weight of at least selection_tau, at most K), "threshold" (the same without K) or "dense"."""
    selection_tau: float | None = None
    """τ of "mass", "at_least" and "threshold". Default: 0.9, 1/N and 1/N."""
    norm_topk_prob: bool = False
    """Scale the kept weights back to sum one. The paper does not, and losses are lower without."""
    alpha: float | list[float] = 1.0
    """The dial: one number, or one per MoE layer. It is stored only here, not with the weights."""
    weight_alpha: float | list[float] | None = None
    """α of the combine weights: one number, or one per MoE layer. Then `alpha` changes only which experts are computed,
    and those keep the weights they have at this α. Default: `alpha` changes both, as in the paper."""
    budget: float | None = None
    """Experts per token in use, by `budget_curve`. Default: the trained setting, which is `selection` at `alpha`.
    Setting `alpha` or the selection afterwards ends the budget."""
    budget_curve: list[dict[str, Any]] | None = None
    """What `grmoe dial` calibrated: points with `experts_per_token`, `weight` or `tau`, `alpha`, `cap` and `loss`, with
    the fewest experts first. Weight, τ, α and cap are one number, or a list with one per MoE layer. A point may have a
    `bias` too: for each MoE layer a list with one number per expert, added to the logits for the choice alone."""
    trained_length: int | None = None
    """Tokens per sequence in training. `grmoe eval`, `dial`, `prune`, `analyze` and `report` cut texts into windows of
    this length. Default: max_position_embeddings."""
    shared_experts: int = 0
    """Experts of the same width that compute every token."""
    identity_experts: int = 0
    """Experts that compute nothing, beside the N others and routed like them (mixture of depths). A token that chooses
    one of them computes one expert less, and the residual stream carries it past. With the balanced prior, identity
    experts get their share of the choices: I of N + I."""
    output_router_logits: bool = False
    """Return the routers' logits and their loss."""
    router_aux_loss_coef: float = 1.0
    """Multiplies the sum of the routers' own losses, which already carry their coefficients."""
    allow_noncausal_router: bool = False
    """Accept Expert Choice and Soft MoE, which look at later tokens, in order to compare losses."""

    def __post_init__(self, **kwargs: Any) -> None:
        self.hidden_act = "silu" if self.hidden_act == "swiglu" else self.hidden_act
        check_sizes(self)
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
        self._fill_tau()
        if self.num_experts_per_tok is None:
            self.num_experts_per_tok = implied_experts(self) or min(2, self.num_experts)
        super().__post_init__(**kwargs)
        self.check()

    def _fill_tau(self) -> None:
        if self.selection_tau is None and self.selection in ("mass", "at_least", "threshold"):
            self.selection_tau = 0.9 if self.selection == "mass" else 1 / self.num_experts

    def __setattr__(self, name: str, value: Any) -> None:
        """Numbers become Python's, because NumPy's and PyTorch's cannot be written to JSON."""
        if name == "alpha" or (name == "weight_alpha" and value is not None):
            value = checks.alphas(name, value)
        if name == "selection_tau" and value is not None:
            value = checks.fraction("selection_tau", value)
        if name == "budget" and value is not None:
            value = checks.finite("budget", value, above=0)
        if name == "embedding_multiplier":
            value = checks.finite(name, value, above=0)
        if name in _SETTING and "budget" in self.__dict__ and getattr(self, name) is not None:
            super().__setattr__("budget", None)  # not while the fields are filled in for the first time
        super().__setattr__(name, value)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers. A saved configuration has a budget beside its trained setting; what is changed while
        loading is one of the two."""
        _check_one_setting(kwargs)
        return super().from_dict(config_dict, **kwargs)

    def update(self, config_dict: dict[str, Any]) -> None:
        """As in transformers, for a budget or for another setting. A whole configuration (`to_dict`) has both."""
        if "model_type" not in config_dict:
            _check_one_setting(config_dict)
            super().update(config_dict)
            return
        super().update({name: value for name, value in config_dict.items() if name != "budget"})
        if "budget" in config_dict:  # last, because the setting ends a budget
            self.budget = config_dict["budget"]

    # -- derived values ------------------------------------------------------------------------------------

    @property
    def moe_layers(self) -> list[int]:
        """Blocks with experts, counted from zero."""
        return [i for i in range(self.num_hidden_layers) if (i + 1) % self.moe_every == 0]

    @property
    def gate_experts(self) -> int:
        """Experts that a gate chooses from: those that compute, and identity experts."""
        return self.num_experts + self.identity_experts

    @property
    def alphas(self) -> list[float]:
        """The dial of each MoE layer."""
        return self._by_layer(self.alpha)

    @property
    def weight_alphas(self) -> list[float] | list[None]:
        """`weight_alpha` of each MoE layer."""
        return (
            [None] * len(self.moe_layers) if self.weight_alpha is None else self._by_layer(self.weight_alpha)
        )

    @property
    def biased(self) -> bool:
        """Whether budgets choose experts with a bias (`grmoe.routing.curve`)."""
        return any("bias" in point for point in self.budget_curve or ())

    def _by_layer(self, value: float | list[float]) -> list[float]:
        return [float(v) for v in value] if isinstance(value, list) else [float(value)] * len(self.moe_layers)

    @property
    def activation(self) -> Literal["swiglu", "gelu"]:
        """`hidden_act` as `grmoe.MoE` names it."""
        return ACTIVATIONS[self.hidden_act]

    def selection_policy(self) -> Selection | None:
        """The router's selection policy; None where the router chooses by itself."""
        if self.router in OWN_CHOICE:
            return None
        K, tau, norm = self.num_experts_per_tok, self.selection_tau, self.norm_topk_prob
        assert K is not None  # resolved in __post_init__
        if self.selection == "dense":
            return Dense()
        if self.selection == "topk":
            return TopK(K, renormalize=norm)
        assert tau is not None
        if self.selection == "threshold":
            return Threshold(tau, norm)
        return (Mass if self.selection == "mass" else AtLeast)(tau, cap=K, renormalize=norm)

    def router_policy(self, budget: float | None = None) -> Selection | None:
        """`selection_policy` as routers use it: with room for every point of the curve.

        A policy by rank is kept at every budget, so turning it recompiles nothing. A threshold or a dense gate becomes
        a mass policy once there is a budget.
        """
        policy = self.selection_policy()
        if policy is None or self.budget_curve is None:
            return policy
        room = curve_room(self.budget_curve)
        if isinstance(policy, TopK):
            return TopK(max(room, policy.k), policy.renormalize)
        if isinstance(policy, Mass | AtLeast):
            return replace(policy, cap=max(room, policy.max_experts(self.num_experts)))
        return policy if budget is None else Mass(1.0, room, policy.renormalize)

    def layer_numbers(self, budget: float | None = None) -> list[LayerNumbers]:
        """τ, α and cap of every MoE layer at a budget; None: as trained. Raises where the budget was not calibrated."""
        policy = self.selection_policy()
        if budget is not None:
            check_budget(self, budget, policy)
            if self.budget_curve is not None:
                return curve_numbers(self.budget_curve, budget, len(self.moe_layers))
        assert self.num_experts_per_tok is not None  # resolved in __post_init__
        tau, cap = policy_numbers(policy or TopK(self.num_experts_per_tok), self.num_experts)
        return [LayerNumbers(tau, alpha, cap) for alpha in self.alphas]

    @property
    def numbers(self) -> list[LayerNumbers]:
        """τ, α and cap of every MoE layer as they are in use."""
        return self.layer_numbers(self.budget)

    @property
    def budget_range(self) -> tuple[float, float] | None:
        """The fewest and most experts per token that `budget` may be; None without a curve."""
        if self.budget_curve is None:
            return None
        return self.budget_curve[0]["experts_per_token"], self.budget_curve[-1]["experts_per_token"]

    # -- checks --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise a `ValueError` that names the field. Models call it too, because `from_pretrained(dir, name=value)`
        writes into a finished configuration."""
        check_sizes(self)
        self._fill_tau()
        check_fields(self)
        if self.budget is not None:
            self.layer_numbers(self.budget)

    def check_has_dial(self) -> None:
        """Raise a `ValueError` if α changes nothing."""
        checks.require(
            self.router != "hash",
            "alpha must be left out: a hash router has no dial, because its gate is a fixed choice",
        )
