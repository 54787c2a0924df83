"""Every block of Python in README and the pages runs, in order, page by page.

A block after `<!-- not run: REASON -->` is left out. Blocks run in a folder with prepared text (`runs/data`), a small
trained run (`runs/first`) and its export (`my-model`).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import write_corpus
from doc_pages import FENCE, NAMES, NOTHING, ROOT, all_pages, find_object, without_code
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.config import from_dict
from grmoe.data import prepare
from grmoe.runs.config import TrainConfig
from grmoe.train.loop import train

BLOCK = re.compile(r"(?:<!-- not run: (.+?) -->\n)?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# docs/howto/own-model.md has a test of its own, which trains for longer and looks at more.
PAGES = [n for n in NAMES if "```python" in all_pages()[n] and n != "docs/howto/own-model.md"]
MODEL = {
    "preset": None, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "moe_every": 1, "num_experts": 4, "router_rank": 8, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    corpus = write_corpus(folder / "corpus.jsonl", documents=1500)
    prepare([str(corpus)], folder / "runs/data", tokenizer="bpe:280", validation=0.1, workers=1)
    tree = {
        "out": str(folder / "runs/first"),
        "steps": 2,
        "device": "cpu",
        "model": MODEL,
        "data": {"path": str(folder / "runs/data"), "batch_size": 8},
        "validation": {"every": 0, "tokens": 500},
        "checkpoint": {"every": 0},
    }
    train(from_dict(TrainConfig, tree))
    exported = CliRunner().invoke(
        app, ["export", str(folder / "runs/first"), "--out", str(folder / "my-model")]
    )
    assert exported.exit_code == 0, exported.output
    return folder


def run_page(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for reason, block in BLOCK.findall(all_pages()[name]):
        if not reason:
            exec(compile(block, name, "exec"), names)
    return names


@pytest.mark.parametrize("name", [n for n in PAGES if n != "README.md"])
def test_the_python_of_a_page_runs(
    name: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "here"  # a page may write: it gets a copy
    shutil.copytree(workplace, own)
    names = run_page(name, own, monkeypatch)
    if name == "docs/howto/language-model.md":
        assert (own / "my-model/grmoe_routing.py").is_file()
        assert names["yours"].model.layers[1].mlp.router.alpha == 2.0


def test_the_python_of_the_readme_runs_and_the_entropy_is_inside_its_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = run_page("README.md", tmp_path, monkeypatch)
    gate, bounds = names["gate"], names["bounds"]
    assert names["router"].alpha == 2.0
    entropy = -torch.xlogy(gate.probs, gate.probs).sum(-1)
    assert (bounds.lower.bound <= entropy + 1e-5).all()
    assert (entropy <= bounds.upper.bound + 1e-5).all()


def test_examples_for_other_models_are_short() -> None:
    blocks = [code for _, code in FENCE.findall(all_pages()["docs/howto/language-model.md"])]
    (llama,) = [block for block in blocks if "LlamaForCausalLM" in block]
    assert len(llama.splitlines()) < 20


@pytest.mark.parametrize("name", NAMES)
def test_fences_name_their_language(name: str) -> None:
    fences = re.findall(r"^```(.*)$", all_pages()[name], re.MULTILINE)
    assert all(fences[::2]), f"{name} has a fence without a language"


@pytest.mark.parametrize("name", NAMES)
def test_dotted_names_exist(name: str) -> None:
    if name == "CHANGELOG.md":  # it names what is gone
        pytest.skip("names of the past")
    for dotted in set(re.findall(r"`(grmoe(?:\.\w+)+)(?:\([^`]*\))?`", all_pages()[name])):
        assert find_object(dotted) is not NOTHING, f"{name} names {dotted}"


def test_names_with_an_underscore_exist() -> None:
    """Fields, options and settings that a page names alone, such as `load_of_type`, are words of the source."""
    others = {"extra_body", "retain_graph", "save_to_disk"}  # of openai, torch and datasets
    others |= {"resume_from_checkpoint", "label_smoothing_factor"}  # of transformers
    files = [f for room in ("src", "benchmarks", "configs") for f in (ROOT / room).rglob("*") if f.is_file()]
    source = " ".join(f.read_text() for f in files if f.suffix in (".py", ".js", ".yaml"))
    known = set(re.findall(r"\w+", source)) | others
    for name in NAMES:
        if name != "CHANGELOG.md":  # it names what is gone
            named = set(re.findall(r"`([a-z]\w*_\w+)`", without_code(all_pages()[name])))
            assert named <= known, f"{name} names {sorted(named - known)}"
