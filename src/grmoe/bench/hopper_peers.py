"""Two more libraries' MoE layers, behind the same tokens and weights: SonicMoE and Triton's own `triton_kernels`.

Neither is needed to run the others: a library that is missing becomes a row that says so. The adapters follow
`sonicmoe` 0.1.2 and the `triton_kernels` of Triton 3.6, where the grouped product is called `matmul_ogs`. The softmax
over the chosen logits that both compute equals a softmax over all experts that is scaled back to sum one.

Legend: T tokens, D model width, N experts, I expert width, K experts per token.
"""

from __future__ import annotations

import math
import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from grmoe.bench.blocks import Block, Setting


def sonicmoe(setting: Setting) -> Block:
    """SonicMoE's layer in its fastest form: interleaved weights, and in inference nothing is kept for a backward.

    Its first call at a shape tunes for minutes, in the warm-up. The choice is kept on disk (QUACK_CACHE_DIR).
    """
    os.environ.setdefault("QUACK_CACHE_AUTOTUNING", "1")  # read at import
    layer: Any = import_module("sonicmoe.functional").moe_TC_softmax_topk_layer
    swiglu: Any = import_module("sonicmoe.enums").ActivationType.SWIGLU
    up_NID = nn.Parameter(interleave(setting.experts.up.detach()))
    down_NDI, top_k = setting.experts.down_proj, setting.shape.top_k

    def run(x_TD: Tensor, inference: bool) -> Tensor:
        stream = torch.cuda.current_stream().cuda_stream if x_TD.is_cuda else 0
        up, down = up_NID.permute(1, 2, 0), down_NDI.permute(1, 2, 0)
        softmax_over_chosen = True
        y_TD: Tensor
        y_TD, *_ = layer(
            x_TD,
            setting.gate_ND,
            up,
            None,
            down,
            None,
            top_k,
            stream,
            swiglu,
            inference,
            softmax_over_chosen,
        )
        return y_TD

    def call(x_TD: Tensor) -> Tensor:
        return run(x_TD, inference=False)

    parameters = [setting.gate_ND, up_NID, down_NDI]
    return Block(
        call,
        parameters,
        lambda: setting.peer_errors(call, parameters, deinterleave),
        served=lambda x_TD: run(x_TD, inference=True),
    )


def triton_kernels(setting: Setting) -> Block:
    """The layer of Triton's own sources, forward only: gather, both grouped products and the weighted sum fused."""
    ogs: Any = import_module("triton_kernels.matmul_ogs")
    topk: Any = import_module("triton_kernels.topk").topk
    ragged: Any = import_module("triton_kernels.tensor").make_ragged_tensor_metadata
    swiglu_fn: Any = import_module("triton_kernels.swiglu").swiglu_fn
    N, K = setting.shape.experts, setting.shape.top_k
    up_NDI = interleave(setting.experts.up.detach()).transpose(1, 2)
    down_NID = setting.experts.down_proj.detach().transpose(1, 2)
    # Its SwiGLU is gpt-oss's, silu(gate)·(up + 1). A bias of −1 takes the one back.
    bias_NI = torch.zeros(up_NDI.shape[0], up_NDI.shape[2], device=setting.device)
    bias_NI[:, 1::2] = -1.0
    specs = ogs.FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2)
    activation = ogs.FusedActivation(specs, (1.0, math.inf))

    def call(x_TD: Tensor) -> Tensor:
        chosen = topk(nn.functional.linear(x_TD, setting.gate_ND), K, apply_softmax=True)
        found = chosen.mask_metadata
        to_expert, to_token = found.row_sorted_indx, found.col_sorted_indx
        rows = ragged(found.col_sum, to_expert.shape[0])
        weight_A = chosen.vals.flatten()[to_token]
        routing = ogs.RoutingData(weight_A, rows.slice_sizes, N, K, rows)
        inner = ogs.matmul_ogs(
            x_TD,
            up_NDI,
            bias_NI,
            routing,
            gather_indx=ogs.GatherIndx(to_token, to_expert),
            fused_activation=activation,
        )
        y_TD: Tensor = ogs.matmul_ogs(
            inner,
            down_NID,
            None,
            routing,
            scatter_indx=ogs.ScatterIndx(to_expert, to_token),
            gammas=weight_A,
        )
        return y_TD

    return Block(call, [], lambda: setting.peer_errors(call))


def interleave(up_NID: Tensor) -> Tensor:
    """First matrices (N, 2I, D) from [all gate rows, all up rows] to gate₀, up₀, gate₁, up₁, …"""
    gate, up = up_NID.chunk(2, dim=1)
    return torch.stack([gate, up], dim=2).flatten(1, 2).contiguous()


def deinterleave(up_NID: Tensor) -> Tensor:
    """Back from `interleave`."""
    return torch.cat([up_NID[:, 0::2], up_NID[:, 1::2]], dim=1)
