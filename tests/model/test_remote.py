"""An exported folder loads where grmoe is not installed."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loading import realigned

import grmoe
from grmoe.model import GrmoeForCausalLM, export_remote_code, remote
from grmoe.runs.card import card_name, model_card
from grmoe.runs.export import write_model
from grmoe.runs.open import open_model

Build = Callable[..., GrmoeForCausalLM]

SCRIPT = Path(__file__).with_name("without_grmoe.py")


ALONE = """
import builtins, os, sys
import grmoe
assert not {"torch", "transformers", "rich"} & set(sys.modules), "import grmoe must stay light"
def ask(question=""):
    print("transformers asks:", question, file=sys.stderr, flush=True)
    os._exit(3)  # an exception here would be taken for the answer "no"
builtins.input = ask
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
assert "grmoe.model" not in sys.modules, "our models are imported when one is opened"
AutoTokenizer.from_pretrained(sys.argv[1])
assert type(AutoConfig.from_pretrained(sys.argv[1])) is grmoe.model.GrmoeConfig
assert type(AutoModelForCausalLM.from_pretrained(sys.argv[1])) is grmoe.model.GrmoeForCausalLM
"""


def run_clean(folder: Path) -> str:
    """The script, by a Python without site: packages are found, the `.pth` file of an editable install is not read."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "HF_HOME": str(folder / "hf"),
        "HF_MODULES_CACHE": str(folder / "modules"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-S", "-P", str(SCRIPT)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def write_copies(saved: Path, where: Path) -> GrmoeForCausalLM:
    """Two exported folders of one model with budgets, as `grmoe dial --write` leaves them; the model."""
    loaded = open_model(saved)
    model = loaded.model
    bias = [[1.0 + e for e in range(model.config.gate_experts)]] * 2
    model.config.budget_curve = [
        {"experts_per_token": 1.0, "tau": 0.2, "alpha": 1.0, "cap": 3, "bias": bias},
        {"experts_per_token": 3.0, "tau": 1.0, "alpha": [1.0, 2.0], "cap": 3},
    ]
    model.set_budget(1.5)
    for name in ("first", "second"):
        write_model(loaded, where / name, model_card(loaded, card_name(Path(name))))
    return model


def test_exported_folders_work_without_grmoe(
    unusual: tuple[Path, GrmoeForCausalLM], ids: torch.Tensor, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cards, copies side by side, the Trainer, saving and loading: see the script. One process takes seconds."""
    folder = tmp_path_factory.mktemp("clean")
    model = realigned(write_copies(unusual[0], folder))
    assert {p.name for p in (folder / "first").iterdir()} >= {
        "config.json", "configuration_grmoe.py", "attention_grmoe.py", "modeling_grmoe.py", "grmoe_routing.py",
        "README.md",
    }  # fmt: skip
    expected: dict[str, Any] = {"ids": ids, "budgets": {1.5: model(ids).logits}}
    model.set_budget(2.5)
    expected["budgets"][2.5] = model(ids).logits
    model.set_alpha(2.0)
    expected["logits"] = model(ids).logits
    expected["text"] = model.generate(ids, max_new_tokens=6, do_sample=False)
    torch.save(expected, folder / "expected.pt")
    torch.manual_seed(0)
    layer = grmoe.MoE(16, 8, 4, selection=grmoe.routing.Mass(0.8, cap=3))
    x = torch.randn(7, 16)
    y, routing = layer.run(x)
    torch.save((layer.state_dict(), x, y, layer.truncation(x, routing, y).bound), folder / "layer.pt")
    assert "loaded by transformers_modules" in run_clean(folder)


def test_import_grmoe_alone_is_enough(saved: tuple[Path, GrmoeForCausalLM]) -> None:
    """In a new process: tokenizer, configuration and model of an exported folder. Nobody is asked anything."""
    folder, _ = saved
    export_remote_code(folder)
    source = str(Path(grmoe.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(folder)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_lines_of_the_card_run_where_grmoe_is_installed(
    saved: tuple[Path, GrmoeForCausalLM],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As written, and with `import grmoe` in place of `trust_remote_code`. Nobody is asked anything."""
    folder = tmp_path_factory.mktemp("card")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asks"))
    write_copies(saved[0], folder)
    [code] = re.findall(r"```python\n(.*?)```", Path("first/README.md").read_text(), re.DOTALL)
    for text in (code, "import grmoe\n" + code.replace(", trust_remote_code=True", "")):
        names: dict[str, Any] = {}
        exec(text, names)
        assert type(names["model"]) is GrmoeForCausalLM
        assert names["model"].budget == 2.0


def test_the_bundle_imports_nothing_of_the_package() -> None:
    tree = ast.parse(remote.bundle())
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = {a.name for n in imports if isinstance(n, ast.Import) for a in n.names}
    modules |= {str(n.module) for n in imports if isinstance(n, ast.ImportFrom)}
    assert not [m for m in modules if m.startswith(("grmoe", "triton"))]


def test_names_that_clash_are_told_apart() -> None:
    source = "def _wide(x):\n    return x._wide + other._wide(_wide)\n"
    assert remote._rename(source, {"_wide": "_a_wide"}) == (
        "def _a_wide(x):\n    return x._wide + other._wide(_a_wide)\n"
    )


def test_the_installed_package_is_preferred(saved: tuple[Path, GrmoeForCausalLM], ids: torch.Tensor) -> None:
    folder, model = saved
    export_remote_code(folder)
    loaded = GrmoeForCausalLM.from_pretrained(folder)
    assert isinstance(loaded.model.layers[1].mlp, grmoe.MoE)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    assert (
        json.loads((folder / "config.json").read_text())["auto_map"]["AutoModel"]
        == "modeling_grmoe.GrmoeModel"
    )


def test_export_needs_a_saved_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"without config\.json"):
        export_remote_code(tmp_path)
