"""docs/howto/own-model.md works as shown: it learns, the dial turns, and its claims on fp32 and saving hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import grmoe
from grmoe.geometry import orthonormality_error
from grmoe.routing import SoftmaxRouter

PAGE = (Path(__file__).parents[2] / "docs/howto/own-model.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def execute(blocks: list[str]) -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    return names


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return execute(BLOCKS)


def computed(model: torch.nn.Module, ids: torch.Tensor, alpha: float) -> float:
    grmoe.set_alpha(model, alpha)
    found = grmoe.routers(model)
    for router in found:
        router.reset_metrics()
    with torch.no_grad():
        model(ids)
    return sum(r.read_metrics().experts_per_token for r in found) / len(found)


def test_blocks_are_short_and_losses_fall(page: dict[str, Any]) -> None:
    assert all(len(block.splitlines()) < 20 for block in BLOCKS)
    for name in ("plain", "olmoe"):
        losses = page[f"{name}_losses"]
        assert losses[-1] < 0.25 * losses[0], name
        for router in grmoe.routers(page[name]):
            assert orthonormality_error(router.frames).max() < 1e-5
            assert router.log_prior.abs().max() > 0  # it was updated
            assert router.kappa.std() > 0


def test_the_dial_turns(page: dict[str, Any]) -> None:
    assert {r.alpha for r in grmoe.routers(page["plain"])} == {2.0}
    assert {r.alpha for r in grmoe.routers(page["olmoe"])} == {4.0}
    counts = [computed(page["olmoe"], page["ids"], alpha) for alpha in (0.5, 1.0, 4.0, 16.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 1.98
    assert counts[-1] < 1.2
    assert computed(page["plain"], page["ids"], 16.0) == 2.0  # top-2 whatever α


def test_half_precision_leaves_routers_alone_and_a_state_dict_brings_all_back(page: dict[str, Any]) -> None:
    trained, ids = page["olmoe"], page["ids"]
    state = {name: t.clone() for name, t in trained.state_dict().items()}
    again = execute([BLOCKS[0], BLOCKS[1], BLOCKS[2].replace("* 40", "* 1"), BLOCKS[3]])["olmoe"]
    again.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, trained(ids).logits)
        half = again.bfloat16()
        assert half.lm_head.weight.dtype == torch.bfloat16
        assert {p.dtype for r in grmoe.routers(half) for p in r.parameters()} == {torch.float32}
        # Eight bits of mantissa through two blocks: a few hundredths of a nat.
        change = abs(float(half(ids, labels=ids).loss - trained(ids, labels=ids).loss))
        assert 0 < change < 0.1


def test_mixtral_has_the_same_blocks() -> None:
    block = BLOCKS[2].replace("Olmoe", "Mixtral").replace("num_experts=8", "num_local_experts=8")
    block = block.replace("config.num_experts\n", "config.num_local_experts\n").replace("* 40", "* 10")
    assert "num_local_experts=8" in block
    losses = execute([BLOCKS[0], BLOCKS[1].replace("* 40", "* 1"), block])["olmoe_losses"]
    assert losses[-1] < 0.8 * losses[0]


def test_auxiliary_losses_are_where_the_page_says() -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    assert grmoe.MoE(16, 16, 4).run(x)[1].aux_loss == 0
    layer = grmoe.MoE(16, 16, 4, SoftmaxRouter(16, 4, load_loss=0.01), selection=grmoe.routing.TopK(2))
    assert layer.run(x)[1].aux_loss >= 0.01  # at least its value for a balanced load
