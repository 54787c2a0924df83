"""The configuration that a command starts with: what was given, and defaults for the rest.

    config = starting_config(read_tree("run.yaml", ["steps=200"]), resume=False)

A new run takes defaults that suit its device. A resumed run takes everything that is not given from its own
config.yaml. All of it is written there, so a run does not depend on later defaults or on another device.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grmoe.checks import require
from grmoe.config import field_types, from_dict, merge, read_tree
from grmoe.data.splitting import CPU_LENGTH
from grmoe.data.tokenizer import load as load_tokenizer
from grmoe.hardware import find_device
from grmoe.model import PRESETS, GrmoeConfig
from grmoe.model.choices_grmoe import OWN_CHOICE
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import CONFIG, saved_config
from grmoe.runs.open import LoadedModel, open_model

# On a CPU, the preset and the recipe of `make demo` (configs/demo.yaml). Where no preset is named, the selection is a
# mass: top-k computes the same number of experts at every α.
CPU_PRESET = "tiny"
CPU_BATCH, CPU_RATE, CPU_WARMUP = 16, 4e-3, 100
CPU_SELECTION = {"selection": "mass", "selection_tau": 0.5}

# Fields of a model that no weight depends on. A run that starts from other weights may change them.
FREE_FIELDS = (
    "alpha", "weight_alpha", "selection", "selection_tau", "num_experts_per_tok", "norm_topk_prob",
    "attention_dropout", "max_position_embeddings", "router_aux_loss_coef", "residual_loss_coef", "use_cache",
    "output_router_logits",
)  # fmt: skip
# A budget is calibrated for certain weights, and training changes them. It has its own length too.
_NOT_TAKEN = ("budget", "budget_curve", "trained_length")
# What the data gives.
_OF_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id")


def starting_config(tree: Mapping[str, Any], resume: bool = False) -> TrainConfig:
    """The configuration of a run to start or, with `resume`, of the run in the folder `out`."""
    given = from_dict(TrainConfig, tree)  # raises for mistakes before anything is read
    saved = Path(given.out) / CONFIG
    if resume and saved.is_file():
        before = saved_config(saved.parent)  # raises, with the file's name, if the file is damaged
        return from_dict(TrainConfig, merge(read_tree(saved), _without_repeated(tree, given, before)))
    # Job scripts have `--resume` in their whole command, the first time too. A folder alone is more likely misspelt.
    require(
        not resume or not set(tree) <= {"out", "steps"},
        f"{given.out} holds no run to resume; to start a new one there, leave out --resume",
    )
    if given.start_from is not None:
        return from_dict(TrainConfig, _from_source(tree, open_source(given.start_from), given))
    return from_dict(TrainConfig, merge(_device_defaults(tree, given), tree))


def _device_defaults(tree: Mapping[str, Any], given: TrainConfig) -> dict[str, Any]:
    """The CPU's recipe where the model is the CPU's preset; else nothing, because the rate is that preset's."""
    named = tree.get("model", {})
    is_named = "preset" in named
    if (is_named and given.preset != CPU_PRESET) or find_device(given.device).type != "cpu":
        return {}
    longest = given.model.get("max_position_embeddings", PRESETS[CPU_PRESET]["max_position_embeddings"])
    chosen = is_named or "selection" in named or given.model.get("router") in OWN_CHOICE
    return {
        "model": {"preset": CPU_PRESET, **({} if chosen else CPU_SELECTION)},
        "data": {"sequence_length": min(CPU_LENGTH, longest), "batch_size": CPU_BATCH},
        "optim": {"lr": CPU_RATE, "warmup": min(CPU_WARMUP, 3 * given.steps // 10)},
    }


# -- starting from other weights ---------------------------------------------------------------------------------


def open_source(path: str) -> LoadedModel:
    """The run, at its best checkpoint, or the exported model that gives the first weights."""
    return open_model(path, device="cpu")


def _from_source(tree: Mapping[str, Any], source: LoadedModel, given: TrainConfig) -> dict[str, Any]:
    """What was given, on the model of the source. Sequences are as long as the source's were."""
    asked = {k: v for k, v in given.model.items() if k in tree.get("model", {})}
    model = {
        name: value
        for name in field_types(GrmoeConfig)
        if name not in _NOT_TAKEN
        and (value := getattr(source.model.config, name)) != getattr(GrmoeConfig, name)
    }
    _check_agreement(asked, source)
    model |= {name: value for name, value in asked.items() if name in FREE_FIELDS}
    defaults: dict[str, Any] = {}
    if find_device(given.device).type == "cpu":
        longest = model.get("max_position_embeddings", GrmoeConfig.max_position_embeddings)
        defaults = {"data": {"batch_size": CPU_BATCH, "sequence_length": min(CPU_LENGTH, longest)}}
    known = source.is_run or source.model.config.trained_length is not None
    if known and "max_position_embeddings" not in asked:
        defaults = merge(defaults, {"data": {"sequence_length": source.length}})
    return merge(defaults, tree) | {"model": {"preset": None, **model}}


def _check_agreement(asked: Mapping[str, Any], source: LoadedModel) -> None:
    """Raise if a preset or a field was given that the source's weights do not have."""
    preset = asked.get("preset")
    for name, value in _contradictions(asked, source.model.config).items():
        has = getattr(source.model.config, name)
        why = f" (model.preset={preset})" if name not in asked else ""
        raise ValueError(
            f"model.{name} is {has!r} in {source.path} and cannot change with --from, got {value!r}{why}: leave it out"
        )


def _contradictions(asked: Mapping[str, Any], model: GrmoeConfig) -> dict[str, Any]:
    """The fields that were given, or that a given preset has, and that are others in a model with these weights."""
    wanted = {k: v for k, v in PRESETS.get(asked.get("preset") or "", {}).items() if k not in _OF_TOKENIZER}
    found = {}
    for name, value in {**wanted, **asked}.items():
        if name == "preset" or name in FREE_FIELDS or value is None:
            continue
        has = getattr(model, name)
        if value != has and not (name == "hidden_act" and {value, has} == {"swiglu", "silu"}):
            found[name] = value
    return found


def _without_repeated(tree: Mapping[str, Any], given: TrainConfig, saved: TrainConfig) -> Mapping[str, Any]:
    """What was given to resume, without what it only repeats of the model that a run with --from took.

    A job script gives its whole command again. The run has that model written out, and no preset.
    """
    asked = {k: v for k, v in given.model.items() if k in tree.get("model", {})}
    if saved.start_from is None or _contradictions(asked, saved.model_config(1, 0)):
        return tree
    return {**tree, "model": {k: v for k, v in asked.items() if k in FREE_FIELDS}}


def check_tokenizer(source: LoadedModel, data: Path, tokenizer: Path, vocab_size: int) -> None:
    """Raise unless every token of the source has the same number in the data, and the model has room for the rest."""
    ours, theirs = (
        load_tokenizer(str(folder)).tokenizer.get_vocab(with_added_tokens=True)
        for folder in (source.tokenizer_folder, tokenizer)
    )
    moved = sum(theirs.get(token) != number for token, number in ours.items())
    advice = f"prepare the text again with --tokenizer {source.tokenizer_folder}"
    require(
        moved == 0,
        f"data.path must be prepared with the tokenizer of {source.path}, got {data}: {moved} of {len(ours)} tokens "
        f"have other numbers there or are missing; {advice}",
    )
    rows = source.model.config.vocab_size
    require(
        vocab_size <= rows,
        f"data.path must have at most the {rows} tokens of {source.path}, got {vocab_size} in "
        f"{data}; {advice}",
    )
