"""What an amortiser does to mean logits and to the leading expert, against a loop over tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from grmoe.analyze import analyze, show
from grmoe.analyze.results import Result
from grmoe.probe.pieces import Pieces
from grmoe.probe.typed_windows import covering_starts
from grmoe.probe.words import TYPES
from grmoe.routing import GrassmannRouter, routers
from grmoe.runs.open import LoadedModel
from grmoe.tables import Table


def random_networks(loaded: LoadedModel) -> LoadedModel:
    g = torch.Generator().manual_seed(1)
    for name, p in loaded.model.named_parameters():
        if "amortizer_net" in name:
            p.data = torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5
    return loaded


@pytest.mark.parametrize("amortizer", ["affinity", "input", "matrix"])
def test_it_is_what_a_loop_over_tokens_finds(
    amortizer: str, make: Any, texts: list[Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    loaded = random_networks(
        make(router_options={"amortizer": amortizer, "scaling": "raw", "prior": "paper"})
    )
    found = analyze(loaded, texts[:1], 100)
    ids = np.array([*tokenizer(texts[0].read_text()).input_ids, tokenizer.eos_token_id])
    types = Pieces(tokenizer).types(ids)
    inputs: list[torch.Tensor] = []
    router = routers(loaded.model)[1]
    assert isinstance(router, GrassmannRouter)
    hook = router.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
    concentrations, ratios, leading = [], [], {k: list[float]() for k in range(len(TYPES))}
    by_type = {k: list[float]() for k in range(len(TYPES))}
    for start in covering_starts(len(ids), 100, 32):
        with torch.no_grad():
            loaded.model(torch.tensor(ids[start : start + 32])[None])
            for place, x in enumerate(inputs.pop()):
                base = [
                    float(k * (U.T @ x).square().sum())
                    for k, U in zip(router.kappa, router.frames, strict=True)
                ]
                logits = router(x[None]).logits[0].tolist()  # at α = 1 and without a prior: h κ a
                kind, best = int(types[start + place]), int(np.argmax(logits))
                ratios.append(sum(logits) / sum(base))
                kappas = router.kappa.tolist()
                concentrations.append(
                    sum(k * logit / b for k, logit, b in zip(kappas, logits, base, strict=True)) / sum(kappas)
                )
                by_type[kind].append(ratios[-1])
                leading[kind].append(logits[best] / base[best])
    hook.remove()
    layer = found.layers[1].amortized
    assert layer is not None
    assert layer.ratio == pytest.approx(np.mean(ratios), rel=1e-4)
    assert (layer.ratio_low, layer.ratio_high) == pytest.approx(np.quantile(ratios, [0.05, 0.95]), rel=1e-3)
    assert layer.concentration == pytest.approx(np.mean(concentrations), rel=1e-3)
    ends = (layer.concentration_low, layer.concentration_high)
    assert ends == pytest.approx(np.quantile(concentrations, [0.05, 0.95]), rel=1e-2)
    assert ends != pytest.approx((1, 1), abs=0.01)  # the paper says 1
    assert abs(layer.ratio - 1) > 0.01
    for k in range(len(TYPES)):
        if not by_type[k]:
            assert layer.type_ratio[k] is layer.type_h[k] is None
            continue
        assert layer.type_ratio[k] == pytest.approx(np.mean(by_type[k]), rel=1e-4)
        assert layer.type_h[k] == pytest.approx(np.mean(leading[k]), rel=1e-3)
    shown = [t for t in show(Result(loaded, found)) if isinstance(t, Table)]
    [table] = [t for t in shown if t.title.startswith("Amortiser")]
    assert f"{layer.ratio:.3f} (" in table.markdown()
    assert f"{layer.concentration:.3f} (" in table.markdown()


def test_equal_concentrations_are_kept_for_every_token(make: Any, texts: list[Path]) -> None:
    """Because Σh = N. Mean logits are not."""
    loaded = random_networks(make(router_options={"amortizer": "input"}))
    for router in routers(loaded.model):
        assert isinstance(router, GrassmannRouter)
        router.log_kappa.data.fill_(0.5)
    layer = analyze(loaded, texts[:1], 64).layers[0].amortized
    assert layer is not None
    kept = (layer.concentration, layer.concentration_low, layer.concentration_high)
    assert kept == pytest.approx((1, 1, 1), abs=1e-5)
    assert (layer.ratio_low, layer.ratio_high) != pytest.approx((1, 1), abs=1e-3)


def test_a_fresh_amortiser_changes_nothing_and_others_have_none(make: Any, texts: list[Path]) -> None:
    fresh = analyze(make(router_options={"amortizer": "input"}), texts[:1], 64).layers[0].amortized
    assert fresh is not None
    assert (fresh.ratio, fresh.ratio_low, fresh.ratio_high) == pytest.approx((1, 1, 1), abs=1e-5)
    assert all(h is None or h == pytest.approx(1, abs=1e-5) for h in fresh.type_h)
    plain = make()
    found = analyze(plain, texts[:1], 64)
    assert found.layers[0].amortized is None
    tables = [t for t in show(Result(plain, found)) if isinstance(t, Table)]
    assert not any(t.title.startswith("Amortiser") for t in tables)
