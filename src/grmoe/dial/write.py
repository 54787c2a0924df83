"""The chosen setting as a model folder: the weights as they were measured, the dial in its configuration."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from grmoe import checks
from grmoe.dial.run import Result
from grmoe.dial.setting import Setting
from grmoe.train.export import export
from grmoe.train.record import CONFIG

MODEL_CARD = "README.md"


def write_model(result: Result, out: Path) -> Path:
    """A run is exported in the dtype that was measured, an exported folder copied; neither is changed.

    So the folder, loaded, has the measured perplexity.
    """
    source = result.opened.path
    check_place(source, out)
    if (source / CONFIG).is_file():
        export(source, out, str(result.opened.step), dtype=result.opened.model.dtype)
    else:
        _copy(source, out)
    write_setting(out, result.chosen.setting)
    with (out / MODEL_CARD).open("a", encoding="utf-8") as card:
        card.write(card_section(result))
    return out


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


def _copy(source: Path, out: Path) -> None:
    writing = out.with_name(f".writing-{out.name}")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        # A folder of links into a cache of downloads becomes files.
        shutil.copytree(source, writing)
        shutil.rmtree(out, ignore_errors=True)
        os.rename(writing, out)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise


def card_section(result: Result) -> str:
    """What the model card says about the setting."""
    chosen, trained = result.chosen, result.trained
    rows = "\n".join(
        f"| {alpha:g} | {p.effective_entropy:.2f} | {p.effective_inverse:.2f} | {p.experts:.3f} | {p.perplexity:.3f} "
        f"| {result.table_speeds[p].relative:.2f} |"
        for alpha, p in result.table
    )
    proof = "\n".join(
        f"| {c.layer} | {c.dropped_mean:.3f} | {c.dropped_max:.3f} | {c.entropy_lower:.2f} to {c.entropy_upper:.2f} "
        f"| {c.exact:.3g} | {c.bound:.3g} |"
        for c in result.certificates
    )
    return f"""
## The dial

Set after training for {result.target}: {chosen.setting}. On {result.text.tokens} tokens of calibration text
{chosen.experts:.3f} experts a token at perplexity {chosen.perplexity:.3f}; as trained {trained.experts:.3f} at
{trained.perplexity:.3f}.

One α for all layers, the same τ and cap (throughput relative to the trained setting, measured):

| α | exp(H) | 1/Σg² | experts computed | perplexity | throughput |
|---|---|---|---|---|---|
{rows}

Certificates on calibration tokens, against all experts at the same α (error: measured; bound: proved):

| block | dropped mass | at most | entropy within | error | bound |
|---|---|---|---|---|---|
{proof}
"""
