"""Figures are whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from full_disk import MESSAGE, largest_file

from grmoe.pictures import picture


def test_a_full_disk_leaves_the_old_figure(tmp_path: Path) -> None:
    path = tmp_path / "figures" / "a.png"
    with picture(path, 1, 1):
        pass
    before = path.read_bytes()
    assert before.startswith(b"\x89PNG")
    with (
        pytest.raises(OSError, match=f"cannot write {path}: {MESSAGE}"),
        largest_file(10),
        picture(path, 2, 2) as figure,
    ):
        figure.text(0.5, 0.5, "new")
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["a.png"]
