"""The plugin for vLLM: with grmoe installed, `vllm serve MODEL` serves an exported folder.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). Attention, caches and experts are
vLLM's own. Blocks and routers are ours, run by vLLM's Transformers backend. A server has one budget, or one α, for all
requests: `--hf-overrides '{"budget": 1.3}'` or `'{"alpha": 2.0}'`.
"""

from __future__ import annotations

_ARCHITECTURE = "GrmoeForCausalLM"
_BACKEND = "vllm.model_executor.models.transformers:TransformersMoEForCausalLM"


def register() -> None:
    from vllm import ModelRegistry

    import grmoe.model  # noqa: F401  registers configuration and models with transformers' Auto classes

    if _ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(_ARCHITECTURE, _BACKEND)
