"""The generated reference: command line, configuration and Python API. mkdocs calls `on_config` and `on_files`.

Nothing here is committed as a page. `pages()` returns {path inside docs: Markdown}; the tests read it as well.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "grmoe"
API = "reference/api"
# Public names that no `__all__` lists: documentation pages use them.
DOCUMENTED = {
    "grmoe.config": ["load", "from_dict", "to_dict", "to_yaml"],
    "grmoe.dial.setting": ["mass"],
    "grmoe.layer": ["MoE"],
    "grmoe.parallel.cost": ["traffic"],
    "grmoe.parallel.memory": ["memory"],
    "grmoe.runs.config": ["TrainConfig"],
    "grmoe.runs.open": ["LoadedModel", "open_model"],
}
# A version is no interface.
NOT_LISTED = {"__version__"}


# -- mkdocs ---------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Add one entry per API page to the section "Reference" of the navigation."""
    (section,) = (entry["Reference"] for entry in config.nav if "Reference" in entry)
    section.append({"Python API": [f"{API}/index.md", *({m: _api_path(m)} for m in sorted(public_names()))]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what a page asks for: `<!-- output: grmoe info 350m -->`, `<!-- table: presets -->`."""
    markdown = markdown.replace("<!-- table: presets -->", preset_table())
    return re.sub(r"<!-- output: grmoe (.*?) -->", lambda m: _indented(output_of(m[1])), markdown)


def pages() -> dict[str, str]:
    """Every generated page: {path inside docs: Markdown}."""
    return {
        "reference/cli.md": cli_page(),
        "reference/configuration.md": configuration_page(),
        **api_pages(),
    }


# -- command line ---------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, Any]]:
    """(name, command) of every command, for example ("bench layer", …), in the order of `--help`."""
    import typer

    from grmoe.cli import app

    yield from _walk(typer.main.get_command(app), "")


def _walk(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "list_commands"):
            yield from _walk(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def cli_page() -> str:
    parts = [
        "# Command line",
        "Generated from the commands themselves. `grmoe COMMAND --help` prints the same; `python -m grmoe` is the "
        "same program. A star marks an option that you can repeat.",
    ]
    listed = list(commands())
    rows = [f"| [`grmoe {name}`](#{_anchor(name)}) | {_first_line(command)} |" for name, command in listed]
    parts.append("\n".join(["| command | what it does |", "|---|---|", *rows]))
    parts += [_command_section(name, command) for name, command in listed]
    return "\n\n".join(parts) + "\n"


def _command_section(name: str, command: Any) -> str:
    parts = [f"## grmoe {name} {{#{_anchor(name)}}}"]
    for paragraph in _plain(command.help or "").split("\n\n"):
        example = re.match(r"(Example|Then): (.*)", paragraph, re.DOTALL)
        parts.append(f"```bash\n{example[2].strip()}\n```" if example else _text(paragraph))
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [
        p for p in command.params if p.param_type_name == "option" and p.name != "help" and not p.hidden
    ]
    for title, params in (("argument", arguments), ("option", options)):
        if params:
            rows = [
                f"| {_spelling(p)} | {_kind(p)} | {_default(p)} | {_cell(p.help or '')} |" for p in params
            ]
            parts.append("\n".join([f"| {title} | type | default | meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts)


def output_of(arguments: str) -> str:
    """What a command prints, in a terminal that is wide enough."""
    from typer.testing import CliRunner

    from grmoe.cli import app

    result = CliRunner().invoke(app, arguments.split(), env={"COLUMNS": "120"})
    if result.exit_code:
        raise RuntimeError(f"grmoe {arguments} failed: {result.output}")
    return result.output


def preset_table() -> str:
    """Presets with their sizes, counted."""
    from grmoe.model import PRESETS, count, preset
    from grmoe.model.count import short

    head = [
        "| preset | blocks × width | experts | rank | parameters | active per token |",
        "|---|---|---|---|---|---|",
    ]
    rows = []
    for name in PRESETS:
        config = preset(name)
        cost = count(config)
        rows.append(
            f"| `{name}` | {config.num_hidden_layers} × {config.hidden_size} | "
            f"{config.num_experts} × {config.moe_intermediate_size} | {config.router_rank} | "
            f"{short(cost.total)} | {short(cost.active)} |"
        )
    return "\n".join([*head, *rows])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.rstrip().splitlines())


def _anchor(command: str) -> str:
    return "grmoe-" + command.replace(" ", "-")


def _first_line(command: Any) -> str:
    return _cell(_plain(command.help or "").split("\n\n")[0])


def _spelling(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.metavar or param.name}`"
    names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    return names + (" \\*" if param.multiple else "")


def _kind(param: Any) -> str:
    if getattr(param, "is_flag", False):
        return "flag"
    kind = param.type_descriptor.annotation
    name = getattr(kind, "__args__", [kind])[0].__name__
    words = {"str": "text", "int": "integer", "float": "number", "Path": "path"}
    low, high = getattr(param, "min", None), getattr(param, "max", None)
    bounds = [f"≥ {low}"] * (low is not None) + [f"≤ {high}"] * (high is not None)
    return " ".join([words.get(name, name), *bounds])


def _default(param: Any) -> str:
    if param.required:
        return "required"
    if isinstance(param.show_default, str):
        return _cell(param.show_default)
    if param.default is None or param.default is False or param.default == "":
        return ""
    if isinstance(param.default, list | tuple):
        return _cell(", ".join(f"`{v}`" for v in param.default))
    return f"`{param.default}`"


# -- configuration --------------------------------------------------------------------------------------------


def configuration_page() -> str:
    from grmoe.config import describe_fields
    from grmoe.model import GrmoeConfig
    from grmoe.runs.config import TrainConfig

    parts = [
        "# Configuration",
        "Generated from the attribute docstrings. Every key has a default; `grmoe train --show` prints them all as "
        "YAML. Give a YAML file, single keys, or both: `grmoe train run.yaml optim.lr=6e-4 model.router=softmax`. "
        "An unknown key is an error that names the nearest known key.",
    ]
    groups: dict[str, list[str]] = {}
    for key, field in describe_fields(TrainConfig).items():
        groups.setdefault(key.rpartition(".")[0], []).append(_field_row(key, field))
    for group, rows in groups.items():
        title = f"`{group}`" if group else "The run"
        parts += [
            f"## {title} {{#{group or 'run'}}}",
            "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]),
        ]
    fields = describe_fields(GrmoeConfig)
    own = [
        _field_row(f"model.{key}", field)
        for key, field in fields.items()
        if key in GrmoeConfig.__annotations__
    ]
    inherited = [
        f"`model.{f.name}`"
        for f in dataclasses.fields(GrmoeConfig)
        if f.name not in GrmoeConfig.__annotations__
    ]
    parts += [
        "## The model: `model` {#model-fields}",
        "Besides `model.preset`, every field of `grmoe.model.GrmoeConfig` is a key. The same names stand in the "
        "`config.json` of a saved model.",
        "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *own]),
        f"Every Hugging Face configuration has these as well: {', '.join(inherited)}.",
    ]
    return "\n\n".join(parts) + "\n"


def _field_row(key: str, field: tuple[str, Any, str]) -> str:
    kind, default, meaning = field
    shown = "" if default is None or default == {} else f"`{default}`"
    if default is dataclasses.MISSING:
        shown = "required"
    return f"| `{key}` | `{kind}` | {shown} | {_cell(meaning)} |"


# -- Python API -----------------------------------------------------------------------------------------------


def public_names() -> dict[str, list[str]]:
    """{module: its public names}: every `__all__` of the package, and what the documentation names beside it."""
    found: dict[str, list[str]] = {}
    origin = importlib.util.find_spec(PACKAGE).origin  # type: ignore[union-attr]
    root = Path(origin).parent  # type: ignore[arg-type]
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root).with_suffix("")
        parts = [p for p in relative.parts if p != "__init__"]
        module = ".".join([PACKAGE, *parts])
        names = _all_of(file) if not module.startswith(f"{PACKAGE}.bench") else []
        names = [n for n in names if n not in NOT_LISTED]
        if module == PACKAGE:  # modules have pages of their own
            names = [n for n in names if not (root / n).is_dir() and not (root / f"{n}.py").is_file()]
        extra = [n for n in DOCUMENTED.get(module, []) if n not in names]
        if names or extra:
            found[module] = sorted({*names, *extra}, key=str.lower)
    return found


def _all_of(file: Path) -> list[str]:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def _api_path(module: str) -> str:
    return f"{API}/{module}.md"


def api_pages() -> dict[str, str]:
    modules = public_names()
    rows = []
    made = {}
    for module, names in modules.items():
        doc = _first_sentence(module)
        rows.append(f"| [`{module}`]({module}.md) | {_cell(doc)} |")
        blocks = [f"::: {module}.{name}" for name in names]
        made[_api_path(module)] = "\n\n".join([f"# {module}", _text(doc), *blocks]) + "\n"
    text = "Generated from docstrings: every name in a module's `__all__`, and the names these pages use."
    table = "\n".join(["| module | what it holds |", "|---|---|", *rows])
    return {f"{API}/index.md": f"# Python API\n\n{text}\n\n{table}\n", **made}


def _first_sentence(module: str) -> str:
    file = Path(importlib.util.find_spec(module).origin)  # type: ignore[union-attr,arg-type]
    doc = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(doc.split("\n\n")[0].split())


# -- text -----------------------------------------------------------------------------------------------------


def _plain(text: str) -> str:
    """Without the markup of rich."""
    return re.sub(r"\[/?(?:bold|italic|dim|cyan|green|yellow|red)?\]", "", text)


def _text(text: str) -> str:
    """One paragraph of Markdown: angle brackets are text."""
    return " ".join(text.replace("<", "&lt;").split())


def _cell(text: str) -> str:
    return " ".join(str(text).replace("|", "\\|").replace("<", "&lt;").split())
