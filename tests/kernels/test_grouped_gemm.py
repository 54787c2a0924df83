"""The grouped GEMM and its weight gradient against loops over experts in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

import triton
import triton.language as tl

from grmoe.kernels import grouped_gemm as module
from grmoe.kernels.grouped_gemm import Tiles, grouped_gemm, listed, locate, weight_gradient

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

NAN = float("nan")
SMALL = Tiles(32, 32, 32, 4, 2)
# Rows of each expert: several tiles, none (first, middle and last), one, exactly one tile.
LOADS = [[70, 0, 1, 32], [0, 5, 0, 40, 0], [33], [0, 0, 3]]
SPARE = 7  # unused rows behind


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def offsets(load: list[int]) -> Tensor:
    return torch.tensor(load).cumsum(0).to(torch.int32)


def act(inner: Tensor, activation: int) -> Tensor:
    if activation == 1:
        first, up = inner.chunk(2, -1)
        return F.silu(first) * up
    return F.gelu(inner) if activation == 2 else inner


def loop(a: Tensor, b: Tensor, load: list[int], transposed: bool) -> Tensor:
    """Pre-activations of the used rows, fp64."""
    parts = a[: sum(load)].double().split(load)
    return torch.cat([p @ (m.T if transposed else m) for p, m in zip(parts, b.double(), strict=True)])


def check(
    load: list[int],
    K: int,
    O: int,
    tiles: Tiles = SMALL,
    gather: bool = False,
    transposed: bool = True,
    activation: int = 0,
    save: bool = False,
    spoil: float = 0.0,
) -> None:
    N, used = len(load), sum(load)
    A, wide = used + SPARE, 2 * O if activation == 1 else O
    b = random(N, wide, K, seed=1) if transposed else random(N, K, wide, seed=1)
    b = b / K**0.5
    if gather:
        x = random(50, K, seed=2)
        token = torch.randint(50, (A,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
        token[used:] = 0
        rows, options = x[token.long()], {"token": token}
    else:
        x = rows = random(A, K, seed=2)
        x[used:] = NAN
        options = {}
    inner = torch.full((A, wide), NAN) if save else None
    kinds: dict[str, Any] = {"transposed": transposed, "activation": activation, "inner": inner, **options}
    out = grouped_gemm(x, b, offsets(load), tiles, **kinds)
    before = loop(rows, b, load, transposed)
    before = before * (1 + spoil)
    # Sums of at most a hundred terms of size 1/√K: 1e-6, and the activations' slopes are near one.
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out[:used].double(), act(before, activation), **close)
    assert out.shape == (A, O)
    assert out[used:].isnan().all()  # untouched
    if inner is not None:
        torch.testing.assert_close(inner[:used].double(), before, **close)
        assert inner[used:].isnan().all()


@pytest.mark.parametrize("load", LOADS, ids=str)
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_loads(load: list[int], gather: bool, transposed: bool) -> None:
    check(load, K=36, O=40, gather=gather, transposed=transposed)


@pytest.mark.parametrize("activation", [0, 1, 2])
@pytest.mark.parametrize("gather", [True, False])
def test_activations_and_what_they_save(activation: int, gather: bool) -> None:
    for save in (True, False):
        check([40, 0, 9], K=32, O=20, gather=gather, activation=activation, save=save)


@pytest.mark.parametrize(("K", "O"), [(4, 4), (32, 32), (68, 100), (100, 68)])
@pytest.mark.parametrize("transposed", [True, False])
def test_widths(K: int, O: int, transposed: bool) -> None:
    check([40, 9], K, O, transposed=transposed, activation=1 if transposed else 0)


@pytest.mark.parametrize("programs", [1, 3, 1000])
@pytest.mark.parametrize("group", [1, 2, 16])
def test_grid_and_order_of_tiles(monkeypatch: pytest.MonkeyPatch, programs: int, group: int) -> None:
    """A persistent grid smaller than, unequal to and larger than its tiles."""
    monkeypatch.setattr(module, "num_programs", lambda device: programs)
    check([70, 0, 40], K=32, O=68, tiles=SMALL._replace(group=group))


@pytest.mark.parametrize("change", [{"flatten": True}, {"rows": 64, "inner": 16}])
def test_other_tiles(change: dict[str, Any]) -> None:
    check([70, 0, 40], K=36, O=40, tiles=SMALL._replace(**change), gather=True)


def test_half_precision() -> None:
    load = [40, 3]
    a, b = random(43, 32).half(), (random(2, 24, 32, seed=1) / 6).half()
    out = grouped_gemm(a, b, offsets(load), SMALL, transposed=True)
    assert out.dtype == torch.float16
    # Sums in fp32, one rounding to 11 bits.
    torch.testing.assert_close(out.double(), loop(a, b, load, True), rtol=2**-10, atol=2**-12)


@pytest.mark.parametrize("load", LOADS, ids=str)
@pytest.mark.parametrize(("M", "O"), [(36, 40), (4, 68)])
def test_weight_gradient(load: list[int], M: int, O: int) -> None:
    used = sum(load)
    p, q = random(used + SPARE, M), random(used + SPARE, O, seed=1)
    p[used:], q[used:] = NAN, NAN  # beyond the last row
    expected = torch.stack(
        [a.T @ b for a, b in zip(p[:used].double().split(load), q[:used].double().split(load), strict=True)]
    )
    out = weight_gradient(p, q, offsets(load), SMALL)
    # Sums of at most seventy products.
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for e, rows in enumerate(load):
        assert rows or not out[e].any()  # an idle expert gets zeros


def test_nothing_used() -> None:
    offset = offsets([0, 0])
    out = grouped_gemm(random(5, 32), random(2, 8, 32), offset, SMALL, transposed=True)
    assert out.isnan().all()
    p = torch.full((5, 32), NAN)
    assert not weight_gradient(p, p, offset, SMALL).any()


@pytest.mark.parametrize("transposed", [True, False])
def test_weights_of_another_expert_never_leak(transposed: bool) -> None:
    """Expert 1 holds NaN: where widths are not whole tiles, a tile of expert 0 reaches into it."""
    a, b = random(10, 36), random(2, 40, 36) if transposed else random(2, 36, 40)
    b[1] = NAN
    assert grouped_gemm(a, b, offsets([10, 0]), SMALL, transposed=transposed).isfinite().all()


@pytest.mark.parametrize("options", [{}, {"gather": True, "activation": 1}, {"transposed": False}], ids=str)
def test_power_a_wrong_reference_fails(options: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="not close"):
        check([40, 0, 9], K=32, O=20, spoil=1e-3, **options)


@triton.jit
def locate_kernel(end_ptr, last_ptr, out_ptr, row_tiles, column_tiles: tl.constexpr, NP: tl.constexpr):
    experts = tl.arange(0, NP)
    lists = (experts, tl.load(end_ptr + experts), tl.load(last_ptr + experts))
    expert, first, end, column = locate(tl.program_id(0), lists, row_tiles, column_tiles, 3, 16)
    place = out_ptr + 4 * tl.program_id(0)
    tl.store(place, expert)
    tl.store(place + 1, first)
    tl.store(place + 2, end)
    tl.store(place + 3, column)


@pytest.mark.parametrize("num_experts", [1, 5, 32, 40, 70])
def test_tiles_are_located_once_each_in_groups_of_rows(num_experts: int) -> None:
    """Three row tiles of 16 rows share each column of B. About half of the experts are idle, the first and last too."""
    load = torch.randint(40, (num_experts,), generator=torch.Generator().manual_seed(num_experts))
    load[0::2] = 0
    load[num_experts // 2] += 1
    end, NP, column_tiles = load.cumsum(0), listed(num_experts), 2
    rows = [
        (expert, int(last - count) + first, int(last))
        for expert, (count, last) in enumerate(zip(load, end, strict=True))
        for first in range(0, int(count), 16)
    ]
    want = [
        (*row, column)
        for first in range(0, len(rows), 3)
        for column in range(column_tiles)
        for row in rows[first : first + 3]
    ]

    def padded(values: Tensor, last: int) -> Tensor:
        return torch.cat([values, torch.full((NP - num_experts,), last)]).int()

    tiles = (load + 15) // 16
    found = torch.empty(len(want), 4, dtype=torch.int32)
    lists = padded(end, 0), padded(tiles.cumsum(0), len(rows))  # ends of missing experts are zero
    locate_kernel[(len(want),)](*lists, found, len(rows), column_tiles, NP)
    assert found.tolist() == [list(tile) for tile in want]
