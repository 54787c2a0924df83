"""`import grmoe` makes `AutoConfig`, `AutoTokenizer` and `AutoModelForCausalLM` know our models, and imports neither.

transformers finds a configuration class by its name: `CONFIG_MAPPING_NAMES["grmoe"]`, an attribute of the module
`transformers.models.grmoe`. Both are put there, and this module imports `grmoe.model` when the attribute is read. If
transformers is not imported yet, a finder waits until it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # half of the time that `import grmoe` takes
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec

MODEL_TYPE = "grmoe"
_AUTO = "transformers.models.auto.configuration_auto"
_HOME = f"transformers.models.{MODEL_TYPE}"


def register() -> None:
    """Tell transformers about our models, now or when it is imported."""
    if _AUTO in sys.modules:
        _add_names(sys.modules[_AUTO])
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Models(ModuleType):
    """Stands for `transformers.models.grmoe`: imports `grmoe.model` when its classes are asked for."""

    def __getattr__(self, name: str) -> Any:
        if name not in ("GrmoeConfig", "GrmoeForCausalLM"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("grmoe.model"), name)


def _add_names(auto: ModuleType) -> None:
    sys.modules.setdefault(_HOME, _Models(_HOME))
    names = getattr(auto, "CONFIG_MAPPING_NAMES", {})  # not in every version of transformers
    names.setdefault(MODEL_TYPE, "GrmoeConfig")


class _Waiting:
    """Lets others find the module that holds the names, and adds ours to it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _AUTO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Adding(spec.loader)  # type: ignore[assignment]
        return spec


class _Adding:
    """Runs a module as its own loader does, then adds our names."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _add_names(module)

    def __getattr__(self, name: str) -> Any:  # get_source, get_filename and others that tools ask for
        return getattr(self.loader, name)
