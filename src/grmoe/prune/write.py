"""The pruned model as a folder of its own: weights as they were measured, fewer experts in its configuration."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from grmoe.dial.write import check_place, copy_model, replacing
from grmoe.model import GrmoeForCausalLM, export_remote_code
from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.routing import Threshold
from grmoe.runs.card import MODEL_CARD, put_section
from grmoe.runs.open import LoadedModel

MEASURED = ("## The dial", "## Measured")  # sections of `grmoe.runs.card`
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


@dataclass(frozen=True)
class Size:
    parameters: int
    bytes: int  # of the weights, as they would be saved


def size(model: nn.Module) -> Size:
    """Parameters, tied ones once; bytes with the buffers that are saved."""
    parameters = list(model.parameters())
    own = {id(p) for p in parameters}
    buffers = [t for t in model.state_dict(keep_vars=True).values() if id(t) not in own]
    return Size(
        sum(p.numel() for p in parameters), sum(t.numel() * t.element_size() for t in [*parameters, *buffers])
    )


def small_config(config: GrmoeConfig, experts: int) -> GrmoeConfig:
    """The configuration with fewer experts; what follows from their number follows."""
    small = copy.deepcopy(config)
    small.num_experts = experts
    if config.selection == "dense":
        small.num_experts_per_tok = experts
    elif config.selection == "threshold":
        assert config.selection_tau is not None
        small.num_experts_per_tok = Threshold(config.selection_tau).max_experts(experts)
    options = dict(config.router_options or {})
    if options.get("prior", "balanced") != "balanced":  # see `reduce_router`
        small.router_options = options | {"prior": "balanced"}
    small.check()
    return small


def small_model(model: GrmoeForCausalLM, experts: int) -> GrmoeForCausalLM:
    """A model that was built small, with the weights of one whose layers were operated on: every shape must fit."""
    small = GrmoeForCausalLM(small_config(model.config, experts))
    nn.Module.to(small, device=model.device, dtype=model.dtype)  # routers stay in fp32
    small.load_state_dict(model.state_dict())
    return small.eval()


def write_model(opened: LoadedModel, experts: int, out: Path, section: str) -> Path:
    """Save an operated model with tokenizer, code and card, `section` in it; its source stays as it was."""
    check_place(opened.path, out)
    with replacing(out) as writing:
        copy_model(opened, writing)
        for pattern in WEIGHTS:
            for file in writing.glob(pattern):
                file.unlink()
        small_model(opened.model, experts).save_pretrained(writing)
        export_remote_code(writing)
        card = writing / MODEL_CARD
        before = card.read_text(encoding="utf-8") if card.is_file() else ""
        card.write_text(put_section(without_measurements(before), section), encoding="utf-8")
    return out


def without_measurements(card: str) -> str:
    """The card less what was measured of the model with all its experts."""
    for heading in MEASURED:
        card = re.sub(rf"^{heading}\n.*?(?=^## |\Z)", "", card, flags=re.MULTILINE | re.DOTALL)
    return card
