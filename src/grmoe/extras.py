"""Optional dependencies: which extra of pyproject.toml brings a module, and the line that installs it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from pathlib import Path

# What each extra brings, as modules to look for.
EXTRAS = {
    "lm": ("transformers", "yaml", "tokenizers", "safetensors"),
    "studies": ("scipy", "matplotlib"),
    "data": ("datasets", "pyarrow", "zstandard"),
    "eval": ("lm_eval", "accelerate"),
    "serve": ("uvicorn", "starlette", "pydantic"),
}
_INCLUDES = {"serve": {"lm"}}  # extras that bring others


def missing(*extras: str) -> dict[str, list[str]]:
    """Modules of these extras that cannot be imported; only extras that lack one."""
    lacking = {extra: [m for m in EXTRAS[extra] if importlib.util.find_spec(m) is None] for extra in extras}
    return {extra: modules for extra, modules in lacking.items() if modules}


def install_line(extras: Iterable[str]) -> str:
    """The command that adds extras to this grmoe.

    pip takes an installed grmoe as it is, from a checkout too, and adds what is missing. zsh needs the quotes. Double
    ones work on Windows as well.
    """
    wanted = list(extras)
    brought = set().union(*(_INCLUDES.get(extra, set()) for extra in wanted))
    names = ",".join(extra for extra in wanted if extra not in brought)
    try:
        importlib.metadata.version("grmoe")
    except importlib.metadata.PackageNotFoundError:  # used from its source
        return f'pip install -e "{Path(__file__).parents[2]}[{names}]"'
    return f'pip install "grmoe[{names}]"'


def explain(error: ModuleNotFoundError) -> str:
    """The error's message; with the line to install where an extra brings the module and the message lacks it."""
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    if extra is None or "install" in str(error):
        return str(error)
    return f"this needs {module}; install with: {install_line([extra])}"
