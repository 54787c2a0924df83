"""The model as a module: outputs, losses, initialisation, precision, experts implementations, compilation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import grmoe
from grmoe.experts import ExpertWeights
from grmoe.geometry import orthonormality_error
from grmoe.kernels.runtime import INTERPRETED
from grmoe.model import GrmoeConfig, GrmoeForCausalLM, GrmoeModel
from grmoe.model.block_grmoe import GrmoeDecoderLayer, GrmoeMoE, residual_loss

Build = Callable[..., GrmoeForCausalLM]


def blocks(model: torch.nn.Module) -> list[GrmoeMoE]:
    return [m for m in model.modules() if isinstance(m, GrmoeMoE)]


def test_outputs_and_their_shapes(build: Build, ids: torch.Tensor) -> None:
    model = build(attn_implementation="eager")
    out = model(ids, labels=ids, output_router_logits=True, output_hidden_states=True, output_attentions=True)
    assert out.logits.shape == (3, 9, 97)
    assert [r.shape for r in out.router_logits] == [(27, 4)] * 2
    assert [h.shape for h in out.hidden_states] == [(3, 9, 32)] * 5
    assert [a.shape for a in out.attentions] == [(3, 4, 9, 9)] * 4
    plain = model(ids)
    assert plain.router_logits is None
    assert plain.aux_loss is None
    assert torch.equal(plain.logits, out.logits)
    assert torch.equal(model(ids, logits_to_keep=2).logits, out.logits[:, -2:])
    assert isinstance(model(ids, return_dict=False), tuple)


def test_recorded_logits_are_the_routers(build: Build, ids: torch.Tensor) -> None:
    model = build()
    seen: list[torch.Tensor] = []
    for router in grmoe.routers(model):
        router.register_forward_hook(lambda _, __, out: seen.append(out.logits))
    out = model(ids, output_router_logits=True)
    for logits, recorded in zip(seen, out.router_logits, strict=True):
        assert torch.equal(logits.flatten(0, 1), recorded)


def test_attention_backends_agree(build: Build, ids: torch.Tensor) -> None:
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    eager, sdpa = (
        build(attn_implementation=name)(ids, attention_mask=mask).logits for name in ("eager", "sdpa")
    )
    torch.testing.assert_close(
        eager[mask.bool()], sdpa[mask.bool()], atol=1e-5, rtol=1e-5
    )  # fp32, four blocks


@pytest.mark.parametrize("act", ["silu", "gelu"])
@pytest.mark.parametrize("selection", ["topk", "mass"])
def test_experts_implementations_agree(build: Build, ids: torch.Tensor, act: str, selection: str) -> None:
    """Ours and Hugging Face's, forward and backward: the same sums in another order."""
    results = {}
    for name in ("reference", "auto", "grouped", "eager", "grouped_mm", "batched_mm"):
        model = build(hidden_act=act, selection=selection, num_experts_per_tok=3, shared_experts=1)
        model.set_experts_implementation(name)
        loss = model(ids, labels=ids).loss
        loss.backward()
        results[name] = (
            model(ids).logits.detach(),
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]),
        )
        assert {block.backend for block in blocks(model)} == {name}
    for name, (logits, grad) in results.items():
        torch.testing.assert_close(logits, results["reference"][0], atol=1e-5, rtol=1e-5, msg=name)
        torch.testing.assert_close(grad, results["reference"][1], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="kernels run nowhere here")
def test_kernels_agree(build: Build, ids: torch.Tensor) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(experts_implementation="triton", selection="mass").to(device)
    fast = model(ids.to(device)).logits
    assert {r.backend for r in grmoe.routers(model)} == {"triton"}
    model.set_experts_implementation("reference")
    torch.testing.assert_close(
        fast, model(ids.to(device)).logits, atol=1e-4, rtol=1e-4
    )  # TF32-free fp32 kernels
    assert {r.backend for r in grmoe.routers(model)} == {"reference"}


def test_experts_implementation_by_argument(config: Any) -> None:
    assert (
        GrmoeForCausalLM(config(experts_implementation="grouped_mm")).config._experts_implementation
        == "grouped_mm"
    )
    assert GrmoeForCausalLM(config()).config._experts_implementation == "auto"
    with pytest.raises(ValueError, match="magic"):
        GrmoeForCausalLM(config(experts_implementation="magic"))


def test_loss_is_cross_entropy_plus_the_routers_own_losses(build: Build, ids: torch.Tensor) -> None:
    model = build(router="softmax", router_options={"load_loss": 0.1, "z_loss": 0.01})
    out = model(ids, labels=ids, output_router_logits=True)
    language = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected = torch.zeros(())
    for logits in out.router_logits:
        probs = logits.softmax(-1)
        chosen = torch.zeros_like(probs).scatter(1, probs.topk(2).indices, 1.0)
        balance = 4 * ((chosen.mean(0) / 2) * probs.mean(0)).sum()
        expected += 0.1 * balance + 0.01 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(out.aux_loss, expected)
    torch.testing.assert_close(out.loss, language + expected)
    torch.testing.assert_close(out.cross_entropy, language)
    torch.testing.assert_close(out.router_loss, expected)
    # Evaluation without asking for it measures language alone; training always has the whole objective.
    torch.testing.assert_close(model(ids, labels=ids).loss, language)
    torch.testing.assert_close(model.train()(ids, labels=ids).loss, language + expected)
    model.config.router_aux_loss_coef = 0.5
    halved = model(ids, labels=ids)
    torch.testing.assert_close(halved.loss, language + expected / 2)
    torch.testing.assert_close(halved.router_loss, expected / 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(build: Build, ids: torch.Tensor, reentrant: bool) -> None:
    options = {"load_loss": 0.1, "balance": True}

    def step(checkpoint: bool) -> tuple[Any, ...]:
        model = build(router="softmax", router_options=options).train()
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": True} if reentrant else None)
        loss = model(ids, labels=ids, output_router_logits=True).loss
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        sums = [r.prior_sums.clone() for r in grmoe.routers(model)]
        return loss, grads, sums, [m.tokens for m in model.routing_metrics()]

    (loss, grads, sums, tokens), (loss_c, grads_c, sums_c, tokens_c) = step(False), step(True)
    assert torch.equal(loss, loss_c)
    assert tokens == tokens_c == [27, 27]  # the second forward counts no token again
    for a, b in zip(sums, sums_c, strict=True):
        assert torch.equal(a, b)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, grads_c[name], msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.set_alpha(4.0),
        lambda model: model.update_priors(0.1),
        lambda model: grmoe.routing.set_draw(model, 7, 0),
        lambda model: setattr(grmoe.routers(model)[0], "cap", 1),
    ],
)
def test_checkpointing_refuses_a_backward_with_other_numbers(
    change: Callable[[GrmoeForCausalLM], object], build: Build, ids: torch.Tensor, reentrant: bool
) -> None:
    """The gradients would be those of another model, without an error."""
    model = build(router="softmax", router_options={"balance": True}).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for _ in range(2):  # a backward before the change is right, however often
        model(ids, labels=ids).loss.backward()
        change(model)
    loss = model(ids, labels=ids).loss
    change(model)
    with pytest.raises(RuntimeError, match="changed between a forward pass and its backward"):
        loss.backward()


def test_initialisation(config: Any) -> None:
    torch.manual_seed(0)
    wide = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "router_rank": 16}
    model = GrmoeForCausalLM(config(**wide, initializer_range=0.02, shared_experts=2))
    narrow = 0.02 / math.sqrt(2 * 4)
    for name, p in model.state_dict().items():
        if name.endswith("frames"):
            assert orthonormality_error(p) < 1e-5
        elif name.endswith("log_kappa"):
            assert torch.equal(p, torch.full_like(p, math.log(16**0.5 / 2)))
        elif name.endswith("log_prior"):
            assert not p.any()
        elif p.ndim == 1:
            assert torch.equal(p, torch.ones_like(p)), name
        else:
            std = narrow if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")) else 0.02
            # Sample deviation of a standard deviation over n values: 1/√(2n) of it; five of those.
            assert abs(float(p.std()) / std - 1) < 5 / math.sqrt(2 * p.numel()), name
            assert abs(float(p.mean())) < 5 * std / math.sqrt(p.numel()), name
    frames = [r.frames for r in grmoe.routers(model)]
    assert not torch.equal(frames[0], frames[1])


def test_amortiser_starts_neutral(config: Any) -> None:
    """The initialiser of transformers must not reach the linear layers inside a router."""
    model = GrmoeForCausalLM(config(router_options={"amortizer": "affinity"}))
    for router in grmoe.routers(model):
        assert not router.amortizer_net[2].weight.any()


@pytest.mark.parametrize("router", ["grassmann", "softmax", "vmf"])
def test_routers_stay_in_full_precision(build: Build, ids: torch.Tensor, router: str) -> None:
    model = build(router=router).bfloat16()
    for r in grmoe.routers(model):
        assert {t.dtype for t in r.state_dict().values()} == {torch.float32}
        assert r.alpha_value.dtype == r.prior_sums.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16
    out = model(ids, labels=ids)
    assert out.logits.dtype == torch.bfloat16
    assert torch.isfinite(out.loss)
    assert {r.frames.dtype for r in grmoe.routers(model.half()) if hasattr(r, "frames")} <= {torch.float32}


def test_default_dtype_does_not_reach_routers(config: Any) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = GrmoeForCausalLM(config())
    finally:
        torch.set_default_dtype(torch.float32)
    assert {t.dtype for r in grmoe.routers(model) for t in r.state_dict().values()} == {torch.float32}
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_meta_device_and_materialisation(config: Any, ids: torch.Tensor) -> None:
    with torch.device("meta"):
        model = GrmoeForCausalLM(config(alpha=[1.0, 2.0]))
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    for module in model.modules():  # memory with garbage in it
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(torch.full_like(p, math.nan, device="cpu")))
        for name, buffer in list(module.named_buffers(recurse=False)):
            garbage = math.nan if buffer.is_floating_point() else 77
            setattr(module, name, torch.full_like(buffer, garbage, device="cpu"))
    model.initialize_weights()
    model.tie_weights()
    assert model.alpha == [1.0, 2.0]
    for router in grmoe.routers(model):
        assert (float(router.budget.tau), router.cap, int(router.budget.key)) == (2.0, 2, -1)
        assert orthonormality_error(router.frames) < 1e-5
        assert not router.log_prior.any()
        assert not router.prior_sums.any()
    assert torch.isfinite(model(ids, labels=ids).loss)
    assert [m.tokens for m in model.routing_metrics()] == [27, 27]


def test_the_dial(build: Build, ids: torch.Tensor) -> None:
    model = build()
    before = model(ids).logits
    model.set_alpha(3.0)
    assert (model.alpha, model.config.alpha) == ([3.0, 3.0], 3.0)
    assert not torch.equal(model(ids).logits, before)
    model.set_alpha([1, 2.5])
    assert (model.alpha, model.config.alpha) == ([1.0, 2.5], [1.0, 2.5])
    for bad in ([1.0], -1.0, [1.0, math.nan]):
        with pytest.raises(ValueError, match="alpha"):
            model.set_alpha(bad)
    assert (model.alpha, model.config.alpha) == ([1.0, 2.5], [1.0, 2.5])
    model.set_alpha(1.0)
    assert torch.equal(model(ids).logits, before)


def test_metrics_priors_and_penalty(build: Build, ids: torch.Tensor) -> None:
    model = build().train()
    model(ids, labels=ids).loss.backward()
    metrics = model.routing_metrics()
    assert [m.tokens for m in metrics] == [27, 27]
    assert [m.experts_per_token for m in metrics] == [2.0, 2.0]
    before = [r.log_prior.clone() for r in grmoe.routers(model)]
    model.update_priors(0.1)
    for r, old in zip(grmoe.routers(model), before, strict=True):
        assert not torch.equal(r.log_prior, old)
    model.reset_routing_metrics()
    assert [m.tokens for m in model.routing_metrics()] == [0, 0]
    expected = sum(grmoe.overlap_penalty(r.frames, 0.5, relative=True) for r in grmoe.routers(model))
    torch.testing.assert_close(model.overlap_penalty(0.5), expected)
    model.overlap_penalty(0.5).backward()
    assert model.model.layers[1].mlp.router.frames.grad is not None
    assert float(build(router="softmax").overlap_penalty(0.5)) == 0.0


def test_mass_selection_computes_a_varying_number_of_experts(build: Build, ids: torch.Tensor) -> None:
    computed = []
    for alpha in (0.0, 1.0, 8.0):
        model = build(selection="mass", num_experts_per_tok=4, selection_tau=0.8, alpha=alpha)
        model(ids)
        computed.append(model.routing_metrics()[0].experts_per_token)
    assert computed[0] == 4.0  # a uniform gate needs all four to reach 0.8
    assert computed[0] > computed[1] > computed[2] >= 1.0
    assert computed[1] % 1 != 0


@pytest.mark.parametrize("router", ["softmax", "switch", "hash", "vmf"])
def test_other_routers_by_name(build: Build, ids: torch.Tensor, router: str) -> None:
    model = build(router=router).train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert [type(r) for r in grmoe.routers(model)] == [grmoe.routing.ROUTERS[router]] * 2


def test_hash_router_sees_token_ids(build: Build) -> None:
    """Equal tokens meet equal experts in every layer, whatever came before them."""
    ids = torch.tensor([[5, 8, 5, 9, 5]])
    for logits in build(router="hash")(ids, output_router_logits=True).router_logits:
        assert torch.equal(logits[0], logits[2])
        assert torch.equal(logits[0], logits[4])


@pytest.mark.parametrize("router", ["soft_moe", "grassmann_soft_moe", "expert_choice"])
def test_routers_that_look_ahead_are_refused(config: Any, ids: torch.Tensor, router: str) -> None:
    with pytest.raises(ValueError, match="which looks at later tokens"):
        GrmoeForCausalLM(config(router=router))
    model = GrmoeForCausalLM(config(router=router, allow_noncausal_router=True))
    assert torch.isfinite(model(ids, labels=ids).loss)
    assert GrmoeModel(config(router=router))(ids).last_hidden_state.shape == (3, 9, 32)


@pytest.mark.parametrize("selection", ["topk", "mass", "threshold", "dense"])
def test_the_model_is_causal(build: Build, ids: torch.Tensor, selection: str) -> None:
    model = build(selection=selection)
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 97
    # Another number of rows in a GEMM may sum in another order; the experts of early tokens stay theirs.
    torch.testing.assert_close(model(ids).logits[:, :6], model(changed).logits[:, :6], atol=1e-5, rtol=1e-5)


def test_unknown_router_options_are_a_value_error(config: Any) -> None:
    with pytest.raises(ValueError, match=r"router_options must fit the router 'grassmann'.*spin"):
        GrmoeForCausalLM(config(router_options={"spin": 1}))


def test_bad_input(build: Build, ids: torch.Tensor) -> None:
    model = build()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=model.get_input_embeddings()(ids))
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)


def test_an_embedding_multiplier_is_larger_embeddings(build: Build, ids: torch.Tensor) -> None:
    """The model with multiplier m is the one with embeddings m times as large; the tied head does not grow."""
    plain, scaled = build(), build(embedding_multiplier=4.0)
    same = {name: p.clone() for name, p in scaled.state_dict().items()}
    same["model.embed_tokens.weight"] *= 4
    plain.load_state_dict(same)
    torch.testing.assert_close(scaled(ids).logits, plain(ids).logits)
    embeds = scaled.get_input_embeddings()(ids)
    torch.testing.assert_close(scaled(inputs_embeds=embeds).logits, plain(ids).logits)
    with pytest.raises(ValueError, match="embedding_multiplier must be a finite number > 0, got -1"):
        build(embedding_multiplier=-1)


def test_the_penalty_on_the_residual_stream(build: Build, ids: torch.Tensor) -> None:
    """0.5 · mean (log mean square)² of what enters the norm before each MoE layer, in training alone."""
    model = build(residual_loss_coef=0.5).train()
    entered: list[torch.Tensor] = []
    for layer in (model.model.layers[i] for i in model.config.moe_layers):
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    loss = model(ids, labels=ids).router_loss
    squares = [x.detach().double().square().mean(-1) for x in entered]
    expected = 0.5 * sum(float((square.log() ** 2).mean()) for square in squares)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert expected > 0.1
    assert model.eval()(ids, labels=ids, output_router_logits=True).aux_loss == 0
    ones = torch.randn(2, 3, 8).sign()
    assert residual_loss(ones) == 0
    torch.testing.assert_close(residual_loss(5 * ones), residual_loss(ones / 5))
    with pytest.raises(ValueError, match="residual_loss_coef must be a finite number >= 0, got -1"):
        build(residual_loss_coef=-1)


def test_a_token_of_zeros_leaves_the_penalty_finite(build: Build, ids: torch.Tensor) -> None:
    """The embedding of the padding token is zero. At the start of a text so is what attention adds to it."""
    model = build(residual_loss_coef=0.5, pad_token_id=0).train()
    ids = ids.clone()
    ids[:, 0] = 0
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_parts_of_a_batch_add_up_with_the_routers_losses(build: Build, ids: torch.Tensor) -> None:
    """Trainer gives `num_items_in_batch` and adds up the losses of micro-batches: the sum is the loss of all rows."""
    model = build(residual_loss_coef=0.5).train()
    whole = model(ids, labels=ids)
    items = ids[:, 1:].numel()
    for extra in ({}, {"skip_logits": True}):
        parts = [model(row, labels=row, num_items_in_batch=items, **extra) for row in ids.split(1)]
        for name in ("loss", "router_loss"):
            total = torch.stack([getattr(part, name) for part in parts]).sum()
            torch.testing.assert_close(total, getattr(whole, name))


def test_tied_embeddings_are_one_tensor(build: Build) -> None:
    model = build(tie_word_embeddings=True)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_layer_compiles_once_for_every_alpha(build: Build) -> None:
    model = build()
    layer: Any = model.model.layers[1]
    assert isinstance(layer, GrmoeDecoderLayer)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 5, 32)
    rotary = model.model.rotary_emb(x, torch.arange(5).unsqueeze(0))
    options = {"attention_mask": None, "position_embeddings": rotary}
    with torch._dynamo.config.patch(error_on_recompile=False), torch.no_grad():
        compiled(x, **options)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for alpha in (0.5, 2.0, 7.0):
            model.set_alpha(alpha)
            # A sum in another order: fp32 rounding.
            torch.testing.assert_close(compiled(x, **options), layer(x, **options), atol=1e-5, rtol=1e-5)


def test_a_training_step_compiles_whole(build: Build, ids: torch.Tensor) -> None:
    model = build(router="softmax", router_options={"load_loss": 0.1}).train()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    gradients = []
    for forward in (model, compiled):
        model.zero_grad()
        forward(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert [m.tokens for m in model.routing_metrics()] == [54, 54]
    for eager, fast in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, eager, atol=1e-5, rtol=1e-4)


def test_experts_are_made_once(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second set would be as large as the layer."""
    made = []
    build = ExpertWeights.__init__
    monkeypatch.setattr(ExpertWeights, "__init__", lambda self, *a: (made.append(a), build(self, *a))[1])
    found = config()
    GrmoeForCausalLM(found)
    assert len(made) == len(found.moe_layers)


def test_experts_have_hugging_faces_parameters(build: Build) -> None:
    gated, plain = blocks(build())[0].experts, blocks(build(hidden_act="gelu"))[0].experts
    assert {n: tuple(p.shape) for n, p in gated.named_parameters()} == {
        "gate_up_proj": (4, 48, 32),
        "down_proj": (4, 32, 24),
    }
    assert {n: tuple(p.shape) for n, p in plain.named_parameters()} == {
        "up_proj": (4, 24, 32),
        "down_proj": (4, 32, 24),
    }
    assert isinstance(gated, ExpertWeights)


def test_a_foreign_experts_module_is_called_in_the_portable_format(build: Build, ids: torch.Tensor) -> None:
    """What serving engines do: they replace `experts` and expect (tokens, index, weight), K for every token."""
    model = build(
        selection="mass", num_experts_per_tok=3, router_kappa=4.0
    )  # some tokens need fewer than three
    expected = model(ids).logits
    seen = []

    class Foreign(torch.nn.Module):
        def __init__(self, experts: Any) -> None:
            super().__init__()
            self.inner = [experts]

        def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            seen.append((index, weight))
            y = torch.zeros_like(x)
            weights = self.inner[0]
            for k in range(index.shape[1]):
                inner = weights.activate(torch.einsum("td,thd->th", x, weights.up[index[:, k]]))
                y += weight[:, k : k + 1] * torch.einsum("th,tdh->td", inner, weights.down_proj[index[:, k]])
            return y

    for block in blocks(model):
        block.experts = Foreign(block.experts)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    for index, weight in seen:
        assert index.shape == weight.shape == (27, 3)
        assert ((index >= 0) & (index < 4)).all()
        assert (index.sort(-1).values.diff(dim=-1) > 0).all()  # no expert twice
        assert (weight == 0).any()


def test_config_without_moe_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves no MoE layer"):
        GrmoeConfig(num_hidden_layers=1, moe_every=2)


def test_the_loss_alone_is_the_loss(build: Build, ids: torch.Tensor) -> None:
    """With and without logits: the same sums, so equal but for the order within them."""
    model = build().train()
    labels = ids.clone()
    labels[0, :5] = -100
    for extra in ({}, {"num_items_in_batch": torch.tensor(7)}, {"shift_labels": labels.roll(-1, 1)}):
        grads = []
        for skip in (False, True):
            model.zero_grad()
            out = model(ids, labels=labels, skip_logits=skip, use_cache=False, **extra)
            assert (out.logits is None) == skip
            out.loss.backward()
            grads.append((out.loss.detach(), *(p.grad.clone() for p in model.parameters())))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="skip_logits needs labels"):
        model(ids, skip_logits=True)


def test_the_residual_stream_is_in_autocasts_precision(build: Build, ids: torch.Tensor) -> None:
    """Every block reads and writes bf16 under autocast, as with weights gathered in bf16; weights stay fp32."""
    model = build().train()
    plain = model(ids, labels=ids).loss
    seen: list[torch.dtype] = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _, args, out: seen.extend(
                [args[0].dtype, (out[0] if isinstance(out, tuple) else out).dtype]
            )
        )
    model(ids, labels=ids)
    assert set(seen) == {torch.float32}
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    assert set(seen) == {torch.bfloat16}
    loss.backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert float(loss) == pytest.approx(float(plain), rel=0.02)  # bf16: 2⁻⁸ a step, four blocks


def test_hash_routing_differs_by_layer(build: Build, ids: torch.Tensor) -> None:
    model = build(router="hash")
    chosen = [logits.argmax(-1) for logits in model(ids, output_router_logits=True).router_logits]
    assert not torch.equal(chosen[0], chosen[1])
    same = build(router="hash", router_options={"seed": [0, 0]})
    chosen = [logits.argmax(-1) for logits in same(ids, output_router_logits=True).router_logits]
    assert torch.equal(chosen[0], chosen[1])
    assert [r.seed for r in grmoe.routers(build(router="hash", router_options={"seed": 5}))] == [5, 6]
    with pytest.raises(
        ValueError, match=r"router_options.seed must be one number or 2, one per MoE layer, got \[1\]"
    ):
        build(router="hash", router_options={"seed": [1]})


def test_a_hash_model_with_one_seed_for_all_layers_loads_only_as_one(build: Build, tmp_path: Path) -> None:
    """Models were saved so before layers had seeds of their own: they must not route otherwise in silence."""
    old = build(router="hash", router_options={"seed": [0, 0]})
    old.config.router_options = {}
    old.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"loads with router_options=\{'seed': \[0, 0, …\]\}"):
        GrmoeForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="seed must be the one the checkpoint was saved with, got 1"):
        build(router="hash").load_state_dict(old.state_dict())
    same = GrmoeForCausalLM.from_pretrained(tmp_path, router_options={"seed": [0, 0]})
    assert [r.seed for r in grmoe.routers(same)] == [0, 0]


@pytest.mark.parametrize("router", ["hash", "soft_moe"])
def test_balance_is_refused_where_it_does_nothing(build: Build, router: str) -> None:
    with pytest.raises(
        ValueError, match=r"balance must be False for .*Router: its gate has no prior to learn"
    ):
        build(router=router, router_options={"balance": True}, allow_noncausal_router=True)


@pytest.mark.parametrize("prior", ["paper", "uniform"])
def test_fixed_priors_ignore_a_loaded_balanced_prior(
    build: Build, ids: torch.Tensor, tmp_path: Path, prior: str
) -> None:
    model = build()
    for router in grmoe.routers(model):
        router.log_prior.copy_(torch.tensor([3.0, -1.0, 0.0, -2.0]))
    model.save_pretrained(tmp_path)
    fixed = GrmoeForCausalLM.from_pretrained(tmp_path, router_options={"prior": prior}).eval()
    got = fixed(ids, output_router_logits=True).router_logits
    for router in grmoe.routers(fixed):
        assert torch.equal(router.log_prior, torch.tensor([3.0, -1.0, 0.0, -2.0]))  # loaded, and not read
        router.log_prior.zero_()
    for ours, want in zip(got, fixed(ids, output_router_logits=True).router_logits, strict=True):
        assert torch.equal(ours, want)


ONE_ALPHA = [2, 2.0, np.float32(2), np.int64(2), np.array(2.0), torch.tensor(2.0), torch.tensor(2)]
TWO_ALPHAS = [
    [1, 2],
    (1.0, np.float32(2)),
    np.array([1, 2]),
    torch.tensor([1.0, 2.0]),
    [torch.tensor(1), 2.0],
]


@pytest.mark.parametrize("value", ONE_ALPHA + TWO_ALPHAS, ids=repr)
def test_alpha_is_any_number_or_list_of_numbers(build: Build, tmp_path: Path, value: Any) -> None:
    want = [2.0, 2.0] if any(value is v for v in ONE_ALPHA) else [1.0, 2.0]
    model = build()
    model.set_alpha(value)
    assert model.alpha == model.config.alphas == want
    assert build(alpha=value).alpha == want
    grmoe.set_alpha(model, 3.0)
    grmoe.set_alpha(model, value)
    assert model.alpha == want
    model.set_alpha(1.0)
    model.save_pretrained(
        tmp_path
    )  # a configuration with NumPy or PyTorch numbers in it could not be written
    loaded = GrmoeForCausalLM.from_pretrained(tmp_path, alpha=value)
    assert loaded.alpha == want
    loaded.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize(
    "value",
    [
        3e37,
        -1.0,
        math.nan,
        math.inf,
        np.float64("nan"),
        torch.tensor(-1.0),
        torch.tensor([1.0, math.nan]),
        "2",
        None,
    ],
    ids=repr,
)
def test_an_alpha_that_would_break_the_gate_is_refused(build: Build, value: Any) -> None:
    model = build()
    for set_it in (model.set_alpha, lambda a: grmoe.set_alpha(model, a), lambda a: build(alpha=a)):
        with pytest.raises(ValueError, match="alpha must be"):
            set_it(value)
    assert model.alpha == [1.0, 1.0]  # nothing was set
    assert model.config.alpha == 1.0
