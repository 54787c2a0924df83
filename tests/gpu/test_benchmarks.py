"""Benchmarks of whole models on a GPU: a captured step decodes what the model computes, parts add up to the pass."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from grmoe.bench import breakdown, decode
from grmoe.bench.models import ModelShape, ours
from grmoe.bench.ranges import Marks, ranges

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_captured_step_follows_the_dial() -> None:
    shape, device = ModelShape("small", 4, 64, "gelu"), torch.device("cuda")
    config = shape.config("grassmann")
    config.selection, config.selection_tau = "mass", decode.TAU
    built = [
        decode.decoder_of(shape, device, torch.float32, form, partial(ours, config))
        for form in ("eager", "graphs")
    ]
    found = []
    for alpha in (1e-3, 1e4, 1.0):
        for decoder in built:
            decoder.model.set_alpha(alpha)
            decoder.rewind()
            for _ in range(3):
                decoder.run()
        eager, captured = (decoder.cache.layers[-1].keys[:, :, 64:67].float() for decoder in built)
        # fp32, because the compiled model rounds elsewhere: in bf16 a near tie chooses another expert.
        assert float((captured - eager).norm() / eager.norm()) < 1e-3
        found.append(captured.clone())
    assert not torch.equal(found[0], found[1])


def test_parts_add_up_to_the_pass() -> None:
    shape, device = ModelShape("small", 4, 256, "gelu"), torch.device("cuda")
    with torch.device(device):
        model = ours(breakdown.router_config(shape, breakdown.GRASSMANN)).train()
        ids = torch.randint(model.config.vocab_size, (4, 256))
    marks = Marks(device)
    with ranges(model, marks, compiled=False):
        step = breakdown._step(model, model, ids, torch.bfloat16, marks)
        for _ in range(3):
            step()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

        def timed() -> None:
            events[0].record()
            step()
            events[1].record()

        times = marks.times(timed)
    assert all(times[part] > 0 for part in times)
    assert sum(times.values()) == pytest.approx(events[0].elapsed_time(events[1]), rel=0.02, abs=0.1)
