"""The CUDA graph that the dial times computes what the eager model computes."""

from __future__ import annotations

import pytest
import torch

from grmoe.dial import apply, mass
from grmoe.model import GrmoeForCausalLM, preset
from grmoe.probe.timing import warmed_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@torch.no_grad()
def test_a_captured_prefill_is_the_eager_one_at_every_alpha() -> None:
    torch.manual_seed(0)
    config = preset("small", vocab_size=512)
    with torch.device("cuda"):
        model = GrmoeForCausalLM(config).eval()
        ids = torch.randint(512, (4, 128))
    torch.nn.Module.to(model, torch.bfloat16)
    layers = len(config.moe_layers)
    kept = {}

    def prefill() -> None:
        kept["logits"] = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

    apply(model, mass((1.0,) * layers, 0.5, 2))
    replay = warmed_up(prefill, torch.device("cuda"))
    static = kept["logits"]
    for alpha in (1.0, 4.0, 0.1):
        apply(model, mass((alpha,) * layers, 0.5, 2))
        replay()
        torch.cuda.synchronize()
        got = static.clone()
        prefill()
        assert torch.equal(got, kept["logits"])
