"""Blocks compute the same thing, the checks can tell when they do not, and the dial's inputs are what they say.

The other libraries are not installed here. Their stand-ins follow the documented call and weight layout of each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grmoe.bench.blocks import Block, Setting, skewed, softmax_gate
from grmoe.bench.dial import fit_line, given_selection, near_tokens
from grmoe.bench.forms import FORMS, IN_PARTS, OURS
from grmoe.bench.hopper_peers import deinterleave, interleave, sonicmoe, triton_kernels
from grmoe.bench.layer import (
    BOTH,
    FORWARD,
    GATES,
    HUGGING_FACE,
    _form_runs,
    compare,
    contenders,
    gate_share,
)
from grmoe.bench.measure import Row, Runs
from grmoe.bench.shapes import LayerShape
from grmoe.kernels import runtime
from grmoe.kernels.runtime import INTERPRETED
from grmoe.probe.timing import Times
from grmoe.routing import Mass

CPU = torch.device("cpu")


@pytest.fixture
def setting() -> Setting:
    return Setting(LayerShape(96, 32, 4, 24, 2), 8, CPU, torch.float32)


def loop(x: Tensor, up: Tensor, down: Tensor, expert: Tensor, weight: Tensor, *, gate_first: bool) -> Tensor:
    rows = []
    for token, experts, weights in zip(x, expert, weight, strict=True):
        parts = [(up[e] @ token).chunk(2) for e in experts]
        inner = [F.silu(a) * b if gate_first else F.silu(b) * a for a, b in parts]
        rows.append(sum(w * (down[e] @ h) for w, e, h in zip(weights, experts, inner, strict=True)))
    return torch.stack(rows)


class FakeOlmoe(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        assert config._experts_implementation == "grouped_mm"
        N, D, I = config.num_experts, config.hidden_size, config.intermediate_size
        self.gate, self.experts, self.top_k = nn.Module(), nn.Module(), config.num_experts_per_tok
        self.gate.weight = nn.Parameter(torch.zeros(N, D))
        self.experts.gate_up_proj = nn.Parameter(torch.empty(N, 2 * I, D))
        self.experts.down_proj = nn.Parameter(torch.empty(N, D, I))

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.view(-1, x.shape[-1])
        weight, expert = softmax_gate(x_TD, self.gate.weight, self.top_k)
        up, down = self.experts.gate_up_proj, self.experts.down_proj
        return loop(x_TD, up, down, expert, weight, gate_first=True).view(x.shape)


class FakeLiger:
    @staticmethod
    def apply(x: Tensor, up: Tensor, down: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        assert expert.dtype == torch.int32
        return loop(x, up, down, expert, weight, gate_first=True)


class FakeGLUMLP(nn.Module):
    def __init__(self, input_size: int, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.experts, self.output_experts = nn.Module(), nn.Module()
        self.experts.weight = nn.Parameter(torch.empty(num_experts, 2 * hidden_size, input_size))
        self.output_experts.weight = nn.Parameter(torch.empty(num_experts, input_size, hidden_size))

    def forward(self, x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
        return loop(x, self.experts.weight, self.output_experts.weight, expert, weight, gate_first=False)


def fake_sonic(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, gate, up, _, down, _, top_k, stream, activation, inference, softmax_over_chosen = given
    assert (activation, stream, softmax_over_chosen) == ("swiglu", 0, True)
    assert inference is not torch.is_grad_enabled()
    weight, expert = softmax_gate(x, gate, top_k)
    up, down = up.permute(2, 0, 1), down.permute(2, 0, 1)
    split = torch.cat([up[:, 0::2], up[:, 1::2]], 1)  # its rows alternate
    return loop(x, split, down, expert, weight, gate_first=True), x @ gate.T, torch.zeros(len(gate))


def fake_topk(logits: Tensor, k: int, apply_softmax: bool) -> SimpleNamespace:
    """What `triton_kernels.topk` returns: entries are numbered row by row, and sorted by expert."""
    assert apply_softmax
    chosen, expert = logits.topk(k)
    flat = expert.flatten()
    to_token = flat.argsort(stable=True)
    metadata = SimpleNamespace(
        col_sum=flat.bincount(minlength=logits.shape[1]),
        col_sorted_indx=to_token,
        row_sorted_indx=to_token.argsort(),
    )
    return SimpleNamespace(vals=chosen.softmax(-1), indx=expert, mask_metadata=metadata)


def fake_matmul_ogs(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    routing: Any,
    gather_indx: Any = None,
    scatter_indx: Any = None,
    gammas: Tensor | None = None,
    fused_activation: Any = None,
) -> Tensor:
    rows = x if gather_indx is None else x[gather_indx[0] // routing.K]
    parts = rows.split(routing.expert_rows.tolist())
    y = torch.cat([part @ w[e] + (0 if bias is None else bias[e]) for e, part in enumerate(parts)])
    if fused_activation is not None:
        specs, (alpha, limit) = fused_activation
        assert (specs["name"], specs["reduction_n"], alpha, limit) == ("swiglu", 2, 1.0, float("inf"))
        gate, up = y[:, 0::2], y[:, 1::2]
        y = F.silu(gate) * (up + 1)  # gpt-oss's
    if gammas is not None:
        y = y * gammas.unsqueeze(-1)
    if scatter_indx is None:
        return y
    _, to_token = scatter_indx
    return torch.zeros(len(y) // routing.K, y.shape[1]).index_add(0, to_token // routing.K, y)


@dataclass
class FakeRouting:
    weights: Tensor
    expert_rows: Tensor
    N: int
    K: int
    rows: Any


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    contents: dict[str, dict[str, Any]] = {
        "transformers.models.olmoe.modeling_olmoe": {
            "OlmoeConfig": SimpleNamespace,
            "OlmoeSparseMoeBlock": FakeOlmoe,
        },
        "liger_kernel.ops.fused_moe": {"LigerFusedMoEFunction": FakeLiger},
        "scattermoe.mlp": {"GLUMLP": FakeGLUMLP},
        "sonicmoe.functional": {"moe_TC_softmax_topk_layer": fake_sonic},
        "sonicmoe.enums": {"ActivationType": SimpleNamespace(SWIGLU="swiglu")},
        "triton_kernels.topk": {"topk": fake_topk},
        "triton_kernels.tensor": {
            "make_ragged_tensor_metadata": lambda sizes, total: SimpleNamespace(slice_sizes=sizes)
        },
        "triton_kernels.swiglu": {"swiglu_fn": None},
        "triton_kernels.matmul_ogs": {
            "matmul_ogs": fake_matmul_ogs,
            "RoutingData": FakeRouting,
            "GatherIndx": lambda *indices: indices,
            "ScatterIndx": lambda *indices: indices,
            "FnSpecs": lambda name, fn, names, reduction_n: {"name": name, "reduction_n": reduction_n},
            "FusedActivation": lambda *given: given,
        },
    }
    for name, names in contents.items():
        module = ModuleType(name)
        vars(module).update(names)
        # Import finds the full name first; parents are only looked up on the way to it.
        for parent in ("", *name.split(".")[:-1]):
            if parent:
                path = name[: name.index(parent) + len(parent)]
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("peer", [Setting.hugging_face, Setting.liger, Setting.scattermoe, sonicmoe])
def test_peers_compute_what_our_layer_with_a_softmax_gate_computes(
    setting: Setting, peer: Callable[[Setting], Block]
) -> None:
    block = peer(setting)
    ours = setting.ours(router=setting.softmax)
    # fp32 sums of 24 to 32 terms in another order.
    torch.testing.assert_close(block.forward(setting.x_TD), ours.forward(setting.x_TD), rtol=1e-4, atol=1e-5)
    theirs, own = (b.both(setting.x_TD, setting.grad_TD) for b in (block, ours))
    assert len(theirs) == len(own) == 4  # x, gate and two expert weights
    torch.testing.assert_close(theirs[0], own[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(theirs[1], own[1], rtol=1e-4, atol=1e-5)
    errors = block.errors()
    assert set(errors) == {"y", "x", "weight", "gate_up_proj", "down_proj"}
    assert max(errors.values()) < 1e-5


@pytest.mark.usefixtures("peers")
def test_triton_kernels_compute_the_same_forward(setting: Setting) -> None:
    block, ours = triton_kernels(setting), setting.ours(router=setting.softmax)
    torch.testing.assert_close(block.forward(setting.x_TD), ours.forward(setting.x_TD), rtol=1e-4, atol=1e-5)
    assert block.errors().keys() == {"y"}
    assert block.errors()["y"] < 1e-6


def test_interleaving_and_back() -> None:
    rows = torch.arange(12).view(1, 6, 2)
    assert interleave(rows)[0, :, 0].tolist() == [0, 6, 2, 8, 4, 10]
    torch.testing.assert_close(deinterleave(interleave(rows)), rows)


def test_tokens_with_a_tie_are_not_compared() -> None:
    setting = Setting(LayerShape(96, 32, 4, 24, 2), 8, CPU, torch.bfloat16)
    x, chosen = setting.skewed_tokens()
    logits = F.linear(x, setting.gate_ND).detach()
    assert 48 < len(x) <= 96
    assert (logits.gather(1, chosen).amin(1) > logits.scatter(1, chosen, -9e9).amax(1)).all()
    setting.gate_ND.data[2] = setting.gate_ND.data[1]  # experts 1 and 2 tie always
    _, chosen = setting.skewed_tokens()
    assert len(chosen) < 48
    assert ((chosen == 1).any(1) == (chosen == 2).any(1)).all()
    setting.gate_ND.data[:] = 0.0
    assert len(setting.skewed_tokens()[0]) == 96  # ties everywhere: better to compare them than nothing


@pytest.mark.usefixtures("peers")
def test_the_check_of_a_peer_can_fail(setting: Setting) -> None:
    block = setting.liger()
    errors = setting.peer_errors(lambda x: 1.01 * block.call(x), block.parameters)
    assert errors == pytest.approx(dict.fromkeys(errors, 0.01), rel=1e-3)


@pytest.mark.parametrize("backend", ["reference", "grouped", "auto"])
def test_errors_of_ours_are_rounding(setting: Setting, backend: str) -> None:
    errors = setting.ours(backend).errors()
    assert set(errors) == {"y", "x", "frames", "log_kappa", "gate_up_proj", "down_proj"}
    assert max(errors.values()) < 1e-5  # fp32, sums of 100 terms, some of them cancelling


def test_the_check_of_ours_can_fail(setting: Setting) -> None:
    moe = setting.layer(skewed(setting.grassmann))
    errors = setting.errors(moe, lambda x: 1.01 * moe(x))
    assert min(errors.values()) > 0.009  # the output and every gradient


def test_skew_starves_one_expert_and_favours_another(setting: Setting) -> None:
    load = skewed(setting.grassmann)(setting.x_TD).selected.sum(0)
    assert load[0] == 0
    assert load[-1] > 0.75 * len(setting.x_TD)
    assert setting.grassmann.log_prior.abs().max() == 0  # the original stays as it was


def test_backends_do_not_leak_through_a_shared_router(setting: Setting) -> None:
    blocks = [setting.ours(name) for name in ("reference", "auto")]
    routers: list[Any] = [block.module.router for block in blocks if block.module is not None]
    assert routers[0] is not routers[1]
    assert [router.backend for router in routers] == ["reference", "auto"]


@pytest.mark.parametrize("average", [1.0, 1.25, 2.5, 4.0])
def test_given_selections_have_their_average_and_an_even_load(average: float) -> None:
    torch.manual_seed(0)
    selected = given_selection(400, 6, average, CPU)
    assert selected.sum() == average * 400
    assert set(selected.sum(1).tolist()) <= {int(average), int(average) + 1}
    load = selected.sum(0)
    assert load.max() - load.min() <= 1


def test_near_tokens_make_the_dial_move_the_compute() -> None:
    setting = Setting(LayerShape(512, 64, 8, 8, 4), 8, CPU, torch.float32, Mass(0.9, cap=4))
    router = setting.grassmann
    x = near_tokens(router, 512)
    used = []
    for alpha in (0.5, 1.0, 2.0, 5.0):
        router.alpha = alpha
        used.append(float(router(x).selected.sum() / 512))
    assert used == sorted(used, reverse=True)
    assert used[0] > 1.5 * used[-1]


def test_a_line_is_fitted_exactly() -> None:
    fit = fit_line([1.0, 2.0, 4.0], [5.0, 8.0, 14.0])
    assert (fit.slope_ms, fit.offset_ms, fit.r2) == pytest.approx((3.0, 2.0, 1.0))
    assert fit(3.0) == pytest.approx(11.0)


ONE, MANY = LayerShape(1, 16, 2, 8, 1), LayerShape(256, 16, 72, 8, 2)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here, not interpreted")
@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_the_layer_and_the_default_is_restored(name: str) -> None:
    form = FORMS[name]
    suitable = next(filter(form.suits, (LayerShape(16, 16, 4, 8, 2), ONE, MANY)))
    setting = Setting(suitable, 4, CPU, torch.float32)
    before = [getattr(module, key) for module, key, _ in form.choices()]
    runs = _form_runs(setting, form)
    assert set(runs.timed) == {mode for mode, on in ((FORWARD, form.forward), (BOTH, form.backward)) if on}
    block = setting.ours("reference", setting.softmax if form.softmax else setting.grassmann)
    plain = {
        FORWARD: lambda: block.forward(setting.x_TD),
        BOTH: lambda: block.both(setting.x_TD, setting.grad_TD),
    }
    for mode, timed in runs.timed.items():
        # fp32 sums of 4 to 16 terms.
        torch.testing.assert_close(timed(), plain[mode](), rtol=1e-4, atol=1e-5)
    errors = runs.errors()
    assert max(errors.values()) < 1e-5, errors
    assert [getattr(module, key) for module, key, _ in form.choices()] == before


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here, not interpreted")
def test_a_chosen_backward_of_the_layer_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from grmoe.kernels import experts

    used: list[Any] = []
    plain = experts.hidden_gradient

    def listen(*args: Any, **options: Any) -> Any:
        used.append(experts.fused_parts(args[0]))
        return plain(*args, **options)

    monkeypatch.setattr(experts, "hidden_gradient", listen)
    setting = Setting(LayerShape(4, 16, 2, 8, 1), 4, CPU, torch.float32)
    _form_runs(setting, FORMS["ours, softmax gate, backward fused"]).timed[BOTH]()
    _form_runs(setting, FORMS[IN_PARTS]).timed[BOTH]()
    assert used == [(True, True, True)]


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here, not interpreted")
def test_errors_without_a_backward_are_those_of_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path without gradients, which that of all other errors never takes."""
    from grmoe.kernels import one_token

    plain = one_token.experts
    monkeypatch.setattr(one_token, "experts", lambda *args, **options: 1.5 * plain(*args, **options))
    setting = Setting(ONE, 4, CPU, torch.float32)
    errors = _form_runs(setting, FORMS["ours, one token"]).errors()
    assert errors == {"y": pytest.approx(0.5, rel=1e-3)}


@pytest.mark.parametrize("name", GATES)
def test_other_gates_share_the_frames_and_are_checked(name: str) -> None:
    setting = Setting(LayerShape(16, 16, 4, 8, 2), 4, CPU, torch.float32)
    block = setting.ours(router=setting.gate(**GATES[name]))
    assert block.module is not None
    torch.testing.assert_close(block.module.router.frames, setting.grassmann.frames)
    errors = block.errors()
    assert set(errors) > {
        "y",
        "x",
        "frames",
        "log_kappa",
        "gate_up_proj",
        "down_proj",
    }  # and its further weights
    assert all(error < 1e-5 for error in errors.values()), errors


def test_ranks_beside_sonicmoe_and_the_better_of_hugging_face() -> None:
    few, many = LayerShape(8, 64, 2, 8, 1), LayerShape(512, 64, 2, 8, 1)
    names = [c.name for c in contenders(many, torch.device("cuda"), torch.bfloat16)]
    assert [name for name in names if "rank" in name] == [
        "ours, rank 16",
        "ours, rank 8",
    ]  # 32 // 2 and 32 // 4
    assert not [c for c in contenders(few, torch.device("cuda"), torch.bfloat16) if "rank" in c.name]
    assert [c.name for c in contenders(many, CPU, torch.float32, 16) if "rank" in c.name] == []

    times = {
        OURS: 2.0,
        "ours, rank 16": 1.0,
        "SonicMoE": 1.5,
        HUGGING_FACE: 5.0,
        f"{HUGGING_FACE}, batched_mm": 4.0,
    }
    kinds = {name: "ours" if name.startswith("ours") else "peer" for name in times}
    rows = [Row(name, kinds[name], "torch", {FORWARD: Times([[ms]])}) for name, ms in times.items()]  # type: ignore[arg-type]
    ratios = {ratio.name: ratio.value for ratio in compare(many, rows).ratios}
    assert ratios["SonicMoE / ours, rank 16, forward"] == 1.5
    assert ratios["best of Hugging Face (Hugging Face OLMoE block, batched_mm) / ours, forward"] == 2.0
    assert ratios["best peer (SonicMoE) / ours, forward"] == 0.75

    fused = "ours, softmax gate, backward fused"
    rows = [
        Row("SonicMoE", "peer", "torch", {BOTH: Times([[3.0]])}, peak=400),
        Row(fused, "ours", "grmoe", {BOTH: Times([[2.0]])}, peak=300),
    ]
    ratios = {ratio.name: ratio.value for ratio in compare(many, rows).ratios}
    assert ratios == {
        f"SonicMoE / {fused}, forward+backward": 1.5,
        f"peak memory, {fused} / SonicMoE": 0.75,
    }


def test_a_gate_of_smaller_rank_has_the_first_directions() -> None:
    setting = Setting(LayerShape(16, 16, 4, 8, 2), 4, CPU, torch.float32)
    assert torch.equal(setting.gate(2).frames, setting.grassmann.frames[..., :2])


def test_a_choice_holds_in_a_contenders_calls_alone() -> None:
    module: Any = SimpleNamespace(CHOICE=1)
    runs = Runs({FORWARD: lambda: module.CHOICE}, lambda: {"error": module.CHOICE}, {"fact": 3.0})
    chosen = runs.with_choice((module, "CHOICE", 2))
    assert (chosen.timed[FORWARD](), chosen.errors(), chosen.facts) == (2, {"error": 2}, {"fact": 3.0})
    assert (runs.timed[FORWARD](), module.CHOICE) == (1, 1)

    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        Runs({FORWARD: fail}).with_choice((module, "CHOICE", 2)).timed[FORWARD]()
    assert module.CHOICE == 1

    def fall_back() -> None:
        runtime._failed.add("some kernel")

    with pytest.raises(RuntimeError, match="did not compile: some kernel"):
        Runs({FORWARD: fall_back}).with_choice((module, "CHOICE", 2)).timed[FORWARD]()
    assert (module.CHOICE, runtime.failures()) == (1, [])


def test_the_gates_share_of_the_flops_follows_what_the_backward_computes() -> None:
    for experts, products in ((16, 3), (8, 4)):  # 1024 columns, and 512
        shape = LayerShape(512, 256, experts, 64, 2)
        gate, rest = 2 * experts * 64, 6 * 2 * 64
        assert gate_share(shape, 64, FORWARD) == pytest.approx(gate / (gate + rest))
        assert gate_share(shape, 64, BOTH) == pytest.approx(products * gate / (products * gate + 3 * rest))
