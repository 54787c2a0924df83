"""A model built in shards has the weights of one built whole, to the bit, and is never whole anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from allocated import Allocated
from models import ALONE, backward, batch, gradients, tiny_config, whole
from processes import run
from torch import Tensor

from grmoe.config import from_dict
from grmoe.data import prepare
from grmoe.model import GrmoeConfig, GrmoeForCausalLM, preset
from grmoe.model.count import meta_model
from grmoe.parallel.build import build_model
from grmoe.parallel.cost import FP32, Plan
from grmoe.parallel.memory import memory
from grmoe.parallel.shard import shard
from grmoe.parallel.world import ParallelConfig, World
from grmoe.runs.config import TrainConfig
from grmoe.train.setup import build_trainer

WORLDS = {
    "fsdp": (ParallelConfig(), 2),
    "hsdp": (ParallelConfig(replicate=2, fsdp=1), 2),
    "expert": (ParallelConfig(fsdp=1, expert=2), 2),
    "fsdp × expert": (ParallelConfig(fsdp=2, expert=2), 4),
}
LINEAR: dict[str, Any] = {"router_rank": None, "router_kappa": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"num_hidden_layers": 4},
    "untied, gelu, shared expert, padding token": {
        "hidden_act": "gelu",
        "tie_word_embeddings": False,
        "shared_experts": 1,
        "pad_token_id": 3,
        "attention_heads_per_token": 1,
    },
    "a dial for each layer, amortiser": {
        "num_hidden_layers": 4,
        "alpha": [0.5, 2.0],
        "router_options": {"amortizer": "affinity"},
    },
    "softmax": {"router": "softmax", **LINEAR},
    "hash": {"router": "hash", **LINEAR},
    "soft_moe": {"router": "soft_moe", "allow_noncausal_router": True, **LINEAR},
}


def everything(model: GrmoeForCausalLM) -> dict[str, Tensor]:
    """Parameters and all buffers, those that no checkpoint has included, and the random state after the start."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {**{name: whole(tensor) for name, tensor in named}, "random state": torch.get_rng_state()}


def starts(world: World) -> dict[str, dict[str, Tensor]]:
    found = {}
    for variant, changes in VARIANTS.items():
        torch.manual_seed(0)
        model = build_model(tiny_config(**changes), world)
        found[variant] = everything(model)
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        assert tied == model.config.tie_word_embeddings
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Tensor]]:
    found = {}
    for variant, changes in VARIANTS.items():
        torch.manual_seed(0)
        found[variant] = everything(GrmoeForCausalLM(tiny_config(**changes)))
    return found


def assert_equal(got: dict[str, dict[str, Tensor]], want: dict[str, dict[str, Tensor]]) -> None:
    for variant, tensors in want.items():
        assert set(got[variant]) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(got[variant][name], tensor), (variant, name)


def test_alone_it_is_the_plain_model(plain: dict[str, dict[str, Tensor]]) -> None:
    assert_equal(starts(ALONE), plain)


@pytest.mark.parametrize("arrangement", WORLDS)
def test_weights_are_those_of_one_process_to_the_bit(
    arrangement: str, plain: dict[str, dict[str, Tensor]]
) -> None:
    for got in run(*WORLDS[arrangement], starts):
        assert_equal(got, plain)


def checkpointed(world: World) -> list[tuple[Tensor, dict[str, Tensor], int]]:
    """Loss, gradients and runs of a block's norm: built in shards, and divided later."""
    found = []
    for in_shards in (True, False):
        torch.manual_seed(0)
        config = tiny_config()
        model = build_model(config, world) if in_shards else GrmoeForCausalLM(config)
        model.train().gradient_checkpointing_enable()
        if not in_shards:
            shard(model, world)
        runs: list[int] = []
        model.model.layers[1].input_layernorm.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        loss = backward(model, world, batch(4))
        found.append((loss, gradients(model), len(runs)))
    return found


@pytest.mark.parametrize("arrangement", ["fsdp", "expert"])
def test_checkpointing_can_be_switched_on_afterwards(arrangement: str) -> None:
    for ours, usual in run(*WORLDS[arrangement], checkpointed):
        assert ours[2] == usual[2] == 2  # forward, and again in the backward
        assert torch.equal(ours[0], usual[0])
        assert set(ours[1]) == set(usual[1])
        for name, gradient in usual[1].items():
            assert torch.equal(ours[1][name], gradient), name


# -- memory ----------------------------------------------------------------------------------------------------

# Nine blocks of experts, 31 MB in all; as many words as the tokenizer below has.
DEEP: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 9,
    "moe_every": 1, "num_attention_heads": 2, "num_experts": 8, "router_rank": 16, "max_position_embeddings": 32,
}  # fmt: skip
WORDS = 280
SLACK = 1.02  # buffers, and what a router's constructor computes in fp64


def most_at_the_start(config: GrmoeConfig, plan: Plan) -> int:
    return memory(meta_model(config), plan).start


def peaks(world: World) -> tuple[int, int]:
    """The most bytes at once: built in shards, and built whole and then divided."""
    config = GrmoeConfig(vocab_size=WORDS, **DEEP)
    with Allocated() as in_shards:
        build_model(config, world)
    with Allocated() as whole_first:
        shard(GrmoeForCausalLM(config), world)
    return in_shards.most, whole_first.most


@pytest.mark.parametrize("arrangement", ["fsdp", "expert", "fsdp × expert"])
def test_no_process_holds_the_whole_model(arrangement: str) -> None:
    mesh, size = WORLDS[arrangement]
    config = GrmoeConfig(vocab_size=WORDS, **DEEP)
    bound = most_at_the_start(config, Plan(fsdp=size // mesh.expert, expert=mesh.expert))
    model = FP32 * sum(p.numel() for p in meta_model(config).parameters())
    for in_shards, whole_first in run(mesh, size, peaks):
        print(
            f"\n| {arrangement} | {whole_first / 1e6:.1f} MB | {in_shards / 1e6:.1f} MB | {bound / 1e6:.1f} MB |"
        )
        assert 0.95 * bound < in_shards < SLACK * bound
        # The same measurement of a model that is whole first: it could have told.
        assert whole_first > model > 1.5 * SLACK * bound


def opened(world: World, config: TrainConfig) -> int:
    with Allocated() as allocated:
        build_trainer(config, world)
    return allocated.most


def test_training_starts_so(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{i} and {i + 1}. " * 8}) + "\n" for i in range(400)))
    prepare([str(corpus)], tmp_path / "data", tokenizer=f"bpe:{WORDS}", validation=0.1, workers=1)
    data = {"path": str(tmp_path / "data"), "batch_size": 2}
    model = {"preset": None, **DEEP}
    config = from_dict(
        TrainConfig, {"out": str(tmp_path / "run"), "device": "cpu", "model": model, "data": data}
    )
    bound = most_at_the_start(config.model_config(WORDS, 0), Plan(fsdp=2))
    for most in run(ParallelConfig(), 2, opened, config):
        assert most < SLACK * bound


def test_the_page_has_these_numbers() -> None:
    meshes = {"350m": [Plan(fsdp=8)], "1.3b": [Plan(fsdp=8), Plan(fsdp=64)]}
    meshes["2.7b"] = [Plan(fsdp=8), Plan(expert=8), Plan(fsdp=4, expert=8)]
    lines = []
    for name, plans in meshes.items():
        config = preset(name)
        model = FP32 * sum(p.numel() for p in meta_model(config).parameters()) / 1e9
        for plan in plans:
            bound = most_at_the_start(config, plan) / 1e9
            lines.append(
                f"| `{name}`, fsdp {plan.fsdp} × expert {plan.expert} | {model:.1f} GB | {bound:.1f} GB |"
            )
    print("", *lines, sep="\n")
    page = (Path(__file__).parents[2] / "docs" / "results" / "parallel.md").read_text()
    assert [line for line in lines if line not in page] == []
