"""Compiles kernels for Hopper, on any machine, and prints what its assembler says of each (JSON).

The warp-specialised ones, and some of Triton's where registers are short. A process of its own: where the tests
run without a GPU, kernels are interpreted. Gluon has no interpreter, and Triton's accepts what its compiler refuses.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.language import target_info

from grmoe.kernels import (
    decode_attention,
    dispatch,
    experts,
    fused_backward,
    grouped_gemm,
    hopper,
    hopper_gate,
    hopper_gemm,
    hopper_hidden,
    hopper_weights,
    metrics,
    one_token,
    rotary,
    rows,
    scores,
    thin_gate,
    thin_linear,
)
from grmoe.kernels import (
    gate as gate_module,
)

triton.knobs.nvidia.dump_ptxas_log = True  # Triton prints what its assembler says
HOPPER = GPUTarget("cuda", 90, 32)


def current_target() -> GPUTarget:
    """In place of Triton's, which asks a driver: kernels look up what they are compiled for."""
    return HOPPER


current_target.__triton_builtin__ = True  # type: ignore[attr-defined]
target_info.current_target = current_target


def tiles(rows: int, columns: int = 64) -> str:
    return f"tensordesc<bf16[{rows}, {columns}],{hopper.layout(rows, columns, torch.bfloat16)!r}>"


def check_waits(made: Any, kernel: Any, early: bool) -> None:
    """A kernel that starts early waits once, before its first access to memory. Others neither wait nor let the next
    one start: a library's kernel may start early by its own choice."""
    if not early:
        assert "griddepcontrol" not in made.asm["ptx"], kernel.fn.__name__
        return
    before, waits, after = made.asm["ptx"].partition("griddepcontrol.wait;")
    assert waits, kernel.fn.__name__
    assert "griddepcontrol.wait;" not in after, kernel.fn.__name__
    body = before[before.index("{") :]
    assert not re.search(r"\b(ld|st|atom|red)\.(global|async)|\bcp\.async\.(ca|cg|bulk)", body), (
        kernel.fn.__name__
    )


def check_shared(made: Any, kernel: Any) -> None:
    """Groups of warps hold all shared memory to the end. What none of them holds, the compiler gives to others, and
    memory that was set up as a barrier must not be written as anything else."""
    text = made.asm["ttgir"]
    (held,) = re.findall(r"ttg\.warp_specialize\((.*?)\)", text)
    assert set(re.findall(r"(%\S+) = ttg\.local_alloc", text)) <= set(held.split(", ")), kernel.fn.__name__


def disassembled(made: Any) -> str:
    """All of it: Triton's own listing ends after 64 KB."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def remarks(said: str, made: Any) -> str:
    """What the assembler says, and a line for each tensor core's address that it moves from threads' registers between
    two products of a step: there all threads agree, but the compiler did not see it."""
    _, *steps = disassembled(made).split("WARPGROUP.ARRIVE")
    products = (step.split("WARPGROUP.DEPBAR")[0] for step in steps)
    moved = sum(text[text.find("HGMMA") : text.rfind("HGMMA")].count("R2UR") for text in products)
    return f"{said}\n{moved} addresses of tensor cores from threads"


def assembler(kernel: Any, types: dict[str, str], constants: dict[str, Any], early: bool = True) -> str:
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr")}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, values, aligned)
    with redirect_stdout(StringIO()) as said:
        made = triton.compile(source, target=HOPPER, options={"num_warps": 4, "launch_pdl": early})
    check_waits(made, kernel, early)
    check_shared(made, kernel)
    return remarks(said.getvalue(), made)


def gate(
    N: int,
    diagonal: bool,
    elastic: int = 0,
    per_row: bool = False,
    K: int = 64,
    keep: bool = False,
    lead: int = 0,
) -> str:
    floats = [
        "log_kappa",
        "prior",
        "alpha",
        "weight_alpha",
        "tau",
        "bias",
        "logits",
        "probs",
        "weights",
        "norm",
        "aux",
    ]
    types = {
        **{f"{name}_ptr": "*fp32" for name in floats},
        "x_desc": tiles(128),
        "packed_desc": tiles(256),
        "kept_ptr": "*bf16",
        "selected_ptr": "*u8",
        "cap_ptr": "*i32",
        "key_ptr": "*i64",
        "first_row_ptr": "*i64",
        "num_tokens": "i32",
        "energy_scale": "fp32",
        "length": "i32",
        "layer": "i32",
    }
    constants = {
        "D": 2048,
        "K": K,
        "C": K * N,
        "num_experts": N,
        "DIAGONAL": diagonal,
        "POSTERIOR": True,
        "MODE": 1,
        "MAX_EXPERTS": 2,
        "RENORMALIZE": True,
        "PER_ROW": per_row,
        "APART": per_row,
        "BIASED": per_row,
        "ELASTIC": elastic,
        "UNIT": 0,
        "KEEP": keep,
        "NP": N,
        "BT": 128,
        "BC": 256,
        "BD": 64,
        "STAGES": 4,
        "LEAD": lead,
    }
    return assembler(hopper_gate.gate_kernel, types, constants)


def gemm(
    activation: int, save: bool, K: int = 768, gather: bool = True, transposed: bool = True, lead: int = 0
) -> str:
    columns = 128 if activation == 1 else 256
    types = {
        **{f"{name}_ptr": "*bf16" for name in ("a", "out", "inner")},
        "token_ptr": "*i32",
        "offset_ptr": "*i32",
        "a_desc": "*bf16" if gather else tiles(128),
        "b_desc": tiles(columns) if transposed else tiles(64, 256),
    }
    constants = {
        "num_experts": 8,
        "K": K,
        "O": 1000,
        "B_ROWS": (1000 if transposed else K) * (2 if activation == 1 else 1),
        "GATHER": gather,
        "TRANSPOSED": transposed,
        "ACTIVATION": activation,
        "SAVE": save,
        "BM": 128,
        "BO": columns,
        "BK": 64,
        "GROUP": 16,
        "NP": grouped_gemm.listed(8),
        "STAGES": 4,
        "LEAD": lead,
    }
    return assembler(hopper_gemm.grouped_kernel, types, constants)


def hidden(glu: bool, D: int, I: int, lead: int = 0) -> str:
    types = {
        **{f"{name}_ptr": "*bf16" for name in ("grad", "down", "inner", "grad_inner", "hidden")},
        **{f"{name}_ptr": "*i32" for name in ("token", "pair", "offset")},
        **{f"{name}_ptr": "*fp32" for name in ("weight", "partial")},
        "down_desc": tiles(64, 256),
    }
    constants = {
        "num_experts": 8,
        "D": D,
        "I": I,
        "GLU": glu,
        "BM": 128,
        "BI": 256,
        "BD": 64,
        "GROUP": 16,
        "NP": grouped_gemm.listed(8),
        "STAGES": 4,
        "LEAD": lead,
    }
    return assembler(hopper_hidden.hidden_gradient_kernel, types, constants)


def weights(turned: bool, D: int, O: int, lead: int = 0, early: bool = True) -> str:
    types = {
        **{f"{name}_ptr": "*bf16" for name in ("x", "rows", "out")},
        **{f"{name}_ptr": "*i32" for name in ("token", "offset")},
        "rows_desc": tiles(64, 256),
    }
    constants = {
        "num_tiles": 100,
        "D": D,
        "O": O,
        "TURNED": turned,
        "BD": 128,
        "BO": 256,
        "BA": 64,
        "STAGES": 4,
        "LEAD": lead,
    }
    return assembler(hopper_weights.gathered_gradient_kernel, types, constants, early)


TYPES = {
    torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int32: "i32", torch.uint8: "u8"
}  # fmt: skip
launched: dict[str, str] = {}


def compile_launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: Any,
    constants: Any,
    warps: int = 4,
    stages: int = 3,
    fuse: bool = True,
    early: bool = True,
) -> None:
    """In place of `grmoe.kernels.launch.launch`: compiles for Hopper and keeps what the assembler says."""
    names = kernel.arg_names
    signature, aligned = dict.fromkeys(names, "constexpr"), {}
    for i, (name, arg) in enumerate(zip(names, args, strict=False)):
        if isinstance(arg, Tensor):
            signature[name], aligned[(i,)] = f"*{TYPES[arg.dtype]}", [["tt.divisibility", 16]]
        elif isinstance(arg, int | float):
            signature[name] = "i32" if isinstance(arg, int) else "fp32"
        else:
            signature[name] = f"tensordesc<{TYPES[arg.base.dtype]}{arg.block_shape}>"
    values = {(len(args) + i,): value for i, value in enumerate(constants)}
    source = ASTSource(kernel, signature, values, aligned)
    with redirect_stdout(StringIO()) as said:
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fuse, "launch_pdl": early}
        made = triton.compile(source, target=HOPPER, options=options)
    check_waits(made, kernel, early)
    assert made.metadata.shared <= 227 * 1024, kernel.fn.__name__
    # A product and a sum in one operation would be rounded once, and not have the bits of PyTorch's two.
    assert kernel is not rotary.rotate_kernel or "fma" not in made.asm["ptx"]
    if said.getvalue():  # nothing is said of a kernel that was compiled before
        launched[f"{kernel.fn.__name__} {len(launched)}"] = said.getvalue()


def compile_launches() -> dict[str, str]:
    """Triton's kernels as their callers launch them. Memory is reserved, never touched."""
    triton_alone = (dispatch, grouped_gemm, thin_gate, fused_backward, metrics, gate_module, scores, rows)
    for module in (*triton_alone, decode_attention, rotary, thin_linear, one_token):
        module.launch = compile_launch
    for module in (grouped_gemm, fused_backward, decode_attention):
        module.num_programs, module.specialises = lambda _: 132, lambda _: False
    wide, bf16 = torch.float32, torch.bfloat16

    def make(*shape: int, dtype: torch.dtype = wide) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    for T, N in ((1, 64), (32768, 128)):
        gates = make(T, N), make(T, N), make(T, N, dtype=torch.bool)
        dispatch._forward(*gates[1:], 8)
        limits, sums = (make(), make(dtype=torch.int32)), (make(3 * N + 4, dtype=torch.float64), make(N + 1))
        metrics._add_counts(*gates, *limits, *sums, metrics.PRIORS["candidates"], 8)
    with torch.device("meta"):  # one of the kernels around them is PyTorch's
        probs, selected, x = make(32768, 128), make(32768, 128, dtype=torch.bool), make(32768, 64, dtype=bf16)
        weights, packed = make(128, 64), make(128, 64, dtype=bf16)
        gate_module.is_hopper = lambda _: True
        given = (x, weights, None, make(), probs, probs, selected, make(1), packed, packed[:0])
        gate_module._backward(None, None, probs, None, *given, 1.0, True, True, False)
        x, packed = make(32768, 2048, dtype=bf16), make(32 * 64, 2048, dtype=bf16)
        chosen = probs[:, :64], probs[:, :64], selected[:, :64], make(32768), packed
        for kept in (packed[:0], make(32768, 32 * 64, dtype=bf16)):
            given = (x, make(64, 2048, 32), make(64), make(), *chosen, kept)
            gate_module._backward(None, None, probs[:, :64], None, *given, 1.0, True, True, False)
        parts = scores.Parts(probs, make(128), probs, probs, make(32768))
        scores._Blend.apply(1.0, *parts)
        scores._blend_backward(probs, parts, 1.0)
    thin_gate.sum_parts(make(40, 2048), make(16, 2048), None, make(1))
    thin_gate.sum_parts(make(128, 2048, dtype=bf16), make(16, 2048, 32), make(16), make(128))
    tiles = experts.thin_engines(experts.engines(bf16, True), 1024, 64, 128)
    up, token, offset = (
        make(64, 2048, 2048, dtype=bf16),
        make(1024, dtype=torch.int32),
        make(64, dtype=torch.int32),
    )
    given = (make(128, 2048, dtype=bf16), up, offset, tiles.up)
    grouped_gemm.grouped_gemm(*given, token=token, transposed=True, activation=1)
    x, listed = make(128, 2048, dtype=bf16), make(1024, 1024, dtype=bf16)
    fused_backward.gathered_gradient(x, listed, token, offset, experts.GRADIENT, turned=False)
    with torch.device("meta"):
        q, keys, angles = (
            make(32, 16, 1, 128, dtype=bf16),
            make(32, 4, 4096, 128, dtype=bf16),
            make(32, 1, 128, dtype=bf16),
        )
        decode_attention._attend(q, keys, keys, make(32, 1, 1, 4096, dtype=torch.bool), 1.0)
        rotary.rotate(q, keys[:, :, :1], angles, angles)
    for T, I in ((1, 5504), (32, 5504)):
        x, gate, up, down = (
            make(T, 2048, dtype=bf16),
            *(make(I, 2048, dtype=bf16),) * 2,
            make(2048, I, dtype=bf16),
        )
        inner = thin_linear._apply(x, [gate, up], make(2048, dtype=bf16), 1e-5, None, thin_linear.SWIGLU)
        thin_linear._apply(inner, [down], None, 0.0, x, thin_linear.NONE)
        projections = [make(2048, 2048, dtype=bf16), *(make(512, 2048, dtype=bf16),) * 2]
        thin_linear._apply(x, projections, make(2048, dtype=bf16), 1e-5, None, thin_linear.NONE)
    gates = make(1, 64), make(1, 64, dtype=torch.bool)
    weights = make(64, 2048, 2048, dtype=bf16), make(64, 2048, 1024, dtype=bf16)
    one_token._experts(make(1, 2048, dtype=bf16), *gates, *weights, 8, True)
    for rows.launch in (compile_launch, partial(compile_launch, early=False)):
        rows.combine(make(1024, 2048, dtype=bf16), make(128, 8, dtype=torch.int32), make(128, 8))
    return launched


if __name__ == "__main__":
    said = {
        "gate 64, diagonal": gate(64, True),
        "gate 32, projection kept": gate(32, False, keep=True),
        "gate 16, one group ahead": gate(16, False, lead=3),
        "gate 16, two tiles, drawn budgets, numbers per sequence": gate(16, False, 1, True, K=32),
        "up, SwiGLU": gemm(1, True),
        "up, SwiGLU, one group ahead": gemm(1, True, lead=2),
        "up, GELU, width 200": gemm(2, True, 200),
        "down, one group ahead": gemm(0, False, 1536, gather=False, lead=2),
        "gradient of rows": gemm(0, False, 1536, gather=False, transposed=False),
        "hidden gradient, SwiGLU, width 200": hidden(True, 200, 1000),
        "hidden gradient, SwiGLU, one group ahead": hidden(True, 768, 1000, lead=2),
        "weight gradient, turned, width 200": weights(True, 200, 1000),
        "weight gradient, one group ahead": weights(False, 768, 1000, lead=2),
        "weight gradient, not early": weights(False, 768, 1000, early=False),
        **compile_launches(),
    }
    json.dump(said, sys.stdout)
