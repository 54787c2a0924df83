"""What a folder is, without its weights: how it was trained, whether it was dialled, and the next command."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from shlex import quote

from grmoe.model import GrmoeConfig
from grmoe.model.choices_grmoe import OWN_CHOICE
from grmoe.model.presets import PRESETS, find_config
from grmoe.runs.card import MODEL_CARD, describe_setting, has_section
from grmoe.runs.checkpoint import Checkpoint
from grmoe.runs.folder import (
    CONFIG,
    ENVIRONMENT,
    checkpoints_of,
    dialled_model,
    read_log,
    saved_config,
    tokenizer_of,
    vocabulary,
)
from grmoe.runs.lock import trained_by
from grmoe.runs.missing import not_a_model
from grmoe.runs.results import COMMANDS, ResultsError, belong, find_results
from grmoe.tables import Table

_VALIDATION = re.compile(r"^\| validation perplexity \| ([\d.]+) \|", re.MULTILINE)  # of a model card


def about(name: str) -> tuple[GrmoeConfig, Table | None, str]:
    """(configuration, what is known about the folder, next command) of a preset, a run or an exported model."""
    folder = Path(name)
    if (folder / CONFIG).is_file():
        return _about_run(folder)
    if (folder / "config.json").is_file():
        return _about_export(folder)
    if name not in PRESETS and (folder.exists() or len(folder.parts) > 1):  # a path, not a misspelt preset
        raise ValueError(not_a_model(folder))
    return find_config(name), None, f"grmoe train model.preset={name}"


def _about_run(folder: Path) -> tuple[GrmoeConfig, Table, str]:
    config = saved_config(folder)
    model = config.model_config(*vocabulary(tokenizer_of(folder, config)))
    checkpoints = checkpoints_of(folder, config)
    latest, best = checkpoints.latest(), checkpoints.best()
    step = 0 if latest is None else latest.step
    table = Table(str(folder), ["", ""], left=2)
    table.add("what", "a run of `grmoe train`")
    done = "finished" if step >= config.steps else "not finished"
    if (process := trained_by(folder)) is not None:
        done = f"being trained by {process}"
    table.add("trained", f"{step:,} of {config.steps:,} steps, {done}")
    table.add("", f"{config.data.batch_size} sequences per step, learning rate {config.optim.lr:g}")
    table.add("text", config.data.path)
    if (started := _started(folder)) is not None:
        table.add("started", started)
    validations = [line for line in read_log(folder) if line.get("kind") == "validation"]
    if best is not None:
        of_best = [line for line in validations if line.get("step") == best.step and "perplexity" in line]
        measured = f"{of_best[-1]['perplexity']:.2f} " if of_best else ""
        table.add("validation perplexity", f"{measured}at step {best.step:,}, the best checkpoint")
    if not (folder / "dial" / "results.json").is_file() and model.router not in OWN_CHOICE:
        table.add("dial", "not turned yet")
    budget = _add_measurements(table, folder, best)
    place = None if _trained_on(folder, best) else dialled_model(folder)
    if process is not None:
        following = f"grmoe curves {quote(str(folder))}"
    elif step < config.steps:
        following = f"grmoe train out={quote(str(folder))} --resume"
    elif place is not None:
        following = f"grmoe serve {quote(str(place))}"
    elif budget is not None:
        following = export_command(folder, *budget, out=folder / "dial" / "model")
    elif model.router in OWN_CHOICE:
        following = f"grmoe export {quote(str(folder))}"
    else:
        following = f"grmoe dial {quote(str(folder))}{_cap(model)} --write"
    return model, table, following


def _trained_on(folder: Path, best: Checkpoint | None) -> bool:
    """Whether the run was dialled at another checkpoint than its best one: it was trained on, or started again."""
    with contextlib.suppress(ResultsError, OSError):
        results = find_results(folder, "dial")
        return results is not None and best is not None and not belong(results, best.step, best.path)
    return False


def _about_export(folder: Path) -> tuple[GrmoeConfig, Table, str]:
    config = find_config(folder)
    table = Table(str(folder), ["", ""], left=2)
    table.add("what", "an exported model")
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    dtype = str(config.dtype).removeprefix("torch.")
    table.add("weights", f"{sum(sizes) / 1e6:,.1f} MB, {dtype}" if sizes else "none: no .safetensors file")
    path = folder / MODEL_CARD
    card = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    found = _VALIDATION.search(card)
    if found is not None:
        before = ", before experts were pruned" if has_section(card, "prune") else ""
        table.add("validation perplexity", f"{found[1]}, of its training{before}")
    table.add("routing", describe_setting(config))
    turned = config.budget_curve is not None or config.router in OWN_CHOICE
    if not turned:
        table.add("dial", "not turned yet")
    _add_measurements(table, folder, None)
    name = quote(str(folder))
    calibrate = f"grmoe dial {name} --text FILE{_cap(config)} --write"
    return config, table, f"grmoe serve {name}" if turned else calibrate


def _cap(config: GrmoeConfig) -> str:
    """A dial has to choose between two experts at least, whatever the training had."""
    return " --cap 2" if config.num_experts_per_tok == 1 else ""


def _started(folder: Path) -> str | None:
    """When and where the run began, as far as it is known."""
    try:
        described = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
        first = [*described.get("resumed_from", []), described][0]
        return f"{first['started'][:16].replace('T', ' ')}, {first['device']}, grmoe {first['grmoe']}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def export_command(run: Path, budget: float, dtype: str, out: Path, step: int | None = None) -> str:
    """The command that saves a run at a budget, in the precision in which its dial measured it.

    step: of the checkpoint that was dialled; None for the best one.
    """
    kind = " --dtype fp32" if dtype.removeprefix("torch.") == "float32" else ""
    which = "" if step is None else f" --checkpoint {step}"
    return f"grmoe export {quote(str(run))}{which} --budget {budget:g}{kind} --out {quote(str(out))}"


def _add_measurements(table: Table, folder: Path, best: Checkpoint | None) -> tuple[float, str] | None:
    """One row for each command that measured the model. Returns (budget, dtype) that its dial chose for its weights.

    best: of a run; None for an exported model.
    """
    budget = None
    step, place = (None, folder) if best is None else (best.step, best.path)
    for kind, command in COMMANDS.items():
        try:
            results = find_results(folder, kind)
        except (ResultsError, OSError) as error:
            table.add(command, str(error))
            continue
        if results is None:
            continue
        own = belong(results, step, place)
        said = results.created[:16].replace("T", " ")
        said += "" if results.step is None else f", step {results.step:,}"
        if kind == "dial":
            body = results.body
            chosen = f"{body['chosen']['experts_per_token']:.3f} experts per token"
            said += f": {body['asked']}; chosen {chosen}, perplexity {body['chosen']['perplexity']:.3f}"
            budget = (body["budget"], results.dtype) if own and body["budget"] is not None else None
        others = results.step == step and not own
        table.add(command, f"{said} (of other weights, which were here before)" if others else said)
    return budget
