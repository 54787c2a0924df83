"""configs/paper-350m.yaml holds the numbers of the paper, and the model it describes can be built."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from grmoe.config import from_dict, read_tree
from grmoe.model.count import meta_model, parameters
from grmoe.routing import Dense, GrassmannRouter, routers
from grmoe.runs.config import TrainConfig

PATH = Path(__file__).parents[2] / "configs" / "paper-350m.yaml"


def test_the_papers_numbers() -> None:
    config = from_dict(TrainConfig, read_tree(PATH)).resolved()
    optim, routing = config.optim, config.routing
    assert (config.steps, config.data.batch_size, config.data.sequence_length) == (100_000, 256, 1024)
    assert (optim.lr, optim.frames_lr, optim.kappa_lr) == (3e-4, 3e-4, 3e-4)
    assert [config.schedule(kind) for kind in ("weights", "kappa", "frames")] == [(2000, 0.0)] * 3
    assert (optim.betas, optim.weight_decay) == ((0.9, 0.999), 0.0)
    assert (routing.overlap_weight, routing.overlap_rho, routing.overlap_unit) == (0.01, 0.3, "absolute")
    assert (routing.overlap_pairs, routing.prior_rate) == (8 * 7 // 2, 0.0)
    assert (config.elastic.on, config.alpha.schedule) == (False, "constant")


def test_the_papers_model() -> None:
    config = from_dict(TrainConfig, read_tree(PATH)).model_config(50257, 50256)
    model = meta_model(config)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (768, 12, 12)
    assert (config.intermediate_size, config.moe_intermediate_size) == (3072, 1536)
    assert config.moe_layers == [1, 3, 5, 7, 9, 11]  # the even ones counted from one
    assert len(routers(model)) == 6
    for router in cast(list[GrassmannRouter], routers(model)):
        assert (router.num_experts, router.rank, router.scaling, router.prior) == (8, 48, "raw", "paper")
        assert (router.selection, router.max_experts()) == (Dense(), 8)
        assert not router.balance
        network = sum(p.numel() for p in router.amortizer_net.parameters())
        assert network / router.frames.numel() < 0.005
    assert parameters(config) == sum(p.numel() for p in model.parameters())
