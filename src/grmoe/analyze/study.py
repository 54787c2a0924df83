"""The token-level study of a model (paper, sections "Token-Level Routing Analysis", "Learned Concentration Values").

Legend: T tokens, B windows per batch, S tokens per window, N experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from grmoe.analyze.amortizer import amortizer_tally
from grmoe.analyze.bounds import BoundsTally
from grmoe.analyze.layers import LEAST_TOKENS, describe_layer
from grmoe.analyze.results import Analysis, Layer, Result, Training
from grmoe.analyze.statistics import Correlation, pearson
from grmoe.analyze.tally import LayerTally
from grmoe.checks import positive_int
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.pieces import Pieces
from grmoe.probe.routing import recorded
from grmoe.probe.text import VALIDATION, open_stream
from grmoe.probe.typed_windows import TypedWindow, covering_starts, typed_windows
from grmoe.probe.windows import batch_rows, window_length
from grmoe.probe.words import TYPES
from grmoe.routing import Routing, routers
from grmoe.runs.folder import read_log
from grmoe.runs.open import LoadedModel, open_model
from grmoe.terminal import Progress, silent

MAX_STEPS = 400  # logged steps
SEED = 0  # for the draws of the baselines


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to analyse."""

    model: Path
    """Folder of a run or of an exported model."""
    texts: Sequence[str] = ()
    """As `grmoe.probe.text` names them. Empty: the text a run was validated on."""
    tokens: int = 50_000
    """Rounded up to whole windows."""
    alpha: float | None = None
    """None: as saved with the model."""
    checkpoint: str = "best"


def run(plan: Plan, progress: Progress = silent) -> Result:
    """`grmoe analyze`: open a model and analyse it."""
    loaded = open_model(plan.model, plan.checkpoint, plan.alpha)
    return Result(loaded, analyze(loaded, plan.texts, plan.tokens, progress))


def analyze(
    loaded: LoadedModel, texts: Sequence[str | Path] = (), tokens: int = 50_000, progress: Progress = silent
) -> Analysis:
    """Route `tokens` tokens through a model and describe what its routers did. Deterministic.

    texts: files to read instead of the text a run was validated on.
    """
    model, found = loaded.model, routers(loaded.model)
    stream = open_stream([str(text) for text in texts], loaded, positive_int("tokens", tokens))
    length = window_length(loaded)
    starts = covering_starts(stream.tokens, tokens, length)
    windows = list(typed_windows(stream, Pieces(loaded.tokenizer), starts, length))
    tallies = [LayerTally.empty(r.num_experts, len(TYPES), len(stream.domain_names)) for r in found]
    bounds = [BoundsTally(router) for router in found]
    leading: list[list[NDArray[np.int64]]] = [[] for _ in found]
    amortizers = [amortizer_tally(router) for router in found]
    for batch, inputs, seen in _route(model, windows, progress):
        groups = [torch.from_numpy(group_T).to(model.device) for group_T in _groups(batch)]
        for number, (x, routing) in enumerate(zip(inputs, seen, strict=True)):
            led_by_T = tallies[number].add(routing, *groups)
            leading[number].append(led_by_T.cpu().numpy())
            bounds[number].add(x, routing)
            if (amortizer := amortizers[number]) is not None:
                amortizer.add(x, led_by_T)
    types_T, domains_T = _groups(windows)
    _, ids_T = np.unique(np.concatenate([w.ids_S for w in windows]), return_inverse=True)
    generator = np.random.default_rng(SEED)
    layers = []
    for number, (router, tally) in enumerate(zip(found, tallies, strict=True)):
        place, leading_T = model.config.moe_layers[number], np.concatenate(leading[number])
        groups_T = (types_T, domains_T, ids_T)
        layer = describe_layer(place, router, tally, bounds[number], leading_T, *groups_T, generator)
        amortizer = amortizers[number]
        layers.append(
            layer if amortizer is None else replace(layer, amortized=amortizer.result(types_T, len(TYPES)))
        )
        progress("statistics", number + 1, len(found))
    pooled, within = _kappa_correlations(layers)
    return Analysis(
        router=model.config.router,
        text=", ".join(map(str, texts)) or f"{loaded.held_out().folder} ({VALIDATION})",
        tokens=len(types_T),
        sequence_length=length,
        experts=found[0].num_experts,
        types=list(TYPES),
        type_tokens=np.bincount(types_T, minlength=len(TYPES)).tolist(),
        domains=stream.domain_names,
        domain_tokens=np.bincount(domains_T, minlength=len(stream.domain_names)).tolist(),
        least_tokens=LEAST_TOKENS,
        layers=layers,
        kappa_correlation=pooled,
        kappa_correlation_within=within,
        training=_over_training(loaded.path, len(found)),
        identity_experts=found[0].identity_experts,
    )


def _kappa_correlations(layers: Sequence[Layer]) -> tuple[Correlation | None, Correlation | None]:
    """κ of each expert against the entropy of its types (appendix: r = −0.87): over all experts, and within layers.

    Layers differ in both, and that alone correlates them. Within layers that difference is taken off.
    """
    if all(layer.kappa is None for layer in layers):
        return None, None
    points = [
        (kappa, spread, layer.layer)
        for layer in layers
        for kappa, spread, n in zip(
            layer.kappa or [], layer.expert_type_entropy, layer.expert_tokens, strict=layer.kappa is not None
        )
        if n >= LEAST_TOKENS and spread is not None
    ]
    kappa, spread, place = np.array(points, dtype=float).reshape(-1, 3).T
    return pearson(kappa, spread), pearson(kappa, spread, place.astype(np.int64))


def _over_training(folder: Path, layers: int) -> Training | None:
    """Load, entropy and the range of κ at the logged steps of a run. None for an exported model."""
    lines = [line for line in read_log(folder) if line["kind"] == "train"]
    if not lines:
        return None
    lines = lines[:: -(-len(lines) // MAX_STEPS)]

    def series(key: str) -> Any:
        return [[line["layers"][i].get(key) for line in lines] for i in range(layers)]

    has_kappa = lines[0]["layers"][0].get("kappa_min") is not None
    return Training(
        steps=[line["step"] for line in lines],
        load=series("load"),
        entropy=series("entropy"),
        kappa_min=series("kappa_min") if has_kappa else None,
        kappa_max=series("kappa_max") if has_kappa else None,
    )


@torch.no_grad()
def _route(
    model: GrmoeForCausalLM, windows: Sequence[TypedWindow], progress: Progress
) -> Iterator[tuple[Sequence[TypedWindow], list[torch.Tensor], list[Routing]]]:
    """Run windows in batches. Yield each batch, what the router of every MoE layer saw, and its routing."""
    size = batch_rows(len(windows[0].ids_S), model.device)
    inputs: list[torch.Tensor] = []
    with recorded(model, inputs) as seen:
        for first in range(0, len(windows), size):
            batch = windows[first : first + size]
            ids_BS = torch.from_numpy(np.stack([window.ids_S for window in batch]))
            seen.clear()
            inputs.clear()
            # Without the head, because its logits are not used.
            model.model(input_ids=ids_BS.to(model.device), use_cache=False)
            yield batch, inputs, seen
            progress("routing", first + len(batch), len(windows))


def _groups(windows: Sequence[TypedWindow]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The type and the domain of every token, (T,) each."""
    types, domains = zip(*((window.types_S, window.domains_S) for window in windows), strict=True)
    return np.concatenate(types).astype(np.int64), np.concatenate(domains)
