"""Kernels that start early wait before they touch memory. `compile_for_hopper.py` checks the compiled ones."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from grmoe.kernels import launch as module
from grmoe.kernels import runtime


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(Path(module.__file__).parent.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list:
                yield f"{path.stem}.{node.name}", node


@pytest.mark.parametrize(
    ("name", "kernel"), list(kernels()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_kernel_begins_by_waiting_for_its_inputs(name: str, kernel: ast.FunctionDef) -> None:
    statements = [
        s for s in kernel.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
    ]
    assert ast.unparse(statements[0]) == "await_inputs()", name


@pytest.mark.parametrize(
    ("wanted", "generation", "early"), [(True, 9, True), (True, 8, False), (False, 9, False)]
)
def test_kernels_start_early_where_that_is_wanted_and_the_device_can(
    wanted: bool, generation: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    class Kernel:
        fn = SimpleNamespace()

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: asked.append(options)

    monkeypatch.setattr(module, "EARLY", wanted)
    monkeypatch.setattr(runtime, "_generation", lambda _: generation)
    monkeypatch.setattr(torch.cuda, "device", lambda _: pytest.MonkeyPatch.context())
    module._launch_anew(Kernel(), (1,), (), (), 4, 3, True, torch.device("cuda", 0))
    assert [options["launch_pdl"] for options in asked] == [early]
