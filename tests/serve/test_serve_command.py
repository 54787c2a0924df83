"""`grmoe serve` as a process: what it refuses to start with, whose code it runs, how it ends; a short load study."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import typer
from processes import Command
from small_model import make_model, make_tokenizer, offline, options
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.serve import Options, make_service
from grmoe.serve.batching import Sequence
from grmoe.serve.errors import Invalid
from grmoe.serve.sampling import Sampling, TokenSampler

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "GRMOE_API_KEY"} | {"OMP_NUM_THREADS": "1"}


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    return " ".join(result.output.split())


def test_what_is_not_served(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("out: x\n")
    assert "grmoe export" in refused(str(tmp_path), "--port", "0")
    (tmp_path / "dial" / "model").mkdir(parents=True)
    (tmp_path / "dial" / "model" / "config.json").write_text("{}")
    assert f"grmoe serve {tmp_path}/dial/model" in refused(str(tmp_path), "--port", "0")
    assert "there is no such folder" in refused(str(tmp_path / "nothing"), "--port", "0")
    assert "model.safetensors" in refused(str(tmp_path / "dial" / "model"), "--port", "0")
    assert "within --alpha-range 0.5:5" in refused(str(folder), "--alpha", "7", "--port", "0")
    for text in ("5", "5:1", "a:b", "1:inf", "1:nan", "0:1:2"):
        found = refused(str(folder), "--alpha-range", text, "--port", "0")
        assert "alpha-range must be LOW:HIGH, such as 0.5:5" in found
        assert text in found
    assert "dtype must be" in refused(str(folder), "--dtype", "int8", "--port", "0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{port}" in refused(str(folder), "--port", port)


def test_the_command_takes_the_defaults_of_the_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One list of defaults: what the command passes on is what `Options` has."""
    monkeypatch.delenv("GRMOE_API_KEY", raising=False)
    passed: list[Options] = []
    monkeypatch.setattr("grmoe.serve.server.serve", passed.append)
    result = CliRunner().invoke(app, ["serve", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert passed == [Options(folder=tmp_path)]


def test_the_table_of_limits_has_the_defaults() -> None:
    """Each row of docs/howto/serve.md with an option has the default of `Options`."""
    page = (Path(__file__).parents[2] / "docs" / "howto" / "serve.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| `--([a-z-]+)` \|", page, re.MULTILINE)
    defaults = {name: default for default, name in rows}
    words = {1 << 20: "1 MiB", None: "the context", (0.5, 5.0): "0.5 to 5"}
    for name in set(defaults) - {"allow-host", "allow-origin"}:
        value = getattr(Options, name.replace("-", "_"))
        words.setdefault(value, str(value).removesuffix(".0"))
        assert defaults[name] == words[value]
    assert len(defaults) > 12


def test_one_limit_by_two_names() -> None:
    """`--max-new-tokens` and `--max-tokens` are the same option in `grmoe generate` and `grmoe serve`."""
    commands: Any = typer.main.get_command(app)
    for command in ("generate", "serve"):
        [found] = [p for p in commands.commands[command].params if p.name == "max_new_tokens"]
        assert found.opts == ["--max-new-tokens", "--max-tokens"]


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name must have 1 to 200 printable characters"):
        Options(folder=Path(), name=name)


@pytest.mark.parametrize("origin", ["localhost:3000", "http://localhost:3000/"])
def test_origins_that_are_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="allow-origin must be scheme, host and port"):
        Options(folder=Path(), allowed_origins=(origin,))


def test_code_in_the_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    """Python files, a pickled model, a tokenizer that names its own class: none of them has a say."""
    model, mark = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(folder, model)
    poison = f"open({str(mark)!r}, 'w').write('x')\n"
    names = [*(path.name for path in model.glob("*.py")), "tokenization.py", "__init__.py"]
    assert "modeling_grmoe.py" in names
    for name in names:
        path = model / name
        path.write_text(poison + (path.read_text() if path.exists() else ""))
    (model / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": [None, "tokenization.Tokenizer"]}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    template = "{{ cycler.__init__.__globals__.os.system('touch " + str(mark) + "') }}"
    (model / "chat_template.jinja").write_text(template)
    service = make_service(options(model))
    sequence = Sequence(prompt=[1, 2], numbers=service.numbers()[0], sampler=TokenSampler(Sampling()))
    service.engine.generator.start([sequence])
    assert sequence.tokens == offline(make_model(), [1, 2], 1.5, 1)
    assert service.template is not None
    with pytest.raises(Invalid, match="unsafe"):
        asyncio.run(service.template.render([{"role": "user", "content": "x"}]))
    assert not mark.exists()
    (model / "model.safetensors").unlink()  # nothing but the pickled file is left
    assert "model.safetensors" in refused(str(model), "--port", "0")
    assert not mark.exists()


def test_a_signal_lets_answers_finish(folder: Path, tmp_path: Path) -> None:
    """The load study ends its server with SIGTERM, this one gets SIGINT."""
    said, temporary = tmp_path / "said", tmp_path / "temporary"
    temporary.mkdir()
    arguments = ["serve", str(folder), "--port", "0", "--alpha", "2", "--name", "ours"]
    environment = ENVIRONMENT | {"TMPDIR": str(temporary), "GRMOE_API_KEY": "secret"}
    server = Command(said, *arguments, environment=environment)
    try:
        server.wait_for("/v1")
        found = re.search(r"ours on (http://127\.0\.0\.1:\d+)/v1", said.read_text())
        assert found, said.read_text()
        url, body = found[1], {"prompt": "abc", "max_tokens": 120, "temperature": 0, "return_token_ids": True}
        tokens: list[int] = []
        with (
            httpx.Client(headers={"authorization": "Bearer secret"}, timeout=30) as client,
            client.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            assert server.process.pid is not None
            os.kill(server.process.pid, signal.SIGINT)
            for line in lines:
                if line.startswith("data: {"):
                    tokens += json.loads(line[6:])["choices"][0]["token_ids"]
        expected = offline(make_model(), make_tokenizer()("abc").input_ids, 2.0, 120)
        assert tokens == expected[1:]  # the first one came before the signal
        assert server.wait() == 0
    finally:
        server.kill()
    log = said.read_text()
    assert "Traceback" not in log
    assert re.search(
        r"POST /v1/completions 200 \w+ alpha=2 prompt=3 tokens=\d+ experts=[\d.]+ [\d.]+s\n", log
    )
    assert not list(temporary.iterdir())
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0


class Forked:
    """`subprocess.Popen` of `python -m grmoe …`, without the seconds that its imports take."""

    def __init__(self, command: list[str], stderr: Any, env: dict[str, str]) -> None:
        assert command[1:3] == ["-m", "grmoe"]
        self.command = Command(Path(stderr.name), *command[3:], environment=env)
        self.kill = self.command.kill

    @property
    def pid(self) -> int:
        assert self.command.process.pid is not None
        return self.command.process.pid

    def poll(self) -> int | None:
        return self.command.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        return self.command.wait()


def test_load_study(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/serve.py in small: concurrent clients at three α, bad requests, kill -9 and a restart."""
    path = Path(__file__).parents[2] / "benchmarks" / "serve.py"
    spec = importlib.util.spec_from_file_location("serve_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    benchmark = sys.modules["serve_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    monkeypatch.setattr(benchmark, "subprocess", SimpleNamespace(Popen=Forked))
    # Few prompts, because each is answered offline at every α first. Short answers: many requests in a second.
    monkeypatch.setattr(benchmark, "PROMPTS", benchmark.PROMPTS[:4])
    monkeypatch.setattr(benchmark, "LENGTHS", (4, 8, 16))
    monkeypatch.setattr(benchmark, "BAD_SHARE", 0.3)
    result = benchmark.study(folder, seconds=2, clients=8, options=[])
    assert result["problems"] == []
    rows = result["rows"]
    assert rows[1]["answers"] > 2
    assert rows[1]["refused as they should be"] > 0
    assert rows[2]["cut off"] > 0
