"""The Grassmann gate's forward for Hopper: the same arithmetic as `gate_kernels.gate_kernel`, warp-specialised.

Legend: T tokens, D model width, N experts (padded to a power of two), K rank, C = K·N packed columns; B… tile sizes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from grmoe.kernels.early import await_inputs
from grmoe.kernels.gate_kernels import column_weights, finish_gate
from grmoe.kernels.hopper import await_lead, give_lead, make_barriers, store_wide, sum_products


@gluon.jit
def _fetch(
    x_desc, packed_desc, tiles, first,
    D: gl.constexpr, C: gl.constexpr, BC: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: loads x once per tile of columns."""
    x_tiles, packed_tiles, full, empty, _turns = tiles
    steps: gl.constexpr = (D + BD - 1) // BD
    for i in range(steps * (C // BC)):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)  # all are empty at first
        ready = full.index(stage)
        mbarrier.expect(ready, x_desc.block_type.nbytes + packed_desc.block_type.nbytes)
        d = i % steps * BD
        tma.async_copy_global_to_shared(x_desc, [first, d], ready, x_tiles.index(stage))
        tma.async_copy_global_to_shared(packed_desc, [i // steps * BC, d], ready, packed_tiles.index(stage))


@gluon.jit
def _sum_directions(
    acc_BC, log_kappa_ptr, column, num_experts: gl.constexpr, K: gl.constexpr, DIAGONAL: gl.constexpr,
    BT: gl.constexpr, BC: gl.constexpr, NP: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Σ over the directions in this tile of their squares, weighted by λ where it is diagonal, (BT, NP)."""
    acc_BC = acc_BC * acc_BC
    if DIAGONAL:
        here = column + gl.arange(0, BC, gl.SliceLayout(0, acc_BC.type.layout))
        acc_BC = acc_BC * column_weights(log_kappa_ptr, here, num_experts, K, NP, DIAGONAL)[None, :]
    # Every N-th column: the sum stays in a thread's registers, so the conversion is trivial.
    sums_BN = gl.sum(acc_BC.reshape([BT, BC // NP, NP]), axis=1)
    return gl.convert_layout(sums_BN, SUMS, assert_trivial=True)


@gluon.jit
def _keep(kept_ptr, acc_BC, first, column, num_tokens, C: gl.constexpr):
    """256 columns of the projection of 64 tokens."""
    left, right = acc_BC.reshape([64, 2, 128]).permute((0, 2, 1)).split()
    store_wide(kept_ptr, left, first, column, num_tokens, C, C)
    store_wide(kept_ptr, right, first, column + 128, num_tokens, C, C)


@gluon.jit
def _multiply(
    HALF: gl.constexpr, tiles, first, kept_ptr, log_kappa_ptr, prior_ptr, alpha_ptr, weight_alpha_ptr, budget, results,
    num_tokens, energy_scale, length, layer,
    D: gl.constexpr, K: gl.constexpr, C: gl.constexpr, num_experts: gl.constexpr, DIAGONAL: gl.constexpr,
    POSTERIOR: gl.constexpr, MODE: gl.constexpr, MAX_EXPERTS: gl.constexpr, RENORMALIZE: gl.constexpr,
    PER_ROW: gl.constexpr, APART: gl.constexpr, BIASED: gl.constexpr, ELASTIC: gl.constexpr, UNIT: gl.constexpr,
    KEEP: gl.constexpr, NP: gl.constexpr, BC: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr,
    LEAD: gl.constexpr,
):  # fmt: skip
    """Four warps: one half of the tile's tokens against all experts."""
    x_tiles, packed_tiles, full, empty, turns = tiles
    logits_ptr, probs_ptr, weights_ptr, selected_ptr, norm_ptr = results
    BT: gl.constexpr = 64
    steps: gl.constexpr = (D + BD - 1) // BD
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BC, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, NP, 16])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    await_lead(turns, 0, True, HALF, LEAD)
    square_BD = gl.zeros([BT, BD], gl.float32, ROWS)
    acc_BC = gl.zeros([BT, BC], gl.float32, PRODUCTS)
    for i in range(steps):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        x = x_tiles.index(stage).slice(HALF * BT, BT)
        acc_BC = warpgroup_mma(x, packed_tiles.index(stage).permute((1, 0)), acc_BC, is_async=True)
        give_lead(turns, 0, i, True, HALF, LEAD)
        wide_BD = x.load(ROWS).to(gl.float32)  # the lengths, while the tensor cores work
        square_BD += wide_BD * wide_BD
        # The previous product is done, so its tiles may be refilled.
        acc_BC = warpgroup_mma_wait(num_outstanding=1, deps=(acc_BC,))
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
    acc_BC = warpgroup_mma_wait(num_outstanding=0, deps=(acc_BC,))
    mbarrier.arrive(empty.index((steps - 1) % STAGES), count=1)
    norm_B = gl.convert_layout(gl.sum(square_BD, axis=1), gl.SliceLayout(1, SUMS))  # first, to free registers
    if KEEP:
        _keep(kept_ptr, acc_BC, first + HALF * BT, 0, num_tokens, C)
    sums_BN = _sum_directions(acc_BC, log_kappa_ptr, 0, num_experts, K, DIAGONAL, BT, BC, NP, SUMS)
    # A count that is known only at run time: a loop of one round would be unrolled, and registers run out.
    for tile in range(1, C // BC + (num_tokens < 0).to(gl.int32)):
        acc_BC, _ = sum_products(
            HALF, tiles, tile * steps, tile, True, steps, False, False, True, STAGES, LEAD
        )
        if KEEP:
            _keep(kept_ptr, acc_BC, first + HALF * BT, tile * BC, num_tokens, C)
        sums_BN += _sum_directions(
            acc_BC, log_kappa_ptr, tile * BC, num_experts, K, DIAGONAL, BT, BC, NP, SUMS
        )
    token = first + HALF * BT + gl.arange(0, BT, gl.SliceLayout(1, SUMS))
    expert = gl.arange(0, NP, gl.SliceLayout(0, SUMS))
    finish_gate(
        sums_BN, norm_B, token, expert, log_kappa_ptr, prior_ptr, alpha_ptr, weight_alpha_ptr, budget,
        logits_ptr, probs_ptr, weights_ptr, selected_ptr, norm_ptr, num_tokens, energy_scale, length, layer,
        num_experts, True, DIAGONAL, POSTERIOR, MODE, MAX_EXPERTS, RENORMALIZE, PER_ROW, APART, BIASED, ELASTIC,
        UNIT,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens", "length", "layer"])
def gate_kernel(
    x_desc, packed_desc, kept_ptr,
    log_kappa_ptr, prior_ptr, alpha_ptr, weight_alpha_ptr, tau_ptr, cap_ptr, bias_ptr, key_ptr, first_row_ptr,
    logits_ptr, probs_ptr, weights_ptr, selected_ptr, norm_ptr, aux_ptr, num_tokens, energy_scale, length, layer,
    D: gl.constexpr, K: gl.constexpr, C: gl.constexpr, num_experts: gl.constexpr, DIAGONAL: gl.constexpr,
    POSTERIOR: gl.constexpr, MODE: gl.constexpr, MAX_EXPERTS: gl.constexpr, RENORMALIZE: gl.constexpr,
    PER_ROW: gl.constexpr, APART: gl.constexpr, BIASED: gl.constexpr, ELASTIC: gl.constexpr, UNIT: gl.constexpr,
    KEEP: gl.constexpr, NP: gl.constexpr, BT: gl.constexpr, BC: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr,
    LEAD: gl.constexpr,
):  # fmt: skip
    """One program: BT = 128 tokens against all experts."""
    await_inputs()
    first = gl.program_id(0) * BT
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BT, BD], x_desc.layout)
    packed_tiles = gl.allocate_shared_memory(packed_desc.dtype, [STAGES, BC, BD], packed_desc.layout)
    full, empty, turns = make_barriers(1, STAGES, LEAD)
    tiles = (x_tiles, packed_tiles, full, empty, turns)
    budget = (tau_ptr, cap_ptr, bias_ptr, key_ptr, first_row_ptr)
    results = (logits_ptr, probs_ptr, weights_ptr, selected_ptr, norm_ptr)
    # Registers: warps that multiply need 128 for sums alone; the one that fetches needs few.
    gl.warp_specialize(
        [
            (_multiply, (
                0, tiles, first, kept_ptr, log_kappa_ptr, prior_ptr, alpha_ptr, weight_alpha_ptr, budget, results,
                num_tokens, energy_scale, length, layer, D, K, C, num_experts, DIAGONAL, POSTERIOR, MODE, MAX_EXPERTS,
                RENORMALIZE, PER_ROW, APART, BIASED, ELASTIC, UNIT, KEEP, NP, BC, BD, STAGES, LEAD,
            )),
            (_multiply, (
                1, tiles, first, kept_ptr, log_kappa_ptr, prior_ptr, alpha_ptr, weight_alpha_ptr, budget, results,
                num_tokens, energy_scale, length, layer, D, K, C, num_experts, DIAGONAL, POSTERIOR, MODE, MAX_EXPERTS,
                RENORMALIZE, PER_ROW, APART, BIASED, ELASTIC, UNIT, KEEP, NP, BC, BD, STAGES, LEAD,
            )),
            (_fetch, (x_desc, packed_desc, tiles, first, D, C, BC, BD, STAGES)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip
    if first == 0:
        gl.store(aux_ptr, 0.0)
