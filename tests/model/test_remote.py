"""An exported folder loads where grmoe is not installed."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import grmoe
from grmoe.model import GrmoeForCausalLM, export_remote_code, remote

Build = Callable[..., GrmoeForCausalLM]

CLEAN = """
import sys, torch
try:
    import grmoe
except ImportError:
    pass
else:
    sys.exit("grmoe is installed here")
{body}
"""


def run_clean(body: str, tmp_path: Path) -> str:
    """Python without site: packages are found, the `.pth` file of an editable install is not read."""
    script = tmp_path / "clean.py"
    script.write_text(CLEAN.format(body=body))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-S", "-P", str(script)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_an_exported_folder_loads_without_grmoe(
    saved: tuple[Path, GrmoeForCausalLM], ids: torch.Tensor, tmp_path: Path
) -> None:
    folder, model = saved
    written = export_remote_code(folder)
    assert {p.name for p in written} == {
        "config.json", "configuration_grmoe.py", "modeling_grmoe.py", "grmoe_routing.py",
    }  # fmt: skip
    bias = [[1.0 + e for e in range(model.config.num_experts)]] * 2
    model.config.budget_curve = [
        {"experts_per_token": 1.0, "tau": 0.2, "alpha": 1.0, "cap": 3, "bias": bias},
        {"experts_per_token": 3.0, "tau": 1.0, "alpha": [1.0, 2.0], "cap": 3},
    ]
    model.set_budget(1.5)
    model.save_pretrained(folder)
    export_remote_code(folder)
    budgets = {1.5: model(ids).logits}
    model.set_budget(2.5)
    budgets[2.5] = model(ids).logits
    model.set_alpha(2.0)
    torch.save(
        {
            "ids": ids,
            "budgets": budgets,
            "logits": model(ids).logits,
            "text": model.generate(ids, max_new_tokens=6, do_sample=False),
        },
        tmp_path / "expected.pt",
    )
    out = run_clean(
        f"""
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
folder, tmp = {str(folder)!r}, {str(tmp_path)!r}
expected = torch.load(tmp + "/expected.pt")
options = dict(trust_remote_code=True)
assert AutoConfig.from_pretrained(folder, **options).router == "grassmann"
model = AutoModelForCausalLM.from_pretrained(folder, alpha=2.0, **options)
for tensor in model.state_dict(keep_vars=True).values():
    tensor.data = tensor.data.clone()  # BLAS rounds otherwise where a file is mapped to odd addresses
assert torch.equal(model(expected["ids"]).logits, expected["logits"])
text = model.generate(expected["ids"], max_new_tokens=6, do_sample=False)
assert torch.equal(text, expected["text"])
for name in ("reference", "grouped", "eager", "grouped_mm"):
    model.set_experts_implementation(name)
    torch.testing.assert_close(model(expected["ids"]).logits, expected["logits"], atol=1e-5, rtol=1e-5)
model.set_experts_implementation("auto")
assert AutoModelForCausalLM.from_pretrained(folder, **options).budget == 1.5
for budget, logits in expected["budgets"].items():
    model.set_budget(budget)
    assert torch.equal(model(expected["ids"]).logits, logits)
try:
    model.set_budget(4)
except ValueError as error:
    assert "from 1 to 3 experts per token" in str(error)
else:
    sys.exit("a budget outside the curve was taken")
model.set_alpha(2.0)
model.train()(expected["ids"], labels=expected["ids"]).loss.backward()
model.update_priors(0.1)
float(model.overlap_penalty(0.5))
assert model.alpha == [2.0, 2.0] and len(model.routing_metrics()) == 2
assert type(AutoModel.from_pretrained(folder, **options)).__name__ == "GrmoeModel"
# A model loaded so can be saved, code included, and loaded again.
model.save_pretrained(tmp + "/again")
again = AutoModelForCausalLM.from_pretrained(tmp + "/again", **options)
assert again.alpha == [2.0, 2.0]
print("loaded by", type(model).__module__.split(".")[0])
""",
        tmp_path,
    )
    assert "loaded by transformers_modules" in out
    assert (tmp_path / "again" / "grmoe_routing.py").is_file()


def test_the_bundle_alone_computes_what_the_package_does(tmp_path: Path) -> None:
    (tmp_path / remote.BUNDLE).write_text(remote.bundle())
    torch.manual_seed(0)
    layer = grmoe.MoE(16, 8, 4, selection=grmoe.routing.Mass(0.8, cap=3))
    x = torch.randn(7, 16)
    y, routing = layer.run(x)
    bound = layer.truncation(x, routing, y).bound
    torch.save((layer.state_dict(), x, y, bound), tmp_path / "layer.pt")
    run_clean(
        """
sys.path.insert(0, ".")
import grmoe_routing as g
state, x, y, bound = torch.load("layer.pt")
layer = g.MoE(16, 8, 4, selection=g.Mass(0.8, cap=3))
layer.load_state_dict(state)
assert torch.equal(layer(x), y)
torch.testing.assert_close(layer.truncation(x).bound, bound)
for name in g.ROUTERS:
    options = {"rank": 4} if name == "grassmann" else {}
    router = g.build_router(name, 16, 4, **options)
    assert torch.isfinite(router(x).probs).all(), name
    router.read_metrics()
uniform = g.build_router("grassmann", 16, 4, rank=4, prior="uniform", concentration="diagonal", linear=True)
assert torch.isfinite(uniform(x).probs).all() and bool(uniform.logit_range().holds)
g.MoE(16, 8, 4, backend="grouped")(x)
try:
    g.MoE(16, 8, 4, backend="triton")(x)
except ValueError as error:
    assert "triton" in str(error)
""",
        tmp_path,
    )


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
