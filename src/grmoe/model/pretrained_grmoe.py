"""What all GrMoE models share: the dial, metrics, priors, new weights and saving.

This file is copied beside every exported model.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_utils import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.utils.output_capturing import OutputRecorder

from .attention_grmoe import head_router
from .block_grmoe import OWN_EXPERTS, GrmoeDecoderLayer, GrmoeMoE
from .configuration_grmoe import GrmoeConfig
from .parts_grmoe import (
    AtLeast,
    ExpertWeights,
    FrameRouter,
    HashRouter,
    HeadRouter,
    Mass,
    Router,
    RoutingMetrics,
    Selection,
    SlotRouter,
    TopK,
    all_routers,
    checks,
    overlap_penalty,
    read_metrics_of,
    routers,
)
from .parts_grmoe import set_alpha as set_router_alpha
from .parts_grmoe import set_layer_numbers as set_router_numbers
from .parts_grmoe import update_priors as update_router_priors
from .router_grmoe import config_policy, config_router

_TRAINS_AT_BUDGET = (
    "this model trains at its budget, with as few experts as in use. To train all of it, first call "
    "model.set_budget(None) and set model.config.budget_curve = None: the curve belongs to the old weights"
)
_NOT_SAVED = (
    "{names} of the routers differ from the configuration and are not saved. To keep them, set selection, "
    "selection_tau, num_experts_per_tok, norm_topk_prob or weight_alpha of model.config, or call model.set_budget with "
    "a budget_curve that has them"
)


class GrmoePreTrainedModel(PreTrainedModel):
    config: GrmoeConfig
    config_class = GrmoeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GrmoeDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    # Frames in bf16 lose orthonormality, and near ties route differently.
    _keep_in_fp32_modules_strict = ["router"]  # noqa: RUF012
    # A learned α is in the configuration too, where loading reads it.
    _keys_to_ignore_on_load_unexpected = [r"router\.log_alpha$"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(GrmoeMoE, index=1),
        "hidden_states": GrmoeDecoderLayer,
        "attentions": LlamaAttention,
    }

    def __init__(self, config: GrmoeConfig, *args: Any, **kwargs: Any) -> None:
        config.check()
        super().__init__(config, *args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """As in PyTorch. Warns once if a budget is set."""
        if mode and self.config.budget is not None:
            warnings.warn(_TRAINS_AT_BUDGET, stacklevel=1)  # one place, so it is shown once
        return super().train(mode)

    # -- dial, metrics, priors, overlap ------------------------------------------------------------------------

    @property
    def alpha(self) -> list[float]:
        """The dial of each MoE layer. Reading it waits for the device."""
        return [router.alpha for router in routers(self)]

    def set_alpha(self, alpha: Any) -> None:
        """Set the dial: one α for all MoE layers, or one per layer. Above 1 routing is sharper, at 0 uniform.

        Takes Python, NumPy and PyTorch numbers, and lists, arrays or 1-d tensors of them. Ends a budget: the selection
        is the trained one again.
        """
        value = checks.alphas("alpha", alpha)
        set_router_alpha(self, value)
        had_budget = self.config.budget is not None
        self.config.alpha, self.config.budget = value, None
        if had_budget:
            self._use_config_numbers()

    @property
    def budget(self) -> float | None:
        """Experts per token in use; None: the trained setting."""
        return self.config.budget

    def set_budget(self, budget: Any | None) -> None:
        """Set the experts per token: a number within the curve that `grmoe dial` calibrated, or None as trained.

        Sets τ, cap and α of every layer on the device. Nothing is compiled again, except when a model that was trained
        with a threshold or a dense gate gets its first budget.
        """
        before, self.config.budget = self.config.budget, budget
        try:
            self.config.check()
        except ValueError:
            self.config.budget = before
            raise
        self._use_config_numbers()

    def _use_config_numbers(self) -> None:
        """τ, α, cap and bias of every router as the configuration has them."""
        for router in routers(self):
            router.budget.biased = self.config.biased
        set_router_numbers(routers(self), config_policy(self.config), self.config.numbers)

    def routing_metrics(self) -> list[RoutingMetrics]:
        """Metrics of each MoE layer's router since the last reset. Waits for the device."""
        return read_metrics_of(list(routers(self)))

    def head_metrics(self) -> list[RoutingMetrics]:
        """The same of each block's heads, with heads for experts; empty without `attention_heads_per_token`."""
        return read_metrics_of([router for router in all_routers(self) if isinstance(router, HeadRouter)])

    def reset_routing_metrics(self) -> None:
        for router in all_routers(self):
            router.reset_metrics()

    def update_priors(self, rate: float, skip: Tensor | None = None) -> None:
        """One step of every balanced prior (`Router.update_prior`); call it once per optimiser step.

        skip: a 0-d tensor. Where it is nonzero, priors stay as they are.
        """
        update_router_priors(all_routers(self), rate, skip)

    def overlap_penalty(
        self, rho: float, *, relative: bool = True, num_pairs: int | Literal["auto"] | None = None
    ) -> Tensor:
        """Σ over MoE layers of `grmoe.overlap_penalty`; zero for routers without frames of experts.

        Slots have frames too, but as many slots as tokens do not fit apart into `hidden_size` dimensions.
        """
        experts = (router for router in routers(self) if not isinstance(router, SlotRouter))
        named = (getattr(router, "frames", None) for router in experts)
        frames = [f for f in named if isinstance(f, Tensor)]
        if not frames:
            return torch.zeros((), device=self.device)
        if len({f.device for f in frames}) > 1:
            parts = [overlap_penalty(f, rho, relative=relative, num_pairs=num_pairs) for f in frames]
            return torch.stack([part.to(frames[0].device) for part in parts]).sum()
        # All layers at once, because launching the small products layer by layer takes longer than computing them.
        return overlap_penalty(torch.stack(frames), rho, relative=relative, num_pairs=num_pairs).sum()

    # -- hooks of transformers ---------------------------------------------------------------------------------

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """transformers looks for the decorator of `GrmoeExperts` in the file of the model's class. It is in another."""
        return True

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Our own backends, unless one of Hugging Face's is requested."""
        if requested_experts is None or requested_experts in OWN_EXPERTS:
            return requested_experts or "auto"
        name: str = super().get_correct_experts_implementation(requested_experts)
        return name

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """N(0, initializer_range²); matrices that write into the residual stream get a √(2·blocks) smaller deviation.

        Routers start as their constructors leave them.
        """
        std = self.config.initializer_range
        narrow = std / math.sqrt(2 * self.config.num_hidden_layers)
        if isinstance(module, Router):
            self._init_router(module)
        elif isinstance(module, ExpertWeights):
            init.normal_(module.up, std=std)
            init.normal_(module.down_proj, std=narrow)
        else:
            super()._init_weights(module)
            if isinstance(module, nn.Linear) and getattr(module, "writes_residual", False):
                init.normal_(module.weight, std=narrow)

    def _init_router(self, router: Router) -> None:
        """Fill a router that was made on the meta device and not loaded. Its sums are always reset."""
        tensors = dict(router.state_dict(keep_vars=True))
        if not all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors.values()):
            with torch.device("cpu"):
                if isinstance(router, HeadRouter):
                    fresh = head_router(self.config).state_dict()
                else:
                    number = next(i for i, found in enumerate(routers(self)) if found is router)
                    fresh = config_router(self.config, number).state_dict()
            for name, tensor in tensors.items():
                init.copy_(tensor, fresh[name])
        router.prior_sums.zero_()
        router.reset_metrics()

    def initialize_weights(self) -> None:
        super().initialize_weights()
        for router, weight_alpha in zip(routers(self), self.config.weight_alphas, strict=True):
            router.budget.set_weight_alpha(weight_alpha)
            if isinstance(router, HashRouter):
                router.check_seed()
        for router in all_routers(self):
            if isinstance(router, HeadRouter):
                router.alpha = 1.0
        self._use_config_numbers()

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers. Frames are orthonormal when they are written, whatever trained them.

        Warns if routers compute with other numbers than those of the configuration, which is what is saved.
        """
        for router in all_routers(self):
            if isinstance(router, FrameRouter):
                router.retract()
        names = _not_in_configuration(self)
        if names:
            warnings.warn(_NOT_SAVED.format(names=", ".join(names)), stacklevel=2)
        # `router.alpha` may have been set directly. Its fp32 value is rounded; the configuration keeps all digits.
        now = self.alpha
        if now != torch.tensor([n.alpha for n in self.config.numbers], dtype=torch.float32).tolist():
            had_budget = self.config.budget is not None
            self.config.alpha = now[0] if len(set(now)) == 1 else now  # ends a budget
            if had_budget:
                # A learned α stays a factor of its own: what is computed is α as before.
                factors = [router.alpha_value.clone() for router in routers(self)]
                self._use_config_numbers()
                for router, factor in zip(routers(self), factors, strict=True):
                    router.alpha_value.copy_(factor)
        super().save_pretrained(save_directory, *args, **kwargs)


def _not_in_configuration(model: GrmoePreTrainedModel) -> list[str]:
    """Names of what routers compute with and the configuration does not have, because someone set it on them. α is left
    out: saving takes it into the configuration."""
    config, policy = model.config, config_policy(model.config)
    found: set[str] = set()
    # Not strict: a warning must not stop what is being saved.
    for router, numbers, weight_alpha in zip(
        routers(model), config.numbers, config.weight_alphas, strict=False
    ):
        budget, own = router.budget, router.selection
        if budget.weighs_apart != (weight_alpha is not None) or _differs(budget.weight_alpha, weight_alpha):
            found.add("weight_alpha")
        if policy is None:  # it chooses by itself
            continue
        if _rule(own) != _rule(policy) or own.renormalize != policy.renormalize:
            found.add("selection")
        elif not own.dense:
            found |= {"tau"} if _differs(budget.tau, numbers.tau) else set()
            found |= {"cap"} if _rule(own) == "rank" and _differs(budget.cap, numbers.cap) else set()
        if _differs(budget.bias, numbers.bias or 0.0):
            found.add("bias")
    return sorted(found)


def _rule(policy: Selection) -> str:
    """Policies by rank are one rule: their numbers tell them apart."""
    return "rank" if isinstance(policy, TopK | Mass | AtLeast) else type(policy).__name__


def _differs(number: Tensor, given: float | tuple[float, ...] | None) -> bool:
    """Whether a router's number, or one of several, is another one in fp32. None: nothing was given."""
    return given is not None and bool((number.detach().cpu().float() != torch.tensor(given).float()).any())
