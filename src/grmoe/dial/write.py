"""The chosen setting as a model folder: the weights as they were measured, the dial in its configuration."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grmoe import checks
from grmoe.dial.report import as_json
from grmoe.dial.run import Result
from grmoe.dial.setting import Setting
from grmoe.runs.card import MODEL_CARD, dial_section, put_section
from grmoe.runs.export import export
from grmoe.runs.folder import CONFIG
from grmoe.runs.open import LoadedModel


def write_model(result: Result, out: Path) -> Path:
    """A run is exported in the dtype that was measured, an exported folder copied; neither is changed.

    So the folder, loaded, has the measured perplexity.
    """
    check_place(result.opened.path, out)
    with replacing(out) as writing:
        copy_model(result.opened, writing)
        write_setting(writing, result.chosen.setting)
        card = writing / MODEL_CARD
        before = card.read_text(encoding="utf-8") if card.is_file() else ""
        section = dial_section(as_json(result), "the chosen setting")
        card.write_text(put_section(before, section), encoding="utf-8")
    return out


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A folder to write, of the same name (it heads the card): it takes the place of `out` whole, or not at all."""
    place = out.with_name(f".writing-{out.name}")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        yield place / out.name
        shutil.rmtree(out, ignore_errors=True)
        os.rename(place / out.name, out)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def copy_model(opened: LoadedModel, out: Path) -> None:
    """A run's checkpoint exported in the dtype it is in, or an exported folder again."""
    if (opened.path / CONFIG).is_file():
        export(opened.path, out, str(opened.step), dtype=opened.model.dtype)
    else:
        # A folder of links into a cache of downloads becomes files.
        shutil.copytree(opened.path, out)


def check_place(source: Path, out: Path) -> None:
    """Refuse what would overwrite something else: to be asked before minutes are spent."""
    is_run, place = (source / CONFIG).is_file(), out.resolve()
    checks.require(
        is_run or source.resolve() not in (place, *place.parents),
        f"out must lie outside the model's own folder {source}, got {out}",
    )
    checks.require(
        not out.exists() or (out / "config.json").is_file(),
        f"{out} exists and is no exported model; give another folder (--out)",
    )


def write_setting(folder: Path, setting: Setting) -> None:
    """Put a setting into the config.json of a model's folder; what else stands there stays."""
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8")) | setting.fields
    writing = path.with_name(".writing-config.json")
    writing.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(writing, path)
