"""A path that is no model is refused with what is there instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from grmoe.runs.about import about
from grmoe.runs.missing import not_a_model
from grmoe.runs.open import open_model


def test_what_is_there_instead_of_a_model(tmp_path: Path) -> None:
    refused = "is neither a run of `grmoe train` nor an exported model"
    nowhere, file, empty, data = (tmp_path / name for name in ("nowhere", "a.bin", "empty", "my data"))
    file.write_text("")
    empty.mkdir()
    data.mkdir()
    (data / "index.json").write_text("{}")
    assert not_a_model(nowhere) == f"{nowhere} {refused}: there is no such folder"
    assert not_a_model(file) == f"{file} {refused}: it is a file"
    assert not_a_model(empty) == f"{empty} {refused}"
    assert not_a_model(data).endswith(f"not a model; train one: grmoe train data.path='{data}'")
    corpus = tmp_path / "my corpus"
    corpus.mkdir()
    for text in (corpus / "a.jsonl.xz", corpus):
        text.is_dir() or text.write_text("")
        assert not_a_model(text).endswith(f"to train on its text, first: grmoe prepare '{text}'")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000003"  # it has an index.json of its own
    checkpoint.mkdir(parents=True)
    for name in ("index.json", "meta.json"):
        (checkpoint / name).write_text("{}")
    assert not_a_model(checkpoint).endswith(f"not a model; give the folder of its run: {tmp_path / 'run'}")
    for n in range(7):
        (empty / str(n)).mkdir()
        (empty / str(n) / ("config.yaml" if n else "config.json")).write_text("")
    listed = ", ".join(str(empty / str(n)) for n in range(5))
    assert not_a_model(empty) == f"{empty} {refused}; it holds {listed} and 2 more"


def test_every_command_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for read in (lambda path: about(str(path)), open_model):
        with pytest.raises(ValueError, match="there is no such folder"):
            read(tmp_path / "nowhere")
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert about("tiny")[2] == "grmoe train model.preset=tiny"  # a folder of that name hides no preset
