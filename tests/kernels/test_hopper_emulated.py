"""The warp-specialised kernels, emulated: right results in whatever order groups of warps and copies come."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from gluon_emulator import Deadlock, Emulator, emulate
from torch import Tensor
from torch.nn.functional import gelu, silu

pytest.importorskip("triton")

from grmoe.kernels import fused_backward, grouped_gemm, hopper, hopper_gemm, runtime
from grmoe.kernels import gate as gate_module
from grmoe.kernels.experts import GRADIENT, engines
from grmoe.kernels.gate import gate

BF16 = torch.bfloat16
TILES = engines(BF16, True)
LEADS = [0, 1, 2, 3, 4]


@pytest.fixture(params=LEADS)
def lead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(hopper, "LEAD", request.param)
    return int(request.param)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels for Hopper are emulated, by two programs. Names of those that were."""
    names: list[str] = []

    def launch(
        kernel: Any, grid: tuple[int, ...], args: Any, constants: Any, *rest: Any, module: Any
    ) -> None:
        if "hopper" in kernel.fn.__module__:
            names.append(kernel.fn.__name__)
            emulate(kernel, grid, args, constants, seed=len(names))
        else:
            real[module](kernel, grid, args, constants, *rest)

    real = {module: module.launch for module in (grouped_gemm, fused_backward, gate_module)}
    for module in real:
        monkeypatch.setattr(module, "launch", partial(launch, module=module))
        monkeypatch.setattr(module, "specialises", lambda _: True)
        monkeypatch.setattr(module, "num_programs", lambda _: 2, raising=False)
    monkeypatch.setattr(grouped_gemm, "ALL_SPECIALISED", True)
    return names


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(BF16)


def ranges(offset: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end)."""
    ends = offset.tolist()
    return [(e, start, end) for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]


def close(a: Tensor, b: Tensor) -> None:
    assert (a.float() - b).norm() <= 1e-2 * b.norm()


def act(inner: Tensor, activation: int) -> Tensor:
    if activation == 1:
        first, up = inner.chunk(2, -1)
        return silu(first) * up
    return gelu(inner) if activation == 2 else inner


# An expert with many tiles, one with none, one with a row; rows behind the last are nobody's.
OFFSET = torch.tensor([300, 300, 301, 430], dtype=torch.int32)
# One with too few rows for a lead, between others.
LATE = torch.tensor([300, 320, 620, 920], dtype=torch.int32)
ROWS, TOKENS = 450, 70


def weights(*shape: int, scale: float) -> Tensor:
    """Of four experts. Those of an idle one are NaN, which no other one may see."""
    made = normal(4, *shape, seed=1, scale=scale)
    made[1] = torch.nan
    return made


def tokens(width: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """(x, the token of each row). Token 0 is nobody's and NaN: rows that are not used may be read from there."""
    x, generator = normal(TOKENS, width), torch.Generator().manual_seed(2)
    x[0] = torch.nan
    return x, torch.randint(1, TOKENS, (rows,), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize(("activation", "save"), [(1, True), (2, True), (1, False)])
@pytest.mark.parametrize(
    ("K", "O"), [(320, 200), (200, 264)]
)  # of whole steps and not; the last with few of them
def test_first_gemm(activation: int, save: bool, K: int, O: int, lead: int, emulated: list[str]) -> None:
    (x, token), up = tokens(K), weights(O * (2 if activation == 1 else 1), K, scale=K**-0.5)
    inner = torch.full((ROWS, up.shape[1]), torch.nan, dtype=BF16) if save else None
    out = grouped_gemm.grouped_gemm(
        x, up, OFFSET, TILES.up, token=token, transposed=True, activation=activation, inner=inner
    )
    assert emulated == ["grouped_kernel"]
    for e, start, end in ranges(OFFSET):
        exact = x[token[start:end].long()].float() @ up[e].float().T
        close(out[start:end], act(exact, activation))
        if inner is not None:
            close(inner[start:end], exact)
    assert inner is None or inner[int(OFFSET[-1]) :].isnan().all()


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    ("K", "O"), [(320, 264), (192, 520)]
)  # the last with fewer steps than tiles in flight
def test_second_gemm(transposed: bool, K: int, O: int, lead: int, emulated: list[str]) -> None:
    a, b = normal(ROWS, K), weights(*((O, K) if transposed else (K, O)), scale=K**-0.5)
    a[int(OFFSET[-1]) :] = torch.nan
    out = grouped_gemm.grouped_gemm(a, b, OFFSET, TILES.plain, transposed=transposed)
    assert emulated == ["grouped_kernel"]
    for e, start, end in ranges(OFFSET):
        close(out[start:end], a[start:end].float() @ (b[e].float().T if transposed else b[e].float()))


@pytest.mark.parametrize("transposed", [True, False])
def test_a_step_that_is_not_whole(transposed: bool, emulated: list[str]) -> None:
    """Behind B's rows the next expert's follow, so only Triton's kernel takes B whose rows are summed over."""
    assert grouped_gemm.WHOLE == hopper.INNER
    K, O = 200, 264
    a, b = normal(ROWS, K).half(), weights(*((O, K) if transposed else (K, O)), scale=K**-0.5).half()
    out = grouped_gemm.grouped_gemm(a, b, OFFSET, TILES.plain, transposed=transposed)
    assert emulated == (["grouped_kernel"] if transposed else [])
    for e, start, end in ranges(OFFSET):
        close(out[start:end], a[start:end].float() @ (b[e].float().T if transposed else b[e].float()))


@pytest.mark.parametrize(
    ("glu", "D", "I", "spend"), [(True, 320, 264, True), (False, 200, 40, False), (False, 200, 264, True)]
)
def test_hidden_gradient(glu: bool, D: int, I: int, spend: bool, lead: int, emulated: list[str]) -> None:
    used, generator = int(OFFSET[-1]), torch.Generator().manual_seed(3)
    grad, down = normal(TOKENS * 8, D), weights(D, I, scale=D**-0.5)
    grad[0] = torch.nan
    inner = normal(ROWS, I * (1 + glu), seed=2)
    inner[used:] = torch.nan
    leaf = inner[:used].float().requires_grad_()
    pair = 1 + torch.randperm(TOKENS * 8 - 1, generator=generator)[:ROWS].int()
    token, weight = pair, torch.rand(TOKENS * 8, 1, generator=generator)
    grad_inner, hidden, grad_weight = fused_backward.hidden_gradient(
        grad, down, inner, token, pair, weight, OFFSET, TILES.up, glu=glu, spend=spend
    )
    assert emulated == ["hidden_gradient_kernel"]
    assert (grad_inner.data_ptr() == inner.data_ptr()) == spend
    h = act(leaf, 1 if glu else 2)
    q = torch.cat([grad[token[s:t].long()].float() @ down[e].float() for e, s, t in ranges(OFFSET)])
    row_weight = weight[pair[:used].long()]
    (row_weight * q * h).sum().backward()
    close(grad_inner[:used], leaf.grad)
    close(hidden[:used], (row_weight * h).detach())
    close(grad_weight[pair[:used].long(), 0], (q * h).sum(-1).detach())


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(
    ("D", "offset"), [(136, OFFSET), (72, OFFSET), (72, LATE), (72, torch.zeros_like(OFFSET))]
)  # two tiles of an expert for each program, or one
def test_weight_gradient(turned: bool, D: int, offset: Tensor, lead: int, emulated: list[str]) -> None:
    O, used = 264, int(offset[-1])
    (x, token), rows = tokens(D, used + 20), normal(used + 20, O, seed=1)
    rows[used:] = torch.nan
    found = fused_backward.gathered_gradient(x, rows, token, offset, GRADIENT, turned=turned)
    assert emulated == ["gathered_gradient_kernel"]
    for e, start, end in ranges(offset):
        exact = x[token[start:end].long()].float().T @ rows[start:end].float()
        close(found[e], exact.T if turned else exact)


@pytest.mark.parametrize(
    ("mode", "diagonal", "per_row"),
    [(runtime.LARGEST, False, False), (runtime.ABOVE, True, False), (runtime.DENSE, False, True)],
)
def test_gate(
    mode: int, diagonal: bool, per_row: bool, lead: int, emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside Triton's kernel, which is interpreted: two tiles of tokens and of columns, and a last step in part."""
    T, D, N, K = 150, 296, 13, 32  # more steps than stages: a tile is refilled with another one
    g = torch.Generator().manual_seed(mode)
    x = torch.randn(T, D, generator=g).half()
    x[7] = 0.0
    frames = torch.linalg.qr(torch.randn(N, D, K, generator=g))[0].contiguous().requires_grad_()
    log_kappa = torch.randn(*((N, K) if diagonal else (N,)), generator=g)
    numbers = (3,) if per_row else ()  # sequences of 50 tokens
    limits = {
        "tau": torch.full(numbers, 0.2 if mode == runtime.ABOVE else 0.7),
        "cap": torch.full(numbers, 3, dtype=torch.int32),
    }
    monkeypatch.setattr(gate_module, "KEPT_COLUMNS", 0)

    def run() -> list[Tensor]:
        results = gate(
            x, frames, log_kappa, torch.randn(N, generator=torch.Generator().manual_seed(1)),
            0.5 + torch.rand(numbers, generator=torch.Generator().manual_seed(2)), energy_scale=D / K, mode=mode,
            max_experts=N if mode == runtime.DENSE else 3, renormalize=False, length=50, **limits,
        )  # fmt: skip
        return [*results[:4], torch.autograd.grad(results[0].sum(), frames)[0]]

    special = run()
    assert emulated == ["gate_kernel"]
    monkeypatch.setattr(gate_module, "specialises", lambda _: False)
    plain = run()
    assert emulated == ["gate_kernel"]
    for a, b in zip(special, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)  # the projection is kept in 16 bits


def run(seed: int) -> None:
    """Several tiles for each program, in some order."""
    a, b = normal(ROWS, 320), normal(4, 520, 320, seed=1, scale=0.05)
    kernel_seed = 1000 * seed
    out = torch.full((ROWS, 520), torch.nan, dtype=BF16)
    args = (
        a,
        hopper.swizzled(a, 128, 64),
        hopper.swizzled(b.view(-1, 320), 256, 64),
        out,
        out,
        OFFSET,
        OFFSET,
    )
    constants = (4, 320, 520, 520, False, True, 0, False, 128, 256, 64, 16, 32, 4, hopper.lead(320))
    emulate(hopper_gemm.grouped_kernel, (2,), args, constants, kernel_seed)
    for e, start, end in ranges(OFFSET):
        close(out[start:end], a[start:end].float() @ b[e].float().T)


def test_without_rows_nothing_is_computed(lead: int, emulated: list[str]) -> None:
    """And no group waits for another."""
    none = torch.zeros_like(OFFSET)
    a, up = tokens(320)[0], weights(200, 320, scale=1.0)
    inner = torch.full((ROWS, 200), torch.nan, dtype=BF16)
    token = torch.zeros(ROWS, dtype=torch.int32)
    options = {"token": token, "transposed": True, "activation": 2, "inner": inner}
    grouped_gemm.grouped_gemm(a, up, none, TILES.up, **options)  # type: ignore[arg-type]
    assert emulated == ["grouped_kernel"]
    assert inner.isnan().all()


def several_gemms() -> None:
    for seed in range(2):
        run(seed)


def several_gradients() -> None:
    (x, token), rows = tokens(72, int(LATE[-1])), normal(int(LATE[-1]), 264, seed=1)
    for _ in range(3):
        fused_backward.gathered_gradient(x, rows, token, LATE, GRADIENT, turned=False)


@pytest.mark.parametrize("work", [several_gemms, several_gradients])
def test_one_group_goes_ahead(work: Any, lead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its LEAD steps of a tile are on their way before the other one begins, if the tile has four steps at least."""
    issued: dict[Emulator, tuple[list[int], list[int]]] = {}  # products of each tile, by group
    begun: list[
        tuple[list[int], int, int]
    ] = []  # the first group's, a tile of the second's, products there so far
    multiply = Emulator.multiply

    def count(self: Emulator, a: Any, b: Any, total: Any, is_async: bool) -> Any:
        assert self.machine.here is not None
        groups = issued.setdefault(self, ([], []))
        group = self.machine.groups.index(self.machine.here)
        if isinstance(total, Tensor):  # the first product of a tile
            groups[group].append(0)
            tile = len(groups[1]) - 1
            if group == 1:
                done = groups[0][tile] if tile < len(groups[0]) else 0
                begun.append((groups[0], tile, done))
        groups[group][-1] += 1
        return multiply(self, a, b, total, is_async)

    monkeypatch.setattr(Emulator, "multiply", count)
    work()
    ahead = [done for first, tile, done in begun if first[tile] >= hopper.STAGES]
    assert len(ahead) > 10
    assert min(ahead) >= lead
    assert lead > 0 or min(ahead) == 0  # by chance either one is ahead


@pytest.mark.usefixtures("lead")
def test_any_order_gives_the_same() -> None:
    for seed in range(4):
        run(seed)


def without_waits(self: Emulator, barrier: Any, phase: Any, pred: Any = True) -> None:
    self.machine.wait()


def arriving_once(self: Emulator, barrier: Any, count: int = 1, pred: Any = True) -> None:
    if pred and barrier.phase == 0:
        barrier.arrive(count)
    self.machine.wait()


@pytest.mark.parametrize(
    ("name", "broken", "error"),
    [("wait", without_waits, AssertionError), ("arrive", arriving_once, Deadlock)],
)
def test_mistakes_would_be_noticed(
    name: str, broken: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Emulator, name, broken)
    for seed in range(3):
        with pytest.raises(error):
            run(seed)
