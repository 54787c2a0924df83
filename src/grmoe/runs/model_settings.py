"""The group `model` of a run's configuration: values as the model declares them, and sizes that this machine can hold.

Everything here comes before a model is built. A wrong value is one line, and a size of a billion costs no time.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Mapping
from typing import Any

from grmoe.checks import require
from grmoe.config import ConfigError, convert, field_types, unknown
from grmoe.hardware import memory_bytes
from grmoe.model import GrmoeConfig
from grmoe.model.count import parameters, short
from grmoe.parallel.world import World
from grmoe.routing import ROUTERS, Router

# fp32 weights, gradients and the two moments of Adam.
BYTES_PER_PARAMETER = 16
# Options of a router that other keys of the model give, or that a file cannot hold.
_GIVEN_BY_MODEL = {
    "rank": "model.router_rank",
    "selection": "model.selection",
    "alpha": "model.alpha",
    "identity": "model.identity_experts",
}
_NOT_IN_A_FILE = ("self", "dim", "num_experts", "generator")
MODEL_KEYS: dict[str, Any] = {"preset": str | None, **field_types(GrmoeConfig)}
"""Keys of the group `model`, and their types."""


def convert_model(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the group `model` as the types that `GrmoeConfig` declares. Raises a `ConfigError`."""
    converted = {}
    for name, value in values.items():
        if name not in MODEL_KEYS:
            raise ConfigError(unknown(f"model.{name}", str(name), list(MODEL_KEYS)))
        converted[name] = convert(MODEL_KEYS[name], value, f"model.{name}")
    router = converted.get("router", GrmoeConfig.router)
    if converted.get("router_options") and router in ROUTERS:  # the model refuses another name
        converted["router_options"] = _convert_options(router, converted["router_options"])
    return converted


def _convert_options(router: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """`model.router_options` as the types that the router's constructor declares."""
    kinds = _router_options(router)
    converted = {}
    for name, value in options.items():
        place = f"model.router_options.{name}"
        if name in _GIVEN_BY_MODEL:
            raise ConfigError(f"{place} is not an option: set {_GIVEN_BY_MODEL[name]}")
        if name not in kinds:
            raise ConfigError(f"{unknown(place, name, list(kinds))} (router {router})")
        converted[name] = convert(kinds[name], value, place)
    return converted


@functools.cache
def _router_options(router: str) -> dict[str, Any]:
    """The options that a router and its base classes take in a file, with their types."""
    kinds: dict[str, Any] = {}
    for base in ROUTERS[router].__mro__:
        constructor = vars(base).get("__init__")
        if constructor is None or not issubclass(base, Router):
            continue
        hints = typing.get_type_hints(constructor)
        for name, parameter in inspect.signature(constructor).parameters.items():
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if named and name not in _NOT_IN_A_FILE and name not in _GIVEN_BY_MODEL:
                kinds.setdefault(name, hints.get(name, Any))
    if router == "hash":
        kinds["seed"] = int | list[int]  # one, or one per MoE layer
    return kinds


def check_size(config: GrmoeConfig, world: World, replicate: int = 1) -> None:
    """Raise if the model cannot be trained in the memory of this process, however small the batch is."""
    total = parameters(config)
    needed = BYTES_PER_PARAMETER * total * replicate // world.size
    room = memory_bytes(world.device)
    require(
        needed <= room,
        f"the model has {short(total)} parameters and needs at least {needed / 1e9:.3g} GB per process to train, but "
        f"{world.device.type} has {room / 1e9:.3g} GB: choose a smaller model.preset, model.hidden_size, "
        "model.num_hidden_layers, model.num_experts or model.vocab_size",
    )
    pad = config.pad_token_id
    require(
        pad is None or 0 <= pad < config.vocab_size,
        f"model.pad_token_id must be a token of the vocabulary of {config.vocab_size}, got {pad}",
    )
