"""transformers knows our models, whichever is imported first. `tests/model/test_remote.py` starts new processes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
from transformers.models.auto import configuration_auto

from grmoe import registration
from grmoe.model import GrmoeConfig


def test_transformers_may_be_imported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(configuration_auto.CONFIG_MAPPING_NAMES, registration.MODEL_TYPE)
    monkeypatch.delitem(sys.modules, "transformers.models.grmoe")
    registration.register()
    assert configuration_auto.CONFIG_MAPPING_NAMES["grmoe"] == "GrmoeConfig"
    stand_in = importlib.import_module("transformers.models.grmoe")
    assert stand_in.GrmoeConfig is GrmoeConfig
    assert stand_in.GrmoeForCausalLM.config_class is GrmoeConfig
    assert not hasattr(stand_in, "GrmoeModel")


def test_names_are_added_when_transformers_is_imported_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the finder that waits is gone afterwards, and a module without names is left as it is."""
    for name, text in (("late_auto", "CONFIG_MAPPING_NAMES = {}\n"), ("bare_auto", "")):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(registration, "_AUTO", name)
        before = list(sys.meta_path)
        registration.register()
        registration.register()
        assert len(sys.meta_path) == len(before) + 1
        module: ModuleType = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        assert getattr(module, "CONFIG_MAPPING_NAMES", {}) == ({"grmoe": "GrmoeConfig"} if text else {})
        assert sys.meta_path == before
        assert module.__spec__ is not None
        assert module.__spec__.loader is not None
        assert module.__spec__.loader.get_source(name) == text  # type: ignore[attr-defined]
