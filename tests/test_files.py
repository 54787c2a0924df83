"""Files and folders are written whole or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path

from grmoe.files import replace_folder


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "model"
    for content in ("first", "second"):
        with replace_folder(out) as writing:
            assert writing.name == out.name
            (writing / "config.json").write_text(content)
    with contextlib.suppress(KeyboardInterrupt), replace_folder(out) as writing:
        (writing / "config.json").write_text("third")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert (out / "config.json").read_text() == "second"
