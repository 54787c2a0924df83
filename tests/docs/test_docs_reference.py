"""The generated reference holds every command, option, configuration key and public name."""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any

import pytest
from doc_pages import ROOT, generated, hook

import grmoe.config
from grmoe.model import PRESETS, GrmoeConfig
from grmoe.runs.config import TrainConfig


def sections(text: str) -> dict[str, str]:
    """{heading: what follows it}."""
    parts = text.split("\n## ")[1:]
    return {part.split("\n")[0].partition(" {#")[0]: part for part in parts}


def test_every_command_and_option_is_listed() -> None:
    found = sections(generated()["docs/reference/cli.md"])
    listed = dict(hook().commands())
    assert {"train", "dial", "bench layer"} <= set(listed)
    for name, command in listed.items():
        section = found[f"grmoe {name}"]
        for param in command.params:
            if param.name != "help" and not param.hidden:
                spelled = param.opts if param.param_type_name == "option" else [param.metavar or param.name]
                for option in (*spelled, *param.secondary_opts):
                    assert f"`{option}`" in section, f"grmoe {name} {option}"
                assert param.help in ("", None) or param.help.split()[0].replace("<", "&lt;") in section


def test_no_default_is_shown_as_nothing_in_quotes() -> None:
    assert "| `` |" not in generated()["docs/reference/cli.md"]


def test_every_configuration_key_is_listed() -> None:
    page = generated()["docs/reference/configuration.md"]
    for key in keys(TrainConfig):
        assert f"| `{key}` |" in page, key
    for field in dataclasses.fields(GrmoeConfig):
        assert f"`model.{field.name}`" in page, field.name


@pytest.mark.skipif(not hasattr(grmoe.config, "describe_fields"), reason="fields have no docstrings yet")
def test_every_configuration_key_has_a_meaning() -> None:
    for row in re.findall(
        r"^\| `[\w.]+` \|.*$", generated()["docs/reference/configuration.md"], re.MULTILINE
    ):
        assert not row.endswith("|  |"), row


def keys(kind: Any, prefix: str = "") -> list[str]:
    found = []
    for field in dataclasses.fields(kind):
        default = (
            field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        )
        if dataclasses.is_dataclass(default):
            found += keys(type(default), f"{prefix}{field.name}.")
        else:
            found.append(prefix + field.name)
    return found


def test_every_public_name_is_listed() -> None:
    """Public: in an `__all__` of the package, benchmarks aside."""
    for file in (ROOT / "src/grmoe").rglob("*.py"):
        module = ".".join(file.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_text()).body:
            if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != "__all__":
                continue
            if module.startswith("grmoe.bench"):
                continue
            for name in ast.literal_eval(node.value):
                is_module = (file.parent / name).is_dir() or (file.parent / f"{name}.py").is_file()
                if name != "__version__" and not (is_module and module == "grmoe"):
                    page = generated()[f"docs/reference/api/{module}.md"]
                    assert f"\n::: {module}.{name}\n" in page, f"{module}.{name}"


def test_api_pages_name_what_exists() -> None:
    import importlib

    for module, names in hook().public_names().items():
        for name in names:
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_pages_that_ask_for_output_get_it() -> None:
    page = hook().on_page_markdown((ROOT / "docs/reference/presets.md").read_text())
    assert "<!--" not in page
    assert all(f"| `{name}` |" in page for name in PRESETS)
    assert "210.3 M" in page
    assert "    │ parameters" in page


def test_argument_lines_of_docstrings_become_lists() -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("docstrings_hook", ROOT / "docs/hooks/docstrings.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    text = (
        "Routes.\n\ndim, rank: d and k.\nkappa: at the start,\n    above zero.\n\nMore: see there\nor here."
    )
    wanted = "Routes.\n\n- `dim, rank`: d and k.\n- `kappa`: at the start, above zero.\n\n- `More`: see there or here."
    assert module.listed(text) == wanted
    assert module.listed("A sentence.\nname: not a list") == "A sentence.\nname: not a list"
