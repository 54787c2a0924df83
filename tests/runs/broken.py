"""Broken folders of models and runs: what each does to a sound folder, and what the error must name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Break = Callable[[Path], None]
WEIGHTS = "model.safetensors"
HUGE = 10**9


def edit(name: str, **changes: Any) -> Break:
    """Change keys of a JSON file. `...` removes one."""

    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))

    return change


def write(name: str, content: str | bytes) -> Break:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def remove(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def folder_for(name: str) -> Break:
    """A folder in place of a file."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def cut(name: str, size: int) -> Break:
    return lambda folder: write(name, (folder / name).read_bytes()[:size])(folder)


def tensors(work: Callable[[dict[str, torch.Tensor]], None]) -> Break:
    """Change the tensors and save them again, as someone without our checksums would."""

    def change(folder: Path) -> None:
        found = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
        work(found)
        save_file(found, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def tensor(part: str, work: Callable[[torch.Tensor], torch.Tensor | None]) -> Break:
    """Change the first tensor with this in its name; None drops it."""

    def change(found: dict[str, torch.Tensor]) -> None:
        name = next(name for name in sorted(found) if part in name)
        new = work(found.pop(name))
        if new is not None:
            found[name] = new.contiguous()

    return tensors(change)


def header(work: Callable[[dict[str, Any]], Any]) -> Break:
    """Change the header of the weights, whatever comes of it."""

    def change(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        values = json.loads(content[8 : 8 + size])
        new = json.dumps(work(values) or values).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(new)) + new + content[8 + size :])

    return change


def first_entry(**changes: Any) -> Break:
    def change(values: dict[str, Any]) -> None:
        name = next(name for name in values if name != "__metadata__")
        values[name] |= changes

    return header(change)


def poke(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(found: torch.Tensor) -> torch.Tensor:
        found.view(-1)[3] = value
        return found

    return change


def oversized(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 2**62) + content[8:])


def parts(**places: str) -> Break:
    """A list of parts in place of one file."""

    def change(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
        named = dict.fromkeys(found, "model-00001-of-00001.safetensors") | places
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))

    return change


CONFIG, TOKENIZER = "config.json", "tokenizer.json"
# name: (what is done, what the error names)
MODELS: dict[str, tuple[Break, str]] = {
    # weights
    "no weights": (remove(WEIGHTS), WEIGHTS),
    "a folder for weights": (folder_for(WEIGHTS), WEIGHTS),
    "empty weights": (write(WEIGHTS, b""), WEIGHTS),
    "weights of four bytes": (cut(WEIGHTS, 4), WEIGHTS),
    "half a header": (cut(WEIGHTS, 200), WEIGHTS),
    "half the weights": (cut(WEIGHTS, 40_000), WEIGHTS),
    "one byte short": (lambda f: cut(WEIGHTS, (f / WEIGHTS).stat().st_size - 1)(f), WEIGHTS),
    "bytes after the end": (lambda f: write(WEIGHTS, (f / WEIGHTS).read_bytes() + b"x" * 9)(f), WEIGHTS),
    "a header of 2^62 bytes": (oversized, WEIGHTS),
    "a header of zeros": (write(WEIGHTS, bytes(4096)), WEIGHTS),
    "a header that is a list": (header(lambda values: [1, 2]), WEIGHTS),
    "text for weights": (write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"), WEIGHTS),
    "a pickle for weights": (write(WEIGHTS, b"\x80\x04cos\nsystem\n(S'true'\ntR."), WEIGHTS),
    "a negative shape": (first_entry(shape=[-1, 4]), WEIGHTS),
    "a shape that overflows": (first_entry(shape=[2**40, 2**40]), WEIGHTS),
    "offsets outside the file": (first_entry(data_offsets=[0, 2**50]), WEIGHTS),
    "a dtype that is none": (first_entry(dtype="F13"), WEIGHTS),
    "no frames": (tensor("router.frames", lambda t: None), "router.frames"),
    "no embedding": (tensor("embed_tokens", lambda t: None), "embed_tokens"),
    "no norm": (tensor("model.norm", lambda t: None), "model.norm"),
    "no tensors at all": (tensors(lambda found: found.clear()), "layers"),
    "a layer too many": (tensors(lambda f: f.update({"model.layers.7.mlp.x": torch.ones(1)})), "layers"),
    "an unknown tensor": (tensors(lambda f: f.update({"model.extra": torch.ones(1)})), "model.extra"),
    "a transposed tensor": (tensor("router.frames", lambda t: t.mT), "router.frames"),
    "a flat tensor": (tensor("q_proj", lambda t: t.flatten()), "q_proj"),
    "a short tensor": (tensor("down_proj", lambda t: t[:1]), "down_proj"),
    "NaN weights": (tensor("q_proj", poke(float("nan"))), "q_proj"),
    "an infinite weight": (tensor("input_layernorm", poke(float("inf"))), "input_layernorm"),
    "an NaN in a router": (tensor("log_prior", poke(float("nan"))), "log_prior"),
    "integer weights": (tensor("k_proj", lambda t: (t * 100).to(torch.int8)), "k_proj"),
    "64-bit integers": (tensor("model.norm", lambda t: t.long()), "model.norm"),
    "frames of ones": (tensor("router.frames", torch.ones_like), "router.frames"),
    "frames of zeros": (tensor("router.frames", torch.zeros_like), "router.frames"),
    "frames that are scaled": (tensor("router.frames", lambda t: 1.1 * t), "router.frames"),
    "parts outside the folder": (parts(**{"lm_head.weight": "../other.safetensors"}), "index.json"),
    "parts without a file": (parts(**{"model.norm.weight": "none.safetensors"}), "none.safetensors"),
    "parts that are no names": (parts(**{"model.norm.weight": 7}), "index.json"),  # type: ignore[arg-type]
    "a part without its tensor": (parts(**{"model.absent": "model-00001-of-00001.safetensors"}), "model.absent"),
    # config.json
    "no configuration": (remove(CONFIG), "neither a run"),
    "an empty configuration": (write(CONFIG, ""), CONFIG),
    "half a configuration": (cut(CONFIG, 100), CONFIG),
    "a configuration of bytes": (write(CONFIG, bytes(range(256))), CONFIG),
    "a list for a configuration": (write(CONFIG, "[]"), CONFIG),
    "a deep configuration": (write(CONFIG, '{"a":' * 100_000), CONFIG),
    "another kind of model": (edit(CONFIG, model_type="llama"), "GrMoE"),
    "a kind that is no text": (edit(CONFIG, model_type=[1]), "GrMoE"),
    "a billion layers": (edit(CONFIG, num_hidden_layers=HUGE), "num_hidden_layers"),
    "9,999 layers": (edit(CONFIG, num_hidden_layers=9999), "num_hidden_layers"),
    "one layer fewer": (edit(CONFIG, num_hidden_layers=1, moe_every=1), "num_hidden_layers"),
    "a billion wide": (edit(CONFIG, hidden_size=HUGE, head_dim=16), "embed_tokens"),
    "a billion experts": (edit(CONFIG, num_experts=HUGE), "router"),
    "a billion heads": (edit(CONFIG, num_attention_heads=HUGE, num_key_value_heads=HUGE), "q_proj"),
    "a billion tokens": (edit(CONFIG, vocab_size=HUGE), "embed_tokens"),
    "a rank of a billion": (edit(CONFIG, router_rank=HUGE), "router_rank"),
    "experts a billion wide": (edit(CONFIG, moe_intermediate_size=HUGE), "experts"),
    "a billion shared experts": (edit(CONFIG, shared_experts=HUGE), "shared"),
    "layers as text": (edit(CONFIG, num_hidden_layers="2"), "num_hidden_layers"),
    "width as text": (edit(CONFIG, hidden_size="wide"), "hidden_size"),
    "width as a fraction": (edit(CONFIG, hidden_size=32.5), "hidden_size"),
    "alpha as text": (edit(CONFIG, alpha="sharp"), "alpha"),
    "eps as text": (edit(CONFIG, rms_norm_eps="1e-6"), "rms_norm_eps"),
    "eps of NaN": (edit(CONFIG, rms_norm_eps=float("nan")), "rms_norm_eps"),
    "a switch as text": (edit(CONFIG, norm_topk_prob="softmax"), "norm_topk_prob"),
    "rope as a list": (edit(CONFIG, rope_parameters=[1]), CONFIG),
    "rope of no kind": (edit(CONFIG, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}), "spiral"),
    "rope without theta": (edit(CONFIG, rope_parameters={"rope_type": "linear"}), CONFIG),
    "router options as text": (edit(CONFIG, router_options="prior"), "router_options"),
    "an unknown router option": (edit(CONFIG, router_options={"speed": 1}), "router_options"),
    "an unknown router": (edit(CONFIG, router="roulette"), "router"),
    "a router without its tensors": (edit(CONFIG, router="softmax"), "router.weight"),
    "a curve of text": (edit(CONFIG, budget_curve="fast"), "budget_curve"),
    "a curve without points": (edit(CONFIG, budget_curve=[{}]), "budget_curve"),
    "a budget without a curve": (edit(CONFIG, budget=1.5), "budget"),
    "no heads": (edit(CONFIG, num_attention_heads=0), "num_attention_heads"),
    "no experts": (edit(CONFIG, num_experts=None), "num_experts"),
    "an activation of no kind": (edit(CONFIG, hidden_act="tanh"), "hidden_act"),
    "an end token outside": (edit(CONFIG, eos_token_id=-5), "eos_token_id"),
    "an end token as text": (edit(CONFIG, eos_token_id="end"), "eos_token_id"),
    "kernels from elsewhere": (edit(CONFIG, attn_implementation="someone/kernel"), "attn_implementation"),
    "quantised": (edit(CONFIG, quantization_config={"quant_method": "bitsandbytes"}), "quantization_config"),
    # the tokenizer, and how to generate
    "no tokenizer": (remove(TOKENIZER), TOKENIZER),
    "an empty tokenizer": (write(TOKENIZER, ""), TOKENIZER),
    "a tokenizer without keys": (write(TOKENIZER, "{}"), TOKENIZER),
    "a tokenizer without a model": (edit(TOKENIZER, model=...), TOKENIZER),
    "a model without keys": (edit(TOKENIZER, model={}), TOKENIZER),
    "a model of no kind": (edit(TOKENIZER, model={"type": "Oracle", "vocab": {}}), TOKENIZER),
    "half a tokenizer": (cut(TOKENIZER, 500), TOKENIZER),
    "a list for a tokenizer": (write(TOKENIZER, "[1]"), TOKENIZER),
    "more tokens than the model": (
        edit(TOKENIZER, added_tokens=[{"id": 9999, "content": "<far>", "single_word": False, "lstrip": False,
                                       "rstrip": False, "normalized": False, "special": True}]),
        "token",
    ),
    "tokenizer settings as a list": (write("tokenizer_config.json", "[]"), "tokenizer_config.json"),
    "half the tokenizer settings": (cut("tokenizer_config.json", 20), "tokenizer_config.json"),
    "an end token as a number": (edit("tokenizer_config.json", eos_token=5), TOKENIZER),
    "an end token that is new": (edit("tokenizer_config.json", eos_token="<unheard>"), "token"),
    "generation as a list": (write("generation_config.json", "[]"), "generation_config.json"),
    "half of generation": (cut("generation_config.json", 10), "generation_config.json"),
    "generation to no token": (edit("generation_config.json", eos_token_id="end"), "generation_config.json"),
}  # fmt: skip


def checkpoint(name: str, work: Callable[[str], Break]) -> Break:
    """Break a file of the last checkpoint."""

    def change(run: Path) -> None:
        work(name)(max((run / "checkpoints").glob("step-*")))

    return change


def plain_meta(folder: Path) -> None:
    """A checkpoint as older versions wrote it: without checksums."""
    for path in (folder / "checkpoints").glob("step-*"):
        edit("meta.json", checksum=..., index_checksum=...)(path)
        (path / "index.json").unlink()


def older(*work: Break) -> Break:
    def change(run: Path) -> None:
        plain_meta(run)
        for each in work:
            each(run)

    return change


def line(before: str, after: str) -> Break:
    """Replace text in a run's config.yaml."""

    def change(run: Path) -> None:
        text = (run / "config.yaml").read_text()
        assert before in text
        (run / "config.yaml").write_text(text.replace(before, after))

    return change


META, INDEX, DATA = "meta.json", ".metadata", "__0_0.distcp"
RUNS: dict[str, tuple[Break, str]] = {
    "no meta": (checkpoint(META, remove), META),
    "an empty meta": (checkpoint(META, lambda n: write(n, "")), META),
    "a list for meta": (checkpoint(META, lambda n: write(n, "[]")), META),
    "meta without a step": (older(checkpoint(META, lambda n: edit(n, step=...))), META),
    "a step as text": (older(checkpoint(META, lambda n: edit(n, step="four"))), META),
    "a step of another folder": (older(checkpoint(META, lambda n: edit(n, step=7))), META),
    "a metric as text": (older(checkpoint(META, lambda n: edit(n, metric="good"))), META),
    "a changed metric": (checkpoint(META, lambda n: edit(n, metric=0.0)), META),
    "no index of ours": (checkpoint("index.json", remove), "index.json"),
    "half an index of ours": (checkpoint("index.json", lambda n: cut(n, 300)), "index.json"),
    "an empty index": (older(checkpoint(INDEX, lambda n: write(n, b""))), INDEX),
    "an index of no kind": (older(checkpoint(INDEX, lambda n: write(n, b"\x80\x04N."))), INDEX),
    "half an index": (older(checkpoint(INDEX, lambda n: cut(n, 300))), INDEX),
    "no index": (older(checkpoint(INDEX, remove)), INDEX),
    "no data": (older(checkpoint(DATA, remove)), DATA),
    "half the data": (older(checkpoint(DATA, lambda n: cut(n, 9000))), DATA),
    "data of zeros": (older(checkpoint(DATA, lambda n: write(n, bytes(10**6)))), DATA),
    "a billion layers": (line("num_hidden_layers: 2", "num_hidden_layers: 1000000000"), "num_hidden_layers"),
    "three layers": (line("num_hidden_layers: 2", "num_hidden_layers: 3"), "num_hidden_layers"),
    "a billion experts": (line("num_experts: 4", "num_experts: 1000000000"), "router"),
    "another width": (line("hidden_size: 32", "hidden_size: 64"), "embed_tokens"),
    "another router": (line("router_rank: 8", "router_rank: 4"), "router"),
    "no settings": (write("config.yaml", ""), "layers"),
    "settings of bytes": (write("config.yaml", bytes(range(256))), "config.yaml"),
    "settings as a list": (write("config.yaml", "- 1\n"), "config.yaml"),
    "no tokens": (lambda run: write("tokenizer.json", "{}")(run / "tokenizer"), "tokenizer"),
    "no token settings": (lambda run: write("tokenizer_config.json", "[]")(run / "tokenizer"), "tokenizer"),
}  # fmt: skip
