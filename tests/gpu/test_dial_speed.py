"""The CUDA graph that the dial times computes what the model computes at each setting."""

from __future__ import annotations

import pytest
import torch

from grmoe.dial import Setting, mass, top_k
from grmoe.dial.meter import Meter
from grmoe.dial.setting import k_per_layer
from grmoe.dial.speed import _compiled, put, time_points
from grmoe.model import GrmoeForCausalLM, preset
from grmoe.probe.timing import warmed_up
from grmoe.probe.windows import Text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def model() -> GrmoeForCausalLM:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GrmoeForCausalLM(preset("small", vocab_size=512)).eval()
    torch.nn.Module.to(model, torch.bfloat16)
    return model


def settings(layers: int) -> list[Setting]:
    ones = (1.0,) * layers
    few = [1] * (layers - 1) + [2]
    return [
        top_k(ones, 2),
        mass(ones, 0.5, 2),
        mass((4.0,) * layers, 0.5, 2),
        top_k(ones, 1),
        k_per_layer(ones, few),
    ]


@torch.no_grad()
def test_one_graph_of_the_compiled_model_serves_every_setting(model: GrmoeForCausalLM) -> None:
    layers = len(model.config.moe_layers)
    ids = torch.randint(512, (4, 128), device="cuda")
    every = settings(layers)
    put(model, every[0], 2)
    forward, how = _compiled(model, ids)
    assert how == "compiled, CUDA graph"
    kept = {}

    def prefill() -> None:
        kept["logits"] = forward(input_ids=ids, use_cache=False, logits_to_keep=1).logits  # type: ignore[attr-defined]

    replay = warmed_up(prefill, torch.device("cuda"))
    static, seen = kept["logits"], []
    for setting in (*every, *reversed(every)):
        put(model, setting, 2)
        replay()
        torch.cuda.synchronize()
        seen.append(static.clone())
        prefill()
        assert torch.equal(seen[-1], kept["logits"])
        eager = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        assert float((seen[-1] - eager).float().norm() / eager.float().norm()) < 0.05
    for a, b in zip(seen, reversed(seen), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(seen[0], seen[3])


def test_every_setting_is_timed_by_the_compiled_model(model: GrmoeForCausalLM) -> None:
    layers = len(model.config.moe_layers)
    text = Text("random", torch.randint(512, (64, 257)))
    meter = Meter(model, text)
    ones = (1.0,) * layers
    norms = tuple(tuple(1.0 + e for e in range(8)) for _ in range(layers))
    points = [meter.measure(s, "uniform") for s in (*settings(layers), top_k(ones, 1, norms))]
    found = time_points(model, text, points, meter.trained, rounds=3)
    assert {speed.how for speed in found.values()} == {"compiled, CUDA graph"}
    assert all(speed.tokens_per_second > 0 for speed in found.values())
