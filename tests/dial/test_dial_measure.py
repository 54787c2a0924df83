"""Settings are what a model then is, and measurements what a plain evaluation finds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from grmoe.dial import Setting, apply, current
from grmoe.dial.gates import Gates, layer_inputs, moe_layers
from grmoe.dial.measure import Meter, Point, increase
from grmoe.dial.setting import mass, top_k
from grmoe.dial.text import Text, read_text, window_length
from grmoe.model import GrmoeConfig, GrmoeForCausalLM
from grmoe.routing import Mass, routers
from grmoe.runs.open import LoadedModel

SETTINGS = [mass((0.5, 3.0), 0.6, 2), mass((1.0, 1.0), 0.8, 3), top_k((2.0, 2.0), 1)]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_setting_reaches_configuration_and_routers_and_survives_saving(
    opened: LoadedModel, setting: Setting, tmp_path: Path, text: Text
) -> None:
    apply(opened.model, setting)
    assert current(opened.model.config) == setting
    assert [r.selection for r in routers(opened.model)] == [opened.model.config.selection_policy()] * 2
    assert [r.max_experts() for r in routers(opened.model)] == [setting.cap] * 2
    opened.model.save_pretrained(tmp_path)
    again = GrmoeForCausalLM.from_pretrained(tmp_path).eval()
    assert current(again.config) == setting
    ids = text.rows_WS[:2]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, opened.model(ids).logits)


def test_a_setting_that_cannot_be_changes_nothing(opened: LoadedModel) -> None:
    before = current(opened.model.config)
    policy = routers(opened.model)[0].selection
    for bad in (mass((1.0, 1.0), 0.5, 9), mass((1.0,), 0.5, 2), Setting((1.0, 1.0), "mass", 1.5, 2)):
        with pytest.raises(ValueError, match=r"num_experts_per_tok|alpha|selection_tau"):
            apply(opened.model, bad)
        assert current(opened.model.config) == before
        assert routers(opened.model)[0].selection == policy
        assert opened.model.alpha == list(before.alphas)


def test_a_router_that_chooses_by_itself_has_no_setting() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "moe_every": 1}
    model = GrmoeForCausalLM(GrmoeConfig(vocab_size=16, router="switch", **sizes))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="by itself"):
        apply(model, mass((1.0,), 0.5, 2))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_measured_is_what_a_plain_evaluation_finds(opened: LoadedModel, text: Text, setting: Setting) -> None:
    point = Meter(opened.model, text).measure(setting, "uniform")
    model, rows = opened.model, text.rows_WS
    apply(model, setting)
    with torch.no_grad():
        out = model(rows[:, :-1], output_router_logits=True, use_cache=False)
    losses = torch.nn.functional.cross_entropy(out.logits.transpose(1, 2), rows[:, 1:], reduction="none")
    # fp32 sums in another order.
    torch.testing.assert_close(point.losses_W, losses.mean(-1).double(), rtol=1e-5, atol=0)
    policy = model.config.selection_policy()
    assert policy is not None
    probs = [torch.softmax(logits, -1) for logits in out.router_logits]
    counts = [float(policy(p).sum(-1).double().mean()) for p in probs]
    assert point.layer_experts == pytest.approx(counts, rel=1e-3)  # a tie may fall the other way
    entropies = [float(-torch.xlogy(p, p).sum(-1).mean()) for p in probs]
    assert point.entropy == pytest.approx(sum(entropies) / 2, rel=1e-4)
    assert point.effective_entropy == pytest.approx(sum(map(math.exp, entropies)) / 2, rel=1e-4)
    inverse = [float((1 / p.square().sum(-1)).mean()) for p in probs]
    assert point.effective_inverse == pytest.approx(sum(inverse) / 2, rel=1e-4)


def test_predicted_experts_are_those_of_the_policy_on_the_same_inputs(
    opened: LoadedModel, text: Text
) -> None:
    gates = Gates(opened.model, text, 3)
    inputs = layer_inputs(opened.model, text, 2048)
    assert opened.model.alpha == [1.0, 1.0]  # put back
    for i, (layer, x_TD) in enumerate(zip(moe_layers(opened.model), inputs, strict=True)):
        for alpha, tau in ((0.5, 0.6), (2.0, 0.9), (7.0, 0.5)):
            layer.router.alpha = alpha
            with torch.no_grad():
                probs = layer.router(x_TD).probs
            expected = float(Mass(tau, cap=3)(probs).sum(-1).double().mean())
            assert gates.experts(i, alpha, tau) == pytest.approx(expected, rel=2e-3)  # ties
    # What is solved for is reached as closely as so many tokens allow.
    assert gates.experts(1, gates.alpha_for(1, 0.7, 1.6), 0.7) == pytest.approx(1.6, abs=0.01)
    tau = gates.tau_for((1.0, 2.0), 1.8)
    assert (gates.experts(0, 1.0, tau) + gates.experts(1, 2.0, tau)) / 2 == pytest.approx(1.8, abs=0.01)


def test_the_increase_and_its_band() -> None:
    def point(losses: list[float]) -> Point:
        return Point(SETTINGS[0], "uniform", torch.tensor(losses).double(), 1.5, (1.5,), 1.0, 2.7, 2.0)

    grown = increase(point([1.2, 3.1, 2.3]), point([1.0, 3.0, 2.0]))
    # Differences 0.2, 0.1, 0.3: mean 0.2, deviation 0.1, error 0.1/√3.
    error = 1.645 * 0.1 / math.sqrt(3)
    band = (math.expm1(0.2 - error), math.expm1(0.2 + error))
    assert (grown.value, grown.low, grown.high) == pytest.approx((math.expm1(0.2), *band), rel=1e-5)


def test_text_from_prepared_tokens_and_from_files(opened: LoadedModel, data: Path, tmp_path: Path) -> None:
    assert window_length(opened) == 32
    own, named = read_text(None, opened, 16, 512), read_text(str(data), opened, 16, 512)
    assert torch.equal(own.rows_WS, named.rows_WS)
    assert own.rows_WS.shape == (32, 17)
    assert own.tokens == 512
    (tmp_path / "words.txt").write_text("one two three four " * 100)
    read = read_text(str(tmp_path / "words.txt"), opened, 16, 512)
    assert opened.tokenizer.decode(read.rows_WS[0]).startswith("one two three")
    assert torch.equal(read.rows_WS[0, -1], read.rows_WS[1, 0])  # each token a target once
    (tmp_path / "short.txt").write_text("one two")
    with pytest.raises(ValueError, match="at least 8 windows of 16 tokens, got 0"):
        read_text(str(tmp_path / "short.txt"), opened, 16, 512)
    with pytest.raises(ValueError, match="neither a file"):
        read_text(str(tmp_path / "missing.txt"), opened, 16, 512)


def test_text_of_another_tokenizer_is_refused(opened: LoadedModel, folder: Path, tmp_path: Path) -> None:
    from grmoe.data import prepare

    prepare(
        [str(folder / "corpus.jsonl")], tmp_path / "other", tokenizer="bpe:300", validation=0.2, workers=1
    )
    with pytest.raises(ValueError, match="own tokenizer"):
        read_text(str(tmp_path / "other"), opened, 16, 512)
