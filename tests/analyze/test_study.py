"""The study itself: against a naive loop, over all routers, with planted structure, and as a command."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from grmoe import geometry
from grmoe.analyze import Analysis, analyze
from grmoe.cli import app
from grmoe.config import from_dict
from grmoe.data import TokenDataset, prepare
from grmoe.model.choices_grmoe import NOT_CAUSAL
from grmoe.probe.pieces import Pieces
from grmoe.probe.text import open_stream
from grmoe.probe.typed_windows import TypedWindow, covering_starts, typed_windows
from grmoe.probe.words import TYPES
from grmoe.routing import ROUTERS, routers
from grmoe.runs.config import TrainConfig
from grmoe.runs.export import export
from grmoe.runs.open import LoadedModel
from grmoe.runs.results import load_results, plain
from grmoe.train.loop import train

TYPE_LISTS = ("of_type", "gate_of_type")


def options(router: str) -> dict[str, Any]:
    return {"router": router, "allow_noncausal_router": router in NOT_CAUSAL}


def sums_to_one(table: Any, axis: int) -> bool:
    total = np.array(table, dtype=float).sum(axis)
    return bool(np.allclose(total[np.isfinite(total)], 1, atol=1e-5))


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_runs_and_its_shares_sum_to_one(router: str, make: Any, texts: list[Path]) -> None:
    found = analyze(make(**options(router)), texts, 800)
    assert found.router == router
    assert found.tokens == sum(found.type_tokens) == sum(found.domain_tokens) == 800
    assert len(found.layers) == 2
    for layer in found.layers:
        assert sum(map(sum, layer.counts)) + layer.dropped == 800
        assert sums_to_one(layer.of_expert, 1)
        assert sums_to_one(layer.domain_of_expert, 1)
        assert all(sums_to_one(getattr(layer, name), 0) for name in TYPE_LISTS)
        assert sum(layer.leading_load) == pytest.approx(1 - layer.dropped / 800)
        assert sums_to_one(layer.gate_load, 0)
        # Load is the tokens received: a type's columns sum to its experts per token, experts to those of the layer.
        received = np.array(layer.load_of_type, dtype=float)
        assert np.allclose(received.sum(0), np.array(layer.experts_per_token, dtype=float), equal_nan=True)
        present = np.array(found.type_tokens) > 0
        assert np.allclose(received[:, present] @ np.array(found.type_tokens)[present] / 800, layer.load)
        assert 0 <= layer.entropy <= math.log(4) + 1e-5
        assert (layer.kappa is None) == (router not in ("grassmann", "vmf"))
        assert (layer.geometry is None) == (
            router in ("hash", "soft_moe", "grassmann_soft_moe")
        )  # slots have no one direction
    assert (found.kappa_correlation is None) == (router not in ("grassmann", "vmf"))
    json.dumps(plain(found), allow_nan=False)


def test_identity_experts_compute_nothing(make: Any, texts: list[Path]) -> None:
    """They are chosen and lead tokens. The experts per token are those that the router's own metrics count."""
    loaded = make(identity_experts=2)
    found = analyze(loaded, texts[:1], 320)
    assert (found.experts, found.identity_experts) == (6, 2)
    loaded.model.reset_routing_metrics()
    ids = [window.ids_S for window in _windows(loaded, texts[0], 320)]
    with torch.no_grad():
        loaded.model(torch.from_numpy(np.stack(ids)))
    for layer, metrics in zip(found.layers, loaded.model.routing_metrics(), strict=True):
        assert metrics.experts_per_token < 1.9  # some choices fall on identity experts
        assert sum(layer.load) == pytest.approx(metrics.experts_per_token, rel=1e-5)
        assert layer.load[4:] == [0, 0]
        assert layer.load[:4] == pytest.approx(metrics.load, rel=1e-5)
        assert sum(layer.leading_load[4:]) > 0


def _windows(loaded: LoadedModel, text: Path, tokens: int) -> list[TypedWindow]:
    stream = open_stream([str(text)], loaded, tokens)
    starts = covering_starts(stream.tokens, tokens, 32)
    return list(typed_windows(stream, Pieces(loaded.tokenizer), starts, 32))


def test_it_is_what_a_naive_loop_counts(
    make: Any, texts: list[Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    """Token by token, one window at a time, from the logits the model itself returns."""
    loaded = make()
    found = analyze(loaded, texts[:1], 200)
    ids = np.array([*tokenizer(texts[0].read_text()).input_ids, tokenizer.eos_token_id])
    types = Pieces(tokenizer).types(ids)
    counts = [Counter[tuple[int, int]]() for _ in range(2)]
    received, gates = np.zeros((2, 4)), np.zeros((2, 4))
    entropies: list[dict[int, list[float]]] = [{k: [] for k in range(len(TYPES))} for _ in range(2)]
    seen = 0
    for start in covering_starts(len(ids), 200, 32):
        window = torch.tensor(ids[start : start + 32])[None]
        with torch.no_grad():
            logits = loaded.model(window, output_router_logits=True).router_logits
        for layer in range(2):
            for place in range(32):
                gate = [math.exp(v) for v in logits[layer][place].tolist()]
                gate = [g / sum(gate) for g in gate]
                kind = int(types[start + place])
                counts[layer][max(range(4), key=gate.__getitem__), kind] += 1
                gates[layer] += gate
                received[layer, np.argsort(gate)[-2:]] += 1  # the two most probable
                entropies[layer][kind].append(-sum(g * math.log(g) for g in gate))
        seen += 32
    assert found.tokens == seen
    for number, layer in enumerate(found.layers):
        assert layer.load == pytest.approx(received[number] / seen)
        assert layer.leading_load == pytest.approx(
            [sum(counts[number][e, k] for k in range(7)) / seen for e in range(4)]
        )
        assert layer.gate_load == pytest.approx(gates[number] / seen, abs=1e-5)
    for layer, count, by_type in zip(found.layers, counts, entropies, strict=True):
        assert layer.counts == [[count[e, k] for k in range(len(TYPES))] for e in range(4)]
        for mean, std, values in zip(
            layer.type_entropy, layer.type_entropy_std, by_type.values(), strict=True
        ):
            if values:
                assert mean == pytest.approx(np.mean(values), abs=2e-5)
                assert std == pytest.approx(
                    np.std(values), abs=1e-3
                )  # a difference of squares, in fp32 gates
            else:
                assert mean is std is None


def test_the_size_of_a_batch_does_not_matter(
    make: Any, texts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = analyze(make(), texts, 400)
    monkeypatch.setattr("grmoe.analyze.study.batch_rows", lambda length, device: 3)
    stages: list[tuple[str, int, int]] = []
    parts = analyze(make(), texts, 400, lambda *step: stages.append(step))
    assert [layer.counts for layer in parts.layers] == [layer.counts for layer in whole.layers]
    assert [layer.entropy for layer in parts.layers] == pytest.approx(
        [layer.entropy for layer in whole.layers]
    )
    assert stages[:5] == [("routing", done, 13) for done in (3, 6, 9, 12, 13)]
    assert stages[5:] == [("statistics", 1, 2), ("statistics", 2, 2)]


def planted(loaded: LoadedModel, expert_of: Callable[[torch.Tensor], torch.Tensor]) -> LoadedModel:
    """A model in which `expert_of` decides the expert of each token id."""
    for router in routers(loaded.model):
        router.backend = "reference"
        router.gate = lambda x, ids: 9 * torch.nn.functional.one_hot(expert_of(ids), 4).float()  # type: ignore[method-assign]
    return loaded


def test_planted_structure_is_found_and_chance_is_not(make: Any, texts: list[Path]) -> None:
    loaded = make(router="softmax")
    ids = np.concatenate([loaded.tokenizer(t.read_text()).input_ids for t in texts])
    type_of = np.zeros(len(loaded.tokenizer), dtype=np.int64)
    type_of[ids] = Pieces(loaded.tokenizer).types(ids)
    draw = torch.Generator().manual_seed(0)
    anywhere = torch.randint(0, 4, (len(type_of),), generator=draw)
    cases = {
        "types": planted(loaded, lambda i: torch.from_numpy(type_of)[i] % 4),
        "hash": make(router="hash"),
        "any": planted(make(router="softmax"), lambda i: anywhere[i]),
        "random": planted(make(router="softmax"), lambda i: torch.randint(0, 4, i.shape, generator=draw)),
    }
    found = {name: analyze(case, texts, 1500).layers[0].information for name, case in cases.items()}
    assert all(found.values())
    types, hashed, anyhow, random = (found[name] for name in cases)
    assert types.by_token_p < 0.01
    assert types.relative > 0.5
    # A router that tells tokens apart is far from chance, and no specialist in types.
    assert hashed.shuffled_p < 0.01
    assert anyhow.shuffled_p < 0.01
    assert anyhow.by_token_p > 0.01
    assert random.value < 1.5 * random.shuffled_95
    assert random.shuffled_p > 0.01


def test_the_dial_at_zero_is_the_uniform_gate(make: Any, texts: list[Path]) -> None:
    loaded = make(router="softmax")
    loaded.model.set_alpha(0.0)
    for layer in analyze(loaded, texts, 300).layers:
        assert layer.alpha == 0
        assert layer.entropy == pytest.approx(math.log(4), abs=1e-5)
        assert np.allclose(layer.gate_load, 0.25, atol=1e-5)


def test_it_is_deterministic_and_leaves_the_model_alone(make: Any, texts: list[Path]) -> None:
    loaded = make()
    first = analyze(loaded, texts, 400)
    assert analyze(loaded, texts, 400) == first
    assert all(metrics.tokens == 0 for metrics in loaded.model.routing_metrics())
    assert all(not router.counter.paused and not router._forward_hooks for router in routers(loaded.model))


def test_geometry_is_that_of_the_frames(make: Any, texts: list[Path]) -> None:
    loaded = make()
    for layer, router in zip(analyze(loaded, texts, 100).layers, routers(loaded.model), strict=True):
        U = router.frames.detach().double()
        assert layer.geometry is not None
        assert layer.geometry.gram[1][2] == pytest.approx(float((U[1].T @ U[2]).square().sum()) / 6, abs=1e-6)
        angles = geometry.principal_angles(U[1], U[2])
        shown = (layer.geometry.angle_min, layer.geometry.angle_mean, layer.geometry.angle_max)
        want = (angles.min(), angles.mean(), angles.max())
        assert [m[2][1] for m in shown if m] == pytest.approx([float(v) for v in want], abs=1e-6)
        assert layer.kappa == pytest.approx(router.kappa.tolist(), rel=1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on two domains."""
    folder = tmp_path_factory.mktemp("run")
    with (folder / "corpus.jsonl").open("w") as file:
        for i in range(120):
            text = f"The {i}th letter from Anna to Bob, {i % 7} pages" if i % 2 else f"x_{i} = run({i})\n" * 4
            file.write(json.dumps({"text": text, "domain": "letters" if i % 2 else "code"}) + "\n")
    prepare([str(folder / "corpus.jsonl")], folder / "data", tokenizer="bpe:300", validation=0.3, workers=1)
    tree = {
        "out": str(folder / "run"), "steps": 4, "device": "cpu",
        "data": {"path": str(folder / "data"), "batch_size": 4},
        "model": {
            "preset": None, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_experts": 4, "router_rank": 8, "max_position_embeddings": 32,
        },
        "log": {"every": 1}, "validation": {"every": 0, "tokens": 500}, "checkpoint": {"every": 0},
    }  # fmt: skip
    train(from_dict(TrainConfig, tree))
    return folder / "run"


def test_the_command_writes_what_it_says(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["analyze", str(run), "--tokens", "600", "--alpha", "2", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert "I(expert; type)" in result.output
    names = {
        "results.json",
        "analysis.md",
        "types.png",
        "entropy.png",
        "kappa.png",
        "domains.png",
        "overlap.png",
    }
    assert {p.name for p in out.iterdir()} == names | {"training.png"}
    results = load_results(out / "results.json", "analysis")
    assert results.step == 4
    saved = results.body
    assert set(saved) == {field.name for field in dataclasses.fields(Analysis)}
    numbers = [float(text) for text in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", json.dumps(saved))]
    assert all(float(f"{number:.6g}") == number for number in numbers)
    assert saved["layers"][0]["alpha"] == 2
    assert saved["training"]["steps"] == [1, 2, 3, 4]
    assert np.array(saved["training"]["load"]).shape == (1, 4, 4)
    assert sorted(saved["domains"]) == ["code", "letters"]
    data = TokenDataset(run.parent / "data", "validation")
    windows = covering_starts(data.tokens, 600, 32)
    held_out = np.concatenate([data.domains_of(s, s + 32) for s in windows])
    assert saved["domain_tokens"] == np.bincount(held_out, minlength=2).tolist()
    page = (out / "analysis.md").read_text()
    assert all(f"({name})" in page for name in names if name.endswith(".png"))


def test_domains_of_a_stretch_are_those_of_its_documents(run: Path) -> None:
    data = TokenDataset(run.parent / "data", "validation")
    names = [name for name, tokens in data.iter_documents() for _ in tokens]
    assert [data.index["domains"][i] for i in data.domains_of(5, data.tokens)] == names[5:]


def test_mistakes_are_one_line(run: Path, tmp_path: Path, make: Any) -> None:
    for arguments, words in (
        ([str(tmp_path)], "neither a run"),
        ([str(run), "--checkpoint", "77"], "checkpoint must be"),
        ([str(run), "--text", str(tmp_path / "none.txt")], "neither a file"),
    ):
        result = CliRunner().invoke(app, ["analyze", *arguments, "--out", str(tmp_path / "o")])
        assert result.exit_code == 2
        assert words in " ".join(result.output.split())
    with pytest.raises(ValueError, match="--text"):
        analyze(make())
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match="text must hold a document"):
        analyze(make(), [tmp_path / "empty.txt"])


def test_what_is_found_of_an_exported_folder_lies_beside_it(
    run: Path, texts: list[Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    export(run, model)
    before = sorted(p.name for p in model.iterdir())
    done = CliRunner().invoke(app, ["analyze", str(model), "--text", str(texts[0]), "--tokens", "300"])
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in model.iterdir()) == before  # it is passed on
    assert (tmp_path / "model-analysis" / "results.json").is_file()
