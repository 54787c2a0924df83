"""`grmoe bench train-model`: the peer equals ours, contenders are freed, figures follow from the times."""

from __future__ import annotations

import gc
import json
import math
import weakref
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from grmoe.bench import models
from grmoe.bench import train_model as bench
from grmoe.bench.measure import Contender, Row, Runs
from grmoe.cli import app
from grmoe.model import PRESETS, preset
from grmoe.probe.timing import Times

CPU = torch.device("cpu")
MICRO: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "router_rank": 4,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
RUN = ["--device", "cpu", "--rounds", "2", "--steps", "2", "--batch", "2", "--length", "16"]


@pytest.fixture(autouse=True)
def micro(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "micro", MICRO)


def micro_shape(hidden_act: str = "silu") -> models.ModelShape:
    return models.ModelShape("micro", 2, 16, hidden_act)


def quiet(stage: str) -> None: ...


def test_the_usual_length_fits_into_the_presets_context() -> None:
    """Before, tiny needed --length on a GPU: its context has 512 tokens, and the usual length is 1024."""
    cuda = torch.device("cuda")  # only its type is read
    lengths = {name: models.ModelShape.on(cuda, name, None, None).length for name in (None, "tiny", "micro")}
    assert lengths == {None: 1024, "tiny": 512, "micro": 32}
    assert models.ModelShape.on(CPU, "tiny", None, None).length == 128
    assert models.ModelShape.on(cuda, "tiny", 1, None, usual_length=16).length == 16
    assert models.ModelShape.on(cuda, "micro", 1, None, usual_length=64).length == 32
    with pytest.raises(ValueError, match=r"length must be in \[2, 512\], got 1024"):
        models.ModelShape.on(cuda, "tiny", None, 1024)  # what was asked for is not changed


@pytest.mark.parametrize("name", ["350m", "1.3b"])
def test_all_contenders_have_the_same_size(name: str) -> None:
    shape = models.ModelShape(name, 1, 1024, preset(name).hidden_act)
    with torch.device("meta"):
        built = [
            models.olmoe(shape.config(), "sdpa"),
            models.ours(shape.config("grassmann")),
            models.ours(shape.config()),
        ]
    peer, own, twin = (sum(p.numel() for p in model.parameters()) for model in built)
    assert peer == twin
    assert own == pytest.approx(peer, rel=0.01)  # frames in place of gate rows


@pytest.mark.parametrize("hidden_act", ["silu", "gelu"])
@pytest.mark.parametrize("attention", ["sdpa", "sdpa_no_mask"])
def test_the_peer_with_our_weights_is_our_softmax_model(hidden_act: str, attention: str) -> None:
    shape = micro_shape(hidden_act)
    own, peer = models.ours(shape.config()), models.olmoe(shape.config(), attention)
    names = {"router.weight": "gate.weight", "experts.": "experts.weights."}
    state = {}
    for name, value in own.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        state[name] = value
    missing, unexpected = peer.load_state_dict(state, strict=False)
    assert not missing
    assert all("router" in name for name in unexpected)  # prior
    ids = torch.randint(64, (2, 16))
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for model in (own, peer)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0.0)  # fp32, sums of 50 terms in another order
    for loss in losses:
        loss.backward()
    for ours, theirs in ((own.model.embed_tokens, peer.model.embed_tokens), (own.lm_head, peer.lm_head)):
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("hidden_act", ["silu", "gelu"])
def test_the_peers_experts_follow_autocast(hidden_act: str) -> None:
    experts = models.CastExperts(micro_shape(hidden_act).config())
    x, index, weights = torch.randn(8, 32), torch.randint(4, (8, 2)), torch.rand(8, 2)
    plain = experts(x, index, weights)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, index, weights)
    assert (plain.dtype, y.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(y.float(), plain, rtol=0.1, atol=0.02)  # bf16 has 8 bits
    y.sum().backward()
    assert experts.weights.down_proj.grad is not None
    assert experts.weights.down_proj.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_contender_trains(dtype: torch.dtype) -> None:
    for contender in bench.contenders(micro_shape(), CPU, dtype, ("eager",)):
        step = contender.build().timed["step"]
        losses = [step() for _ in range(3)]
        assert all(isinstance(loss, torch.Tensor) and not loss.requires_grad for loss in losses)
        first, _, last = (float(loss) for loss in losses)  # type: ignore[arg-type]
        assert last < first < 1.2 * math.log(64)


def test_a_compile_that_fails_leaves_the_eager_form(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile

    def compile(model: nn.Module, **options: Any) -> Any:
        if "Olmoe" in type(model).__name__:
            raise RuntimeError("no such graph")
        return real(model, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", compile)
    shape = micro_shape()
    plan = [
        c
        for c in bench.contenders(shape, CPU, torch.float32, ("eager", "compiled"))
        if "no mask" not in c.name
    ]
    *_, rows = bench.measure(plan, CPU, 2, 1, False, quiet)
    result = bench.compare(shape, rows, None)
    peer, own = result.row("Hugging Face Olmoe, compiled"), result.row("ours, compiled")
    assert peer is not None
    assert own is not None
    assert peer.failure == "RuntimeError: no such graph"
    assert own.facts["graphs"] == 1
    best = bench.best(result, "Hugging Face Olmoe")
    assert best is not None
    assert best.name == "Hugging Face Olmoe"
    assert any(ratio.name.endswith("over Hugging Face Olmoe") for ratio in result.ratios)


def test_a_configuration_that_cannot_be_built_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = models.ModelShape.config

    def config(shape: models.ModelShape, router: str = "softmax") -> Any:
        if router == "grassmann":
            raise ValueError("router_rank must fit")
        return real(shape, router)

    monkeypatch.setattr(models.ModelShape, "config", config)
    result = CliRunner().invoke(
        app, ["bench", "train-model", *RUN, "--preset", "micro", "--out", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    (shape,) = json.loads((tmp_path / "results.json").read_text())["shapes"]
    rows = {row["contender"]: row for row in shape["rows"]}
    assert rows.pop("ours")["failure"] == "ValueError: router_rank must fit"
    assert [row["failure"] for row in rows.values()] == [None] * 3


@pytest.mark.parametrize(("apart", "expected"), [(False, ["a", "b"]), (True, ["a", "b", "a", "b"])])
def test_contenders_are_held_together_or_freed(apart: bool, expected: list[str]) -> None:
    built: list[str] = []
    alive: list[weakref.ref[nn.Module]] = []

    def contender(name: str) -> Contender:
        def build() -> Runs:
            gc.collect()
            assert not apart or not any(ref() for ref in alive)  # those before are gone
            model = nn.Linear(1, 1)
            built.append(name)
            alive.append(weakref.ref(model))
            return Runs({"step": lambda: model.weight.detach().abs().sum()})

        return Contender(name, build)

    rounds = list(bench.measure([contender("a"), contender("b")], CPU, 2, 3, apart, quiet))
    assert built == expected
    assert [row.failure for row in rounds[-1]] == [None, None]
    assert [len(turn) for turn in rounds[-1][0].times["step"].rounds] == [3, 3]


def test_a_loss_that_is_no_number_fails() -> None:
    step = lambda: torch.tensor(math.nan)  # noqa: E731
    ((row,),) = bench.measure([Contender("a", lambda: Runs({"step": step}))], CPU, 1, 1, False, quiet)
    assert row.failure == "ValueError: loss must be finite, got nan"
    assert not row.times


def test_figures_follow_from_the_times() -> None:
    shape = micro_shape()

    def row(name: str, ms: float, last: float = 1.0) -> Row:
        facts = {"flops": 5e9, "first loss": 2.0, "last loss": last}
        return Row(name, "ours", "grmoe", {"step": Times([[ms], [ms]])}, facts=facts)

    rows = [row("ours", 5.0), row("ours, compiled", 4.0), row("ours, softmax top-2", 3.0, 3.0)]
    rows += [row("Hugging Face Olmoe", 8.0), row("Hugging Face Olmoe, no mask", 6.0)]
    result = bench.compare(shape, rows, 1e15)
    assert rows[1].facts["tokens/s"] == 8000.0  # 2·16 tokens in 4 ms
    assert rows[1].facts["MFU %"] == pytest.approx(4.0)  # 4e13 of 1e15
    assert {ratio.name: ratio.value for ratio in result.ratios} == {
        "tokens/s, ours, compiled over Hugging Face Olmoe": 2.0,
        "tokens/s, ours, compiled over Hugging Face Olmoe, no mask": 1.5,
        "tokens/s, ours, compiled over ours, softmax top-2": 0.75,
    }
    assert bench.lines(result)[2:] == [
        "ours, compiled: 8,000 tokens/s (8,000–8,000), MFU 4.0 %",
        "ours, softmax top-2: 10,667 tokens/s (10,667–10,667), MFU 5.3 %",
        "ours, softmax top-2: its loss rose, so it does not train",
    ]


def test_command(tmp_path: Path) -> None:
    command = ["bench", "train-model", "--preset", "micro", "--out", str(tmp_path), *RUN]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "train-model.png").stat().st_size > 10_000
    content = json.loads((tmp_path / "results.json").read_text())
    (found,) = content["shapes"]
    assert found["shape"] == {"preset": "micro", "batch": 2, "length": 16, "hidden_act": "silu"}
    rows = {row["contender"]: row for row in found["rows"]}
    peers = ["Hugging Face Olmoe", "Hugging Face Olmoe, no mask"]
    assert list(rows) == [*peers, "ours", "ours, softmax top-2"]
    for row in rows.values():
        assert row["failure"] is None
        assert row["tokens/s"] == pytest.approx(32e3 / row["times"]["step"]["median_ms"])
        assert row["last loss"] < row["first loss"]
        assert len(row["times"]["step"]["rounds_ms"]) == 2
    ratios = {ratio["name"]: ratio["value"] for ratio in found["ratios"]}
    peer, ours_row = (rows[name]["times"]["step"]["rounds_ms"] for name in (peers[0], "ours"))
    each = [median(theirs) / median(mine) for theirs, mine in zip(peer, ours_row, strict=True)]
    assert ratios["tokens/s, ours over Hugging Face Olmoe"] == pytest.approx(median(each))
    assert "No MFU" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "9b"], "preset must be one of 'tiny', 'small', '350m'"),
        (["--preset", "micro", "--length", "33"], "length must be in [2, 32], got 33"),
        (
            ["--preset", "micro", "--length", "8", "--hidden-act", "relu"],
            "hidden_act must be 'silu' or 'gelu'",
        ),
        (["--contender", "nobody"], "--contender must be part of a contender's name (Hugging Face Olmoe"),
    ],
)
def test_mistakes_get_one_clear_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    command = ["bench", "train-model", "--device", "cpu", "--out", str(tmp_path), *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
