"""A model that decodes by kernels gives the answers that it gives without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from grmoe import attention, linears
from grmoe.kernels import decode_attention, rotary, runtime, thin_linear
from grmoe.model import GrmoeConfig, GrmoeForCausalLM
from grmoe.model.attention_grmoe import GrmoeRMSNorm

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets models use the kernels here, and lists the calls."""
    calls: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: calls.append(name) or function(*args)

    here = SimpleNamespace(INTERPRETED=False, available=runtime.available, attempt=runtime.attempt)
    here.runs_on = runtime.runs_on
    monkeypatch.setattr(attention, "runtime", here)
    monkeypatch.setattr(linears, "runtime", here)
    monkeypatch.setattr(decode_attention, "attend", counted("attend", decode_attention.attend))
    monkeypatch.setattr(rotary, "rotate", counted("rotate", rotary.rotate))
    return calls


def make(**options: Any) -> GrmoeForCausalLM:
    torch.manual_seed(0)
    config = GrmoeConfig(
        **options, vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, router_rank=4, initializer_range=0.3,
        max_position_embeddings=64,
    )  # fmt: skip
    return GrmoeForCausalLM(config).eval()


def generate(model: GrmoeForCausalLM, **options: Any) -> Any:
    """Two sequences, the second with two tokens of padding in front."""
    ids = torch.tensor([[5, 6, 7, 8, 9], [0, 0, 11, 12, 13]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    torch.use_deterministic_algorithms(False)  # it fills what transformers' cache reserves with NaN
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("cache", [None, "static"])
def test_answers_are_the_same(cache: str | None, used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    options = {"cache_implementation": cache, "disable_compile": True}
    ours = generate(model, **options)
    assert (used.count("rotate"), used.count("attend")) == (2 * 6, 2 * 5)  # the prompt has several tokens
    monkeypatch.setattr(attention, "runtime", SimpleNamespace(INTERPRETED=True))
    plain = generate(model, **options)
    assert torch.equal(ours.sequences, plain.sequences)
    for a, b in zip(ours.logits, plain.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(used) == 2 * 11


def test_training_never_takes_them(used: list[str]) -> None:
    """Also where checkpointing runs a block without gradients first."""
    model = make().train()
    model.gradient_checkpointing_enable()
    ids = torch.tensor([[5, 6, 7]])
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        model(input_ids=ids)
    model.eval()
    model(input_ids=ids)  # gradients could be asked for
    assert used == []


def test_other_implementations_of_attention_stay(used: list[str]) -> None:
    model = make()
    model.set_attn_implementation("eager")
    generate(model)
    assert "attend" not in used


def counting(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens and matrices of each linear map of few tokens, which are turned on."""
    calls: list[tuple[int, int]] = []
    plain = thin_linear.apply

    def counted(x: Any, weights: Any, **options: Any) -> Any:
        calls.append((len(x), len(weights)))
        return plain(x, weights, **options)

    monkeypatch.setattr(linears, "MOST_TOKENS", 8)
    monkeypatch.setattr(thin_linear, "apply", counted)
    return calls


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize("act", ["silu", "gelu"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_linear_maps_of_few_tokens_change_no_answer(
    cache: str | None, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(hidden_act=act)
    assert sorted(type(layer.mlp).__name__ for layer in model.model.layers) == ["GrmoeMLP", "GrmoeMoE"]
    options = {"cache_implementation": cache, "disable_compile": True}
    plain = generate(model, **options)
    calls = counting(monkeypatch)
    ours = generate(model, **options)
    step = [
        (2, 3),
        (2, 1),
        (2, 2 if act == "silu" else 1),
        (2, 1),
        (2, 3),
        (2, 1),
    ]  # a dense block, then a MoE block
    assert sorted(calls) == sorted(step * 5)  # the prompt has too many tokens
    assert torch.equal(ours.sequences, plain.sequences)
    for a, b in zip(ours.logits, plain.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("used")
@torch.no_grad()
def test_whoever_listens_to_a_layer_hears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make(), torch.tensor([[5]])
    calls = counting(monkeypatch)
    heard: list[torch.Size] = []
    with_hook = model.model.layers[0].self_attn
    hook = with_hook.q_proj.register_forward_hook(lambda module, args, out: heard.append(out.shape))
    model(input_ids=ids)
    assert len(heard) == 1
    assert calls.count((1, 3)) == 1  # the other block's
    hook.remove()
    calls.clear()
    found = model(input_ids=ids, output_hidden_states=True)
    assert len(found.hidden_states) == 3
    assert calls.count((1, 3)) == 2
    calls.clear()
    model(input_ids=ids)  # the hooks of the last call stay
    assert calls.count((1, 3)) == 2
    model.set_attn_implementation("eager")
    calls.clear()
    assert len(model(input_ids=ids, output_attentions=True).attentions) == 2
    assert calls.count((1, 3)) == 0
    model.set_attn_implementation("sdpa")
    calls.clear()
    model.train()(input_ids=ids)
    assert calls == []


@pytest.mark.usefixtures("used")
@torch.no_grad()
@pytest.mark.parametrize("what", ["norm", "attention", "feed-forward"])
def test_what_someone_put_in_place_of_a_part_is_used(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, seen = make(), torch.tensor([[5]]), []
    calls = counting(monkeypatch)
    layer: Any = next(each for each in model.model.layers if type(each.mlp).__name__ == "GrmoeMLP")
    name = {"norm": "input_layernorm", "attention": "self_attn", "feed-forward": "mlp"}[what]
    part = getattr(layer, name)

    class Other(type(part)):  # type: ignore[misc]
        def forward(self, *args: Any, **options: Any) -> Any:
            seen.append(1)
            return super().forward(*args, **options)

    part.__class__ = Other
    model(input_ids=ids)
    assert seen == [1]
    usual = (
        [(1, 3)] * 2 + [(1, 1)] * 2 + [(1, 2), (1, 1)]
    )  # attention of both blocks, and a dense feed-forward
    left = [(1, 2), (1, 1)] if what == "feed-forward" else [(1, 3), (1, 1)]
    assert Counter(calls) == Counter(usual) - Counter(left)


@torch.no_grad()
def test_a_norm_under_autocast_keeps_the_precision() -> None:
    """PyTorch would run its own in fp32 there."""
    with FakeTensorMode():
        x = torch.empty(2, 8, device="cuda", dtype=torch.bfloat16)
        norm = GrmoeRMSNorm(8).eval()
        norm.weight = torch.nn.Parameter(torch.ones(8, device="cuda", dtype=torch.bfloat16))
        for on in (False, True):
            torch.set_autocast_enabled("cuda", on)  # `torch.autocast` wants a GPU
            torch.set_autocast_dtype("cuda", torch.bfloat16)
            try:
                assert norm(x).dtype == torch.bfloat16
            finally:
                torch.set_autocast_enabled("cuda", False)


@pytest.mark.usefixtures("used")
@torch.no_grad()
def test_a_compiled_step_is_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    model, ids = make(), torch.tensor([[5, 6], [7, 8]])
    plain = model(input_ids=ids).logits
    monkeypatch.setattr(linears, "MOST_TOKENS", 8)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=ids).logits, plain, rtol=1e-4, atol=1e-4)
    text = str(torch._dynamo.explain(model)(input_ids=ids).graphs[0].code)
    assert text.count("thin_linear") == 2 + 2 + 2  # attention of both blocks, and the dense feed-forward
