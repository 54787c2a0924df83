"""Code for exported models, so that they load with `trust_remote_code=True` where grmoe is not installed.

The files of the model are copied unchanged. `grmoe_routing.py` is generated: it joins the package's own sources in the
order of their imports. Nothing is maintained twice.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import shutil
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import grmoe

PACKAGE = Path(grmoe.__file__).parent
_FILES = (
    "parts_grmoe.py", "choices_grmoe.py", "configuration_grmoe.py", "attention_grmoe.py", "router_grmoe.py",
    "block_grmoe.py", "pretrained_grmoe.py", "outputs_grmoe.py", "modeling_grmoe.py",
)  # fmt: skip
BUNDLE = "grmoe_routing.py"
# Everything that parts_grmoe.py imports is in these modules or below them.
_ROOTS = ("layer", "regularizers", "head", "attention", "linears", "compiling")
_AUTO_MAP = {
    "AutoConfig": "configuration_grmoe.GrmoeConfig",
    "AutoModel": "modeling_grmoe.GrmoeModel",
    "AutoModelForCausalLM": "modeling_grmoe.GrmoeForCausalLM",
    "AutoModelForSequenceClassification": "modeling_grmoe.GrmoeForSequenceClassification",
}

HEADER = '''"""Routers and layer of grmoe {version} in one file, generated from its sources. Do not edit.

It runs on PyTorch alone, without the Triton kernels. If grmoe is installed, this file is not used.
"""

from __future__ import annotations

import sys as _sys
import types as _types

import torch as _torch


def _custom_op(name, **options):
    """As `torch.library.custom_op`, once per process: copies of this file share their operators.

    A second registration would free the operator that the first copy still holds.
    """
    shared = _sys.modules.setdefault("{space}", _types.ModuleType("{space}"))

    def make(function):
        if not hasattr(shared, name):
            setattr(shared, name, _torch.library.custom_op(f"{space}::{{name}}", function, **options))
        return getattr(shared, name)

    return make

'''


def export_remote_code(folder: str | Path) -> list[Path]:
    """Write the code beside a saved model and name it in its config.json; returns the files written.

    model.save_pretrained(folder); export_remote_code(folder)
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)  # anywhere
    """
    folder = Path(folder)
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"folder must hold a saved model, got {folder} without config.json")
    written = [Path(shutil.copyfile(Path(__file__).parent / name, folder / name)) for name in _FILES]
    written.append(folder / BUNDLE)
    written[-1].write_text(bundle(), encoding="utf-8")
    values = json.loads(config.read_text(encoding="utf-8")) | {"auto_map": _AUTO_MAP}
    config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [*written, config]


@dataclass
class _Section:
    """One module of the package, to be put into the bundle."""

    name: str
    """Dotted, below grmoe."""
    source: str
    tree: ast.Module
    defined: set[str] = field(default_factory=set)
    """Names defined at its top level, without imports."""
    borrowed: set[str] = field(default_factory=set)
    """Names imported from other packages."""
    modules: set[str] = field(default_factory=set)
    """Modules of ours used by name, as in `checks.require`."""


@cache
def bundle() -> str:
    """The text of `grmoe_routing.py`. The sources do not change while a process runs."""
    sections: dict[str, _Section] = {}
    for root in _ROOTS:
        _collect(root, sections)
    counts = Counter(name for section in sections.values() for name in section.defined)
    by_name = set().union(*(section.modules for section in sections.values()))
    borrowed = set().union(*(section.borrowed for section in sections.values()))
    parts = []
    for section in sections.values():
        # All names share one file: a private helper that two modules define gets its module's name as a prefix.
        clashes = {name for name in section.defined if counts[name] > 1}
        public = {name for name in clashes if not name.startswith("_")} | (section.defined & borrowed)
        if public:
            raise ValueError(f"{section.name} and another module both have {', '.join(sorted(public))}")
        prefix = "_" + section.name.replace(".", "_")
        text = _rename(_strip(section), {name: prefix + name for name in clashes})
        parts.append(f"\n# ---- grmoe.{section.name} {'-' * (100 - len(section.name))}\n\n{text.strip()}\n")
        if section.name == "kernels.runtime":
            parts.append("\nHAS_TRITON = INTERPRETED = False  # no kernels in this file\n")
        if section.name in by_name:
            short = section.name.rpartition(".")[2]
            parts.append(f'\n{short} = _types.ModuleType("{short}")\n')
            public_names = sorted(name for name in section.defined if not name.startswith("_"))
            parts.extend(f"{short}.{name} = {name}\n" for name in public_names)
    text = "".join(parts).replace('torch.library.custom_op("grmoe::', '_custom_op("')
    # Operators are registered by name per process. Those of another version, or of an installed grmoe, are others.
    space = f"grmoe_bundle_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return HEADER.format(version=grmoe.__version__, space=space) + text


def _collect(name: str, sections: dict[str, _Section]) -> None:
    """Add a module, after everything it imports."""
    if name in sections:
        return
    path = PACKAGE / name.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    section = _Section(name, source, ast.parse(source))
    for node in section.tree.body:
        if _is_internal(node):
            for module, by_name in _imported(node):
                _collect(module, sections)
                if by_name:
                    section.modules.add(module)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            section.borrowed.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            section.defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (n for target in targets for n in ast.walk(target))  # `a, b = 1, 2` defines two
            section.defined.update(
                n.id for n in names if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            )
    section.defined -= {"_", "__all__"}
    sections[name] = section


def _is_internal(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "grmoe"


def _imported(node: ast.AST) -> list[tuple[str, bool]]:
    """Modules named by an internal import, and whether it imports the module itself or names inside it."""
    assert isinstance(node, ast.ImportFrom)
    base = (node.module or "").partition(".")[2]
    found = []
    for alias in node.names:
        if alias.asname is not None:
            raise ValueError(f"an internal import must not rename, got {ast.unparse(node)}")
        inner = f"{base}.{alias.name}".lstrip(".")
        is_module = (PACKAGE / f"{inner.replace('.', '/')}.py").is_file()
        found.append((inner, True) if is_module else (base, False))
    return found


def _strip(section: _Section) -> str:
    """The source without internal imports, `__future__` and `__all__`; comments stay."""
    lines = section.source.splitlines(keepends=True)
    top = set(section.tree.body)
    for node in ast.walk(section.tree):
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        exports = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        if not (future or exports or _is_internal(node)):
            continue
        assert isinstance(node, ast.stmt)
        assert node.end_lineno is not None
        # Imports inside a function lead to kernels, which the bundle does not have.
        indent = " " * node.col_offset
        rest = "" if node in top else f'{indent}raise RuntimeError("the kernels are in the grmoe package")\n'
        lines[node.lineno - 1 : node.end_lineno] = [rest] + [""] * (node.end_lineno - node.lineno)
    return "".join(lines)


def _rename(source: str, names: dict[str, str]) -> str:
    """Replace whole names, but not attributes."""
    if not names:
        return source
    tokens, before = [], ""
    lines = source.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string in names and before != ".":
            tokens.append(token)
        before = token.string
    for token in reversed(tokens):  # from the end, so that earlier columns stay valid
        (row, start), (_, end) = token.start, token.end
        line = lines[row - 1]
        lines[row - 1] = line[:start] + names[token.string] + line[end:]
    return "".join(lines)
