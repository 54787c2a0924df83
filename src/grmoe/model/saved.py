"""The files of a saved model, checked before anything is built from them.

Sizes come first: names and shapes stand in the headers of the weights, and the configuration must ask for just these.
Then each tensor is read once: its checksum, its numbers, and whether a router's frames are orthonormal. transformers
itself fills missing tensors with random numbers, and loads NaN and integers.

Legend: U_NDK frames, N experts, D width, K rank.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig

from grmoe import checks
from grmoe.files import read_json, reading
from grmoe.geometry import orthonormality_error
from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.model.modeling_grmoe import GrmoeForCausalLM, GrmoeForSequenceClassification

CONFIG, WEIGHTS, PARTS = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
# Frames that were rounded to bf16 are off by up to 4e-3.
_FRAME_ERROR = 2e-2
_LAYERS = "model.layers."
_CLASSIFIER = GrmoeForSequenceClassification.__name__
_SUM = "crc32."  # key of a tensor's checksum in the header of its file
# transformers would fetch kernels of these names, or change the weights.
_NOT_FROM_FILES = (
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "quantization_config"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
)
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_saved(folder: Path) -> GrmoeForCausalLM:
    """The model in a folder of `save_pretrained` or `grmoe export`, in the dtype it was saved in.

    Raises a `ValueError` of one line that names the file, and the tensor if there is one. No code of the folder runs,
    no pickle is read, and nothing is fetched.
    """
    config = read_config(folder)
    tensors = read_tensors(folder, config)
    with reading(folder / CONFIG):
        kind = tensors["model.embed_tokens.weight"].dtype
        # Not by the folder's name, because transformers would then follow adapters that lie in it.
        model: GrmoeForCausalLM = GrmoeForCausalLM.from_pretrained(
            None, config=config, state_dict=tensors, dtype=kind
        )
    model.name_or_path = model.config.name_or_path = str(folder)
    path = folder / GENERATION
    if path.is_file():
        values = read_json(path)
        with reading(path):
            _check_ids(values)
            model.generation_config = GenerationConfig.from_dict(values)
    return model


def read_config(folder: Path) -> GrmoeConfig:
    """The configuration in a folder's config.json, as a `GrmoeConfig` or a `ValueError` of one line."""
    path = folder / CONFIG
    values = read_json(path)
    kind = values.get("model_type")
    checks.require(
        kind == "grmoe",
        f"{folder} must hold a GrMoE model, got {kind!r:.60}. To put the router into another model: "
        "docs/howto/own-model.md",
    )
    checks.require(
        values.get("architectures") != [_CLASSIFIER],
        f"{folder} must hold a language model, got {_CLASSIFIER}. transformers opens it: "
        "AutoModelForSequenceClassification.from_pretrained",
    )
    unwanted = [key for key in _NOT_FROM_FILES if values.get(key) is not None]
    checks.require(not unwanted, f"{path} must not set {', '.join(unwanted)}")
    with reading(path):
        _check_types(values)
        _check_ids(values)
        config: GrmoeConfig = GrmoeConfig.from_dict(values)
    return config


def is_saved(model: GrmoeForCausalLM, folder: Path) -> bool:
    """Whether a folder holds just this model: its configuration, and its weights bit for bit."""
    try:
        theirs, files = read_config(folder), _weight_files(folder)
        ours = GrmoeConfig.from_dict(json.loads(model.config.to_json_string(use_diff=False)))
        if any(getattr(ours, name) != getattr(theirs, name) for name in vars(GrmoeConfig)["__annotations__"]):
            return False
        weights = model.state_dict()
        for path in files:
            with reading(path), safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    saved, own = file.get_tensor(name), weights.get(name)
                    if own is None or own.dtype != saved.dtype or not torch.equal(own.cpu(), saved):
                        return False
    except (OSError, ValueError):
        return False  # what cannot be read is no model
    return True


def _check_types(values: Mapping[str, Any]) -> None:
    """Numbers and switches have the type of their default."""
    names = {bool: "true or false", int: "an integer", float: "a number"}
    for name in vars(GrmoeConfig)["__annotations__"]:
        wanted = type(getattr(GrmoeConfig, name, None))
        if name in values and wanted in names:
            value = values[name]
            ok = type(value) is wanted or (wanted is float and type(value) is int)
            ok = ok and (wanted is not float or math.isfinite(value))
            ok = ok or (name == "alpha" and isinstance(value, list))
            checks.require(ok, f"{name} must be {names[wanted]}, got {value!r:.60}")


def _check_ids(values: Mapping[str, Any]) -> None:
    """Special tokens are numbers."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = values.get(name)
        every = value if isinstance(value, list) else [] if value is None else [value]
        checks.require(
            all(type(v) is int and v >= 0 for v in every),
            f"{name} must be the number of a token, got {value!r:.60}",
        )


def read_tensors(folder: Path, config: GrmoeConfig) -> dict[str, Tensor]:
    """The weights of a folder, if they are those the configuration needs, undamaged and sound."""
    files = _weight_files(folder)
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for path in files:
        with reading(path), safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 — a reader of safetensors is no mapping
                part = file.get_slice(name)
                checks.require(
                    part.get_dtype() in _DTYPES,
                    f"{path}: {name} must hold floating-point numbers, got {part.get_dtype()}",
                )
                checks.require(name not in found, f"{path}: {name} is in another file too")
                found[name] = tuple(part.get_shape()), _DTYPES[part.get_dtype()]
    check_shapes(found, config, folder, folder / CONFIG)
    tensors = {}
    for path in files:
        with reading(path), safe_open(path, "pt") as file:
            sums = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118
                tensors[name] = file.get_tensor(name)
                check_tensor(name, tensors[name], path)
                if _SUM + name in sums and sums[_SUM + name] != _sum(tensors[name]):
                    raise ValueError(f"{path}: {name} is not what was saved: its checksum differs")
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    """The files of the weights: one, or those that the list of parts names. Never a pickled file."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    parts = folder / PARTS
    checks.require(parts.is_file(), f"{folder} must hold the weights as {WEIGHTS}, which is missing")
    places = read_json(parts).get("weight_map")
    ok = isinstance(places, dict) and all(isinstance(name, str) for name in places.values()) and places
    checks.require(bool(ok), f"{parts} must name the file of each tensor in weight_map")
    assert isinstance(places, dict)
    for name in (names := sorted(set(places.values()))):
        checks.require(Path(name).name == name, f"{parts} names a file outside the folder: {name!r:.80}")
    with_names = {}
    for name in names:
        path = folder / name
        with reading(path), safe_open(path, "pt") as file:
            with_names[name] = set(file.keys())
    for tensor, name in places.items():
        checks.require(
            tensor in with_names[name], f"{folder / name}: {tensor} is missing, which {PARTS} places there"
        )
    return [folder / name for name in names]


def check_shapes(found: Shapes, config: GrmoeConfig, where: Path, source: Path) -> None:
    """Compare names and shapes with those the configuration asks for, without building anything of their size.

    where: of the weights. source: of the configuration.
    """
    layers = _count_layers(found)
    checks.require(
        layers == config.num_hidden_layers,
        f"{where} has the weights of {layers} layers, but {source} has num_hidden_layers = {config.num_hidden_layers}",
    )
    shape = (config.vocab_size, config.hidden_size)
    embedding = found.get("model.embed_tokens.weight", (None, None))[0]
    checks.require(
        embedding in (None, shape),
        f"{where}: model.embed_tokens.weight must have the shape {shape} of {source.name}, got {embedding}",
    )
    with reading(source), torch.device("meta"):
        wanted = GrmoeForCausalLM(config).state_dict()
    if config.tie_word_embeddings and "lm_head.weight" not in found:
        del wanted["lm_head.weight"]
    for name, tensor in wanted.items():
        checks.require(name in found, f"{where} lacks the tensor {name}")
        got, kind = found[name]
        checks.require(
            got == tuple(tensor.shape),
            f"{where}: {name} must have the shape {tuple(tensor.shape)} of {source.name}, got {got}",
        )
        checks.require(
            kind.is_floating_point, f"{where}: {name} must hold floating-point numbers, got {kind}"
        )
    # Routers of older versions saved more.
    more = sorted(name for name in set(found) - set(wanted) if ".router." not in name)
    checks.require(not more, f"{where} has the tensor {more[:1]}, for which {source.name} has no place")


def _count_layers(names: Iterable[str]) -> int:
    numbers = {name.removeprefix(_LAYERS).partition(".")[0] for name in names if name.startswith(_LAYERS)}
    return len(numbers)


def check_tensor(name: str, tensor: Tensor, where: Path) -> None:
    """Raise a `ValueError` if a tensor holds NaN or Inf, or frames that are not orthonormal."""
    # The sum takes one pass and no memory, and it is finite only if every number is (or, rarely, too large).
    if not torch.isfinite(tensor.sum()):
        bad = int((~torch.isfinite(tensor)).sum())
        checks.require(
            bad == 0, f"{where}: {name} holds {bad} numbers that are NaN or Inf, of {tensor.numel()}"
        )
    if name.endswith(".router.frames"):
        off = float(orthonormality_error(tensor.float()))
        checks.require(
            off <= _FRAME_ERROR,
            f"{where}: {name} must be orthonormal, but UᵀU is off by {off:.2g}. Trained without GrassmannAdam? "
            "See docs/howto/train.md",
        )


def seal(folder: Path) -> None:
    """Add the checksum of each tensor to the header of its file. `read_tensors` compares them.

    They stand in the header, because saving the weights again then drops them too.
    """
    for path in _weight_files(folder):
        with safe_open(path, "pt") as file:
            sums = {_SUM + name: _sum(file.get_tensor(name)) for name in sorted(file.keys())}
        sealed = path.with_name(path.name + ".sealed")
        # By hand: safetensors writes these entries in a random order, and the same model must give the same file.
        with open(path, "rb") as old, open(sealed, "wb") as new:
            (size,) = struct.unpack("<Q", old.read(8))
            header = json.loads(old.read(size))
            header["__metadata__"] = {**header.get("__metadata__", {}), **sums}
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
            new.write(struct.pack("<Q", len(text)) + text)
            shutil.copyfileobj(old, new, 2**24)
        sealed.rename(path)


def _sum(tensor: Tensor) -> str:
    """CRC-32 of dtype, shape and bytes."""
    kind = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    content: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{zlib.crc32(content, zlib.crc32(kind)):08x}"
