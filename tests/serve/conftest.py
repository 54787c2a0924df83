"""A small model with random weights and a tokenizer of bytes, saved as `grmoe export` saves one."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_model import CURVE, make_model, make_tokenizer

from grmoe.model import export_remote_code


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported folder, remote code included."""
    path = tmp_path_factory.mktemp("serve") / "small"
    make_model(budget_curve=CURVE).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    export_remote_code(path)
    return path
