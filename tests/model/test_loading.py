"""Saving and loading: equal to the bit, the dial in the configuration, routers in fp32; fine-tuning."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import grmoe
from grmoe.geometry import orthonormality_error
from grmoe.model import GrmoeConfig, GrmoeForCausalLM, GrmoeModel, modeling_grmoe
from grmoe.model.attention_grmoe import GrmoeAttention, GrmoeRMSNorm

Build = Callable[..., GrmoeForCausalLM]


def realigned(model: Any) -> Any:
    """Weights in memory of their own. Mapped from a file they lie at odd addresses, where BLAS rounds otherwise."""
    for tensor in model.state_dict(keep_vars=True).values():
        tensor.data = tensor.data.clone()
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "hidden_act": "gelu", "shared_experts": 1},
        {"router_options": {"amortizer": "input", "linear": True, "concentration": "diagonal"}},
        {"router_options": {"amortizer": "matrix", "scaling": "raw", "prior": "paper", "init": "pca"}},
        {"router": "softmax"},
        {"router": "hash", "router_options": {"seed": 5}},
    ],
)
def test_loaded_equals_saved(
    build: Build, ids: torch.Tensor, tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = build(**changes)
    expected = model(ids)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is GrmoeForCausalLM
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    weights = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert torch.equal(realigned(loaded)(ids).logits, expected.logits)
    assert [m.tokens for m in loaded.routing_metrics()] == [27, 27]  # sums start at zero, not at garbage
    for a, b in zip(grmoe.routers(model), grmoe.routers(loaded), strict=True):
        assert torch.equal(a.log_prior, b.log_prior)
        assert not b.prior_sums.any()


def test_auto_classes(build: Build, ids: torch.Tensor, tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is GrmoeConfig
    base = realigned(AutoModel.from_pretrained(tmp_path))
    assert type(base) is GrmoeModel
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_the_dial_is_in_the_configuration(build: Build, ids: torch.Tensor, tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert not [n for n in names if "alpha" in n]
    assert [n for n in names if n.endswith("log_prior")]
    for alpha, expected in ((2.0, [2.0, 2.0]), ([1.0, 4.0], [1.0, 4.0])):
        loaded = realigned(AutoModelForCausalLM.from_pretrained(tmp_path, alpha=alpha))
        assert loaded.alpha == expected
        model.set_alpha(alpha)
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        loaded.save_pretrained(tmp_path / "again")
        assert json.loads((tmp_path / "again" / "config.json").read_text())["alpha"] == alpha
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").alpha == expected
    with pytest.raises(ValueError, match="alpha must be one number or one for each of the 2 MoE layers"):
        AutoModelForCausalLM.from_pretrained(tmp_path, alpha=[1.0, 2.0, 3.0])


def test_a_dial_set_on_a_router_is_saved_and_digits_are_kept(build: Build, tmp_path: Path) -> None:
    model = build()
    model.set_alpha(0.1)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["alpha"] == 0.1  # not 0.10000000149
    grmoe.routers(model)[1].alpha = 3.0
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["alpha"]
    assert saved == [pytest.approx(0.1), 3.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loads_routers_in_fp32(
    build: Build, ids: torch.Tensor, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    loaded = realigned(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))
    for a, b in zip(grmoe.routers(model), grmoe.routers(loaded), strict=True):
        for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
            assert y.dtype == torch.float32, name
            assert torch.equal(x, y), name
        assert b.alpha_value.dtype == b.prior_sums.dtype == torch.float32
        assert b.counter.sums.dtype == torch.float64
    assert loaded.model.layers[1].mlp.experts.gate_up_proj.dtype == dtype
    assert loaded(ids).logits.dtype == dtype
    loaded.save_pretrained(tmp_path / "half")
    again = realigned(AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto"))
    assert torch.equal(again(ids).logits, loaded(ids).logits)
    assert orthonormality_error(grmoe.routers(again)[0].frames) < 1e-5


def test_missing_frames_are_drawn_anew(build: Build, tmp_path: Path) -> None:
    """A checkpoint of another router: what it has is loaded, the rest starts as the constructor makes it."""
    build(router="softmax").save_pretrained(tmp_path)
    loaded = GrmoeForCausalLM.from_pretrained(tmp_path, router="grassmann", router_options={})
    for router in grmoe.routers(loaded):
        assert orthonormality_error(router.frames) < 1e-5
        assert torch.isfinite(router.log_kappa).all()


def test_fewer_experts_at_inference(build: Build, ids: torch.Tensor, tmp_path: Path) -> None:
    """Trained at top-2, run at top-1 or by mass: the fields of the configuration are arguments of loading."""
    build(norm_topk_prob=True).save_pretrained(tmp_path)
    one = AutoModelForCausalLM.from_pretrained(tmp_path, num_experts_per_tok=1)
    one(ids)
    assert [m.experts_per_token for m in one.routing_metrics()] == [1.0, 1.0]
    assert one.config.norm_topk_prob  # as the model was trained
    with pytest.raises(ValueError, match="num_experts_per_tok must be at most num_experts"):
        AutoModelForCausalLM.from_pretrained(tmp_path, num_experts_per_tok=5)


def test_trainer_fine_tunes(build: Build, ids: torch.Tensor, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = build().train()
    with torch.no_grad():
        before = float(model(ids, labels=ids).loss)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        learning_rate=1e-2,
        per_device_train_batch_size=3,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in ids]
    optimizer = grmoe.ModelOptimizer(model, lr=1e-2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None)).train()
    assert not [
        w for w in caught if "ModelOptimizer" in str(w.message)
    ]  # it is the optimiser that the warning names
    assert max(float(orthonormality_error(r.frames.detach())) for r in grmoe.routers(model)) < 1e-5
    with torch.no_grad():
        after = float(model(ids, labels=ids).loss)
    assert after < before - 0.1


def test_trainer_smooths_the_labels_of_the_next_tokens(
    build: Build, ids: torch.Tensor, tmp_path: Path
) -> None:
    """Trainer shifts labels only for classes that transformers lists as language models."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = build().eval()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), label_smoothing_factor=0.1, report_to="none", use_cpu=True
    )
    trainer = Trainer(model=model, args=arguments)
    loss = trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    torch.testing.assert_close(
        loss, torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    )


def test_models_of_one_configuration_have_dials_of_their_own(build: Build, tmp_path: Path) -> None:
    """As a teacher and a student. The second was saved with the budget of the first."""
    curve = [
        {"experts_per_token": 1.0, "tau": 0.1, "alpha": 1.0, "cap": 2},
        {"experts_per_token": 2.0, "tau": 1.0, "alpha": 1.0, "cap": 2},
    ]
    config = build(num_experts_per_tok=2, budget_curve=curve).config
    first, second = GrmoeForCausalLM(config), GrmoeForCausalLM(config)
    first.set_alpha(3.0)
    first.set_budget(1.0)
    assert (first.budget, second.budget, config.budget) == (1.0, None, None)
    second.save_pretrained(tmp_path)
    saved = GrmoeForCausalLM.from_pretrained(tmp_path)
    assert (saved.budget, saved.alpha) == (None, second.alpha)
    assert first.model.config is first.config  # one for all parts of a model


def test_plain_training_lowers_the_loss_and_keeps_frames_orthonormal(build: Build, ids: torch.Tensor) -> None:
    model = build().train()
    split = grmoe.split_parameters(model)
    frames = grmoe.GrassmannAdam(split.frame_groups, lr=0.01)
    others = torch.optim.AdamW(
        [{"params": split.rest}, {"params": split.kappa, "weight_decay": 0.0}], lr=1e-2
    )
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss + 0.01 * model.overlap_penalty(0.5)
        loss.backward()
        for optimizer in (frames, others):
            optimizer.step()
            optimizer.zero_grad()
        model.update_priors(0.01)
        losses.append(float(loss.detach()))
    assert losses[2] < losses[0] - 0.1
    assert max(float(orthonormality_error(r.frames.detach())) for r in grmoe.routers(model)) < 1e-5


def test_a_selection_by_mass_chosen_while_loading_has_its_default(build: Build, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    assert GrmoeForCausalLM.from_pretrained(tmp_path, selection="mass").config.selection_tau == 0.9
    with pytest.raises(ValueError, match="num_experts_per_tok must be 4 with selection 'threshold'"):
        GrmoeForCausalLM.from_pretrained(tmp_path, selection="threshold")


@pytest.mark.parametrize("hidden_act", ["silu", "gelu"])
def test_models_pickled_whole_by_earlier_versions_find_their_classes(build: Build, hidden_act: str) -> None:
    """Those models name every class of a block as one of modeling_grmoe.py. Their norms are transformers'."""
    kinds = {type(module) for module in build(hidden_act=hidden_act).modules()} - {
        GrmoeAttention,
        GrmoeRMSNorm,
    }
    ours = {kind for kind in kinds if kind.__module__.startswith("grmoe.model.")}
    assert len(ours) == 6
    assert {getattr(modeling_grmoe, kind.__name__, None) for kind in ours} == ours
