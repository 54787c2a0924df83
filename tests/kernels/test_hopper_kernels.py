"""The warp-specialised kernels where there is no Hopper: they compile for it, and Triton's stand in for them.

`test_hopper_emulated` computes with them. tests/gpu compares their bits with the Triton kernels'.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grmoe import kernels
from grmoe.kernels import fused_backward as backward_module
from grmoe.kernels import gate as gate_module
from grmoe.kernels import gate_tiles, runtime
from grmoe.kernels import grouped_gemm as gemm_module
from grmoe.kernels.gate import gate
from grmoe.kernels.grouped_gemm import Tiles, grouped_gemm

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def test_they_compile_for_hopper_and_keep_the_tensor_cores_asynchronous(tmp_path: Path) -> None:
    """Too few registers, and the assembler waits behind every product and moves sums to memory, with a remark only."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, Path(__file__).with_name("compile_for_hopper.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert len(said) == 45
    for name, remarks in said.items():
        assert "wgmma" not in remarks, (name, remarks)
        (spilled,) = re.findall(r"(\d+) bytes spill stores", remarks)
        assert int(spilled) < 256, (name, remarks)  # sums alone are 512 bytes a thread
        assert " addresses of" not in remarks or "\n0 addresses of" in remarks, (name, remarks)


def wide_gate() -> tuple[Tensor, ...]:
    """At a shape whose tiles are the wide ones."""
    torch.manual_seed(0)
    x, frames = torch.randn(5, 16), torch.randn(16, 16, 32)
    results = gate(
        x,
        frames,
        torch.rand(16),
        torch.zeros(16),
        torch.tensor(1.0),
        tau=torch.tensor(2.0),
        cap=torch.tensor(2, dtype=torch.int32),
        mode=runtime.LARGEST,
        max_experts=2,
        renormalize=True,
    )
    return results[:4]


def up_projection() -> Tensor:
    torch.manual_seed(0)
    token, offset = torch.randint(0, 5, (7,), dtype=torch.int32), torch.tensor([3, 7], dtype=torch.int32)
    return grouped_gemm(
        torch.randn(5, 16, dtype=torch.float16), torch.randn(2, 32, 16, dtype=torch.float16), offset,
        Tiles(16, 16, 16, 4, 2), token=token, transposed=True, activation=1,
    )  # fmt: skip


def weight_gradient() -> Tensor:
    torch.manual_seed(0)
    x, listed = torch.randn(5, 16, dtype=torch.float16), torch.randn(7, 16, dtype=torch.float16)
    token, offset = torch.randint(0, 5, (7,), dtype=torch.int32), torch.tensor([3, 7], dtype=torch.int32)
    tiles = Tiles(16, 16, 16, 4, 2)
    return backward_module.gathered_gradient(x, listed, token, offset, tiles, turned=True)


def hidden_gradient() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    grad, inner = torch.randn(7, 16, dtype=torch.float16), torch.randn(7, 32, dtype=torch.float16)
    down, offset = torch.randn(2, 16, 16, dtype=torch.float16), torch.tensor([3, 7], dtype=torch.int32)
    order = torch.randperm(7).int()
    given = (grad, down, inner, order, order, torch.rand(7, 1), offset, Tiles(16, 16, 16, 4, 2))
    return backward_module.hidden_gradient(*given, glu=True)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("name", "module", "run"),
    [
        ("gate for Hopper", gate_module, wide_gate),
        ("first GEMM for Hopper", gemm_module, up_projection),
        ("hidden gradient for Hopper", backward_module, hidden_gradient),
        ("weight gradient for Hopper", backward_module, weight_gradient),
    ],
)
def test_where_gluon_has_changed_triton_does_the_work(
    name: str, module: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = gate_module.WIDE
    monkeypatch.setattr(
        gate_module, "plan", lambda *_: gate_tiles.Plan(16, 512, wide, wide, wide, wide, "ieee")
    )
    want = run()
    monkeypatch.setattr(module, "specialises", lambda _: True)
    # Its import fails, whether or not another test has imported it.
    monkeypatch.setitem(sys.modules, "grmoe.kernels.hopper", None)
    monkeypatch.delattr(kernels, "hopper", raising=False)
    with pytest.warns(RuntimeWarning, match=f"the kernel '{name}' did not compile"):
        assert same(run(), want)
    assert runtime.failures() == [name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert same(run(), want)
