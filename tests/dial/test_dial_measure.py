"""Settings are what a model then is, and measurements what a plain evaluation finds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from grmoe.data import prepare
from grmoe.dial import Setting, apply, current, mass, top_k
from grmoe.dial.gates import Gates
from grmoe.dial.meter import Meter
from grmoe.model import GrmoeConfig, GrmoeForCausalLM
from grmoe.probe.losses import Measurement, increase
from grmoe.probe.routing import layer_inputs, moe_layers
from grmoe.probe.windows import Text, read_windows, window_length
from grmoe.routing import Mass, routers
from grmoe.runs.open import LoadedModel

SETTINGS = [mass((0.5, 3.0), 0.6, 2), mass((1.0, 1.0), 0.8, 3), top_k((2.0, 2.0), 1)]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_setting_reaches_configuration_and_routers_and_survives_saving(
    loaded: LoadedModel, setting: Setting, tmp_path: Path, text: Text
) -> None:
    apply(loaded.model, setting)
    assert current(loaded.model.config) == setting
    assert [r.selection for r in routers(loaded.model)] == [loaded.model.config.selection_policy()] * 2
    assert [r.max_experts() for r in routers(loaded.model)] == [setting.cap] * 2
    loaded.model.save_pretrained(tmp_path)
    again = GrmoeForCausalLM.from_pretrained(tmp_path).eval()
    assert current(again.config) == setting
    ids = text.rows_WS[:2]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, loaded.model(ids).logits)


def test_a_setting_that_cannot_be_changes_nothing(loaded: LoadedModel) -> None:
    before = current(loaded.model.config)
    policy = routers(loaded.model)[0].selection
    for bad in (mass((1.0, 1.0), 0.5, 9), mass((1.0,), 0.5, 2), Setting((1.0, 1.0), "mass", 1.5, 2)):
        with pytest.raises(ValueError, match=r"num_experts_per_tok|alpha|selection_tau"):
            apply(loaded.model, bad)
        assert current(loaded.model.config) == before
        assert routers(loaded.model)[0].selection == policy
        assert loaded.model.alpha == list(before.alphas)


def test_a_router_that_chooses_by_itself_has_no_setting() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "moe_every": 1}
    model = GrmoeForCausalLM(GrmoeConfig(vocab_size=16, router="switch", **sizes))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="by itself"):
        apply(model, mass((1.0,), 0.5, 2))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_measured_is_what_a_plain_evaluation_finds(loaded: LoadedModel, text: Text, setting: Setting) -> None:
    found = Meter(loaded.model, text).measure(setting, "uniform").measured
    model, rows = loaded.model, text.rows_WS
    apply(model, setting)
    with torch.no_grad():
        out = model(rows[:, :-1], output_router_logits=True, use_cache=False)
    losses = torch.nn.functional.cross_entropy(out.logits.transpose(1, 2), rows[:, 1:], reduction="none")
    # fp32 sums in another order.
    torch.testing.assert_close(found.losses_W, losses.mean(-1).double(), rtol=1e-5, atol=0)
    policy = model.config.selection_policy()
    assert policy is not None
    probs = [torch.softmax(logits, -1) for logits in out.router_logits]
    counts = [float(policy(p).sum(-1).double().mean()) for p in probs]
    assert found.layer_experts == pytest.approx(counts, rel=1e-3)  # a tie may fall the other way
    entropies = [float(-torch.xlogy(p, p).sum(-1).mean()) for p in probs]
    assert found.entropy == pytest.approx(sum(entropies) / 2, rel=1e-4)
    assert found.effective_experts_entropy == pytest.approx(sum(map(math.exp, entropies)) / 2, rel=1e-4)
    inverse = [float((1 / p.square().sum(-1)).mean()) for p in probs]
    assert found.effective_experts_inverse == pytest.approx(sum(inverse) / 2, rel=1e-4)


def test_predicted_experts_are_those_of_the_policy_on_the_same_inputs(
    loaded: LoadedModel, text: Text
) -> None:
    gates = Gates(loaded.model, text, 3)
    inputs = layer_inputs(loaded.model, text.inputs_WS)
    assert loaded.model.alpha == [1.0, 1.0]  # put back
    for i, (layer, x_TD) in enumerate(zip(moe_layers(loaded.model), inputs, strict=True)):
        for alpha, tau in ((0.5, 0.6), (2.0, 0.9), (7.0, 0.5)):
            layer.router.alpha = alpha
            with torch.no_grad():
                probs = layer.router(x_TD).probs
            expected = float(Mass(tau, cap=3)(probs).sum(-1).double().mean())
            assert gates.experts(i, alpha, tau) == pytest.approx(expected, rel=2e-3)  # ties
    # The bisections reach what they aim at, as closely as the number of tokens allows.
    assert gates.experts(1, gates.alpha_for(1, 0.7, 1.6), 0.7) == pytest.approx(1.6, abs=0.01)
    tau = gates.tau_for((1.0, 2.0), 1.8)
    assert (gates.experts(0, 1.0, tau) + gates.experts(1, 2.0, tau)) / 2 == pytest.approx(1.8, abs=0.01)


def test_the_increase_and_its_band() -> None:
    def measured(losses: list[float]) -> Measurement:
        return Measurement(
            losses_W=torch.tensor(losses).double(),
            layer_experts=(1.5,),
            entropy=1.0,
            effective_experts_entropy=2.7,
            effective_experts_inverse=2.0,
        )

    grown = increase(measured([1.2, 3.1, 2.3]), measured([1.0, 3.0, 2.0]))
    # Differences 0.2, 0.1, 0.3: mean 0.2, deviation 0.1, error 0.1/√3.
    error = 1.645 * 0.1 / math.sqrt(3)
    band = (math.expm1(0.2 - error), math.expm1(0.2 + error))
    assert (grown.value, grown.low, grown.high) == pytest.approx((math.expm1(0.2), *band), rel=1e-5)


def test_text_from_prepared_tokens_and_from_files(loaded: LoadedModel, data: Path, tmp_path: Path) -> None:
    assert window_length(loaded) == 32
    own, named = read_windows(None, loaded, 16, 512), read_windows(str(data), loaded, 16, 512)
    assert torch.equal(own.rows_WS, named.rows_WS)
    assert own.rows_WS.shape == (32, 17)
    assert own.tokens == 512
    (tmp_path / "words.txt").write_text("one two three four " * 100)
    read = read_windows(str(tmp_path / "words.txt"), loaded, 16, 512)
    assert loaded.tokenizer.decode(read.rows_WS[0]).startswith("one two three")
    assert torch.equal(read.rows_WS[0, -1], read.rows_WS[1, 0])  # each token a target once
    (tmp_path / "short.txt").write_text("one two")
    with pytest.raises(ValueError, match="at least 8 windows of 16 tokens, got 0"):
        read_windows(str(tmp_path / "short.txt"), loaded, 16, 512)
    with pytest.raises(ValueError, match="neither a file"):
        read_windows(str(tmp_path / "missing.txt"), loaded, 16, 512)


def test_a_quoted_special_token_is_read_as_grmoe_prepare_reads_it(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    """A file and the folder `grmoe prepare` makes of it give the same windows."""
    source = tmp_path / "quoted.txt"
    source.write_text("one two <|endoftext|> three four " * 40)
    prepare(
        [str(source)], tmp_path / "data", tokenizer=str(loaded.tokenizer_folder), validation=0.0, workers=1
    )
    read = read_windows(str(source), loaded, 16, 512)
    assert torch.equal(read.rows_WS, read_windows(str(tmp_path / "data"), loaded, 16, 512).rows_WS)
    assert not (read.rows_WS == loaded.tokenizer.eos_token_id).any()
    assert "<|endoftext|>" in loaded.tokenizer.decode(read.rows_WS[0])


def test_text_of_another_tokenizer_is_refused(loaded: LoadedModel, folder: Path, tmp_path: Path) -> None:
    prepare(
        [str(folder / "corpus.jsonl")], tmp_path / "other", tokenizer="bpe:300", validation=0.2, workers=1
    )
    with pytest.raises(ValueError, match="another tokenizer than the model's"):
        read_windows(str(tmp_path / "other"), loaded, 16, 512)


def test_a_loss_that_is_not_finite_names_the_setting(loaded: LoadedModel, text: Text) -> None:
    with torch.no_grad():
        loaded.model.lm_head.weight[0] = float("nan")
    with pytest.raises(ValueError, match=r"loss on validation is NaN or Inf.*\(α 1, top-2\)"):
        Meter(loaded.model, text)
