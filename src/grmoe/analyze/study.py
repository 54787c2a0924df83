"""The token-level study of a model (paper, sections "Token-Level Routing Analysis", "Learned Concentration Values").

Legend: T tokens, B windows of a batch, S tokens of a window, L MoE layers, N experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import grmoe
from grmoe.analyze.layers import LEAST_TOKENS, describe
from grmoe.analyze.record import LayerTally, leading_expert, recorded
from grmoe.analyze.results import FORMAT, Analysis, Excerpt, Layer, Training
from grmoe.analyze.source import Prepared, Stream, Texts, Window, starts, windows
from grmoe.analyze.statistics import Correlation, pearson
from grmoe.checks import positive_int, require
from grmoe.probe.pieces import Pieces
from grmoe.probe.words import TYPES
from grmoe.routing import Routing, routers
from grmoe.runs.folder import CONFIG, read_log, saved_config
from grmoe.runs.open import LoadedModel

BATCH = 8192  # tokens of a forward pass
EXCERPTS, EXCERPT_TOKENS = 4, 96
MOST_NUMBERS = 200_000  # of an excerpt's probabilities, all layers and experts
MOST_STEPS = 400  # of the log
SEED = 0  # of the baselines' draws

Watch = Callable[[str, int, int], None]


def analyze(
    opened: LoadedModel,
    texts: Sequence[str | Path] = (),
    tokens: int = 50_000,
    watch: Watch = lambda _label, _step, _steps: None,
) -> Analysis:
    """Route `tokens` tokens through a model and describe what its routers did. Deterministic.

    texts: files to read in place of the text a run was validated on. watch: hears (label, step, steps).
    """
    positive_int("tokens", tokens)
    model, found = opened.model, routers(opened.model)
    if texts:
        stream: Stream = Texts(texts, opened.tokenizer, tokens)
    else:
        stream = Prepared(opened.held_out())
    length = sequence_length(opened)
    pieces = Pieces(opened.tokenizer)
    steps = len(starts(stream.tokens, tokens, length))
    tallies = [LayerTally.empty(r.num_experts, len(TYPES), len(stream.names)) for r in found]
    kept: list[Window] = []
    top1: list[list[NDArray[np.int64]]] = [[] for _ in found]
    excerpts: list[Excerpt] = []
    with recorded(model) as seen:
        for batch in _batches(windows(stream, pieces, tokens, length), max(1, BATCH // length)):
            seen.clear()
            _forward(opened, batch)
            groups = [
                torch.from_numpy(_joined(part)).to(model.device)
                for part in ([w.types_S for w in batch], [w.domains_S for w in batch])
            ]
            for tally, routing, leading in zip(tallies, seen, top1, strict=True):
                leading.append(tally.add(routing, groups[0], groups[1]).cpu().numpy())
            for place, window in enumerate(batch, len(kept)):
                if (
                    place * EXCERPTS // steps != (place - 1) * EXCERPTS // steps
                ):  # evenly, the first among them
                    excerpts.append(_excerpt(window, seen, place - len(kept), pieces, stream))
            kept += batch
            watch("routing", len(kept), steps)
    types_T, domains_T = _joined([w.types_S for w in kept]), _joined([w.domains_S for w in kept])
    _, ids_T = np.unique(_joined([w.ids_S for w in kept]), return_inverse=True)
    generator = np.random.default_rng(SEED)
    layers = []
    for number, (router, tally) in enumerate(zip(found, tallies, strict=True)):
        place = model.config.moe_layers[number]
        leading_T = np.concatenate(top1[number])
        layers.append(describe(place, router, tally, leading_T, types_T, domains_T, ids_T, generator))
        watch("statistics", number + 1, len(found))
    pooled, within = kappa_correlations(layers)
    return Analysis(
        format=FORMAT,
        grmoe=grmoe.__version__,
        model=str(opened.path),
        router=model.config.router,
        step=opened.step,
        text=", ".join(map(str, texts)) or f"{opened.held_out().folder} (validation)",
        tokens=len(types_T),
        sequence_length=length,
        experts=found[0].num_experts,
        types=list(TYPES),
        type_tokens=np.bincount(types_T, minlength=len(TYPES)).tolist(),
        domains=stream.names,
        domain_tokens=np.bincount(domains_T, minlength=len(stream.names)).tolist(),
        least_tokens=LEAST_TOKENS,
        layers=layers,
        kappa_correlation=pooled,
        kappa_correlation_within=within,
        training=over_training(opened.path, len(found)),
        excerpts=excerpts,
    )


def sequence_length(opened: LoadedModel) -> int:
    """As trained; of an exported folder the model's longest."""
    longest: int = opened.model.config.max_position_embeddings
    if (opened.path / CONFIG).is_file():
        return saved_config(opened.path).data.sequence_length or longest
    return longest


def kappa_correlations(layers: Sequence[Layer]) -> tuple[Correlation | None, Correlation | None]:
    """κ_e against the entropy of expert e's types (appendix: r = −0.87): over all experts, and within layers.

    Layers differ in both, which alone correlates them; within layers that is taken off.
    """
    points = [
        (kappa, spread, layer.layer)
        for layer in layers
        for kappa, spread, n in zip(
            layer.kappa or [], layer.expert_type_entropy, layer.expert_tokens, strict=layer.kappa is not None
        )
        if n >= LEAST_TOKENS and spread is not None
    ]
    if all(layer.kappa is None for layer in layers):
        return None, None
    kappa, spread, place = np.array(points, dtype=float).reshape(-1, 3).T
    return pearson(kappa, spread), pearson(kappa, spread, place.astype(np.int64))


def over_training(folder: Path, layers: int) -> Training | None:
    """Load, entropy and the range of κ at the logged steps of a run; None for anything else."""
    lines = [line for line in read_log(folder) if line["kind"] == "train"]
    if not lines:
        return None
    lines = lines[:: -(-len(lines) // MOST_STEPS)]

    def series(key: str) -> Any:
        return [[line["layers"][i].get(key) for line in lines] for i in range(layers)]

    has_kappa = lines[0]["layers"][0].get("kappa_min") is not None
    return Training(
        [line["step"] for line in lines],
        series("load"),
        series("entropy"),
        series("kappa_min") if has_kappa else None,
        series("kappa_max") if has_kappa else None,
    )


def _joined(parts: list[NDArray[Any]]) -> NDArray[np.int64]:
    return np.concatenate(parts).astype(np.int64)


def _batches(found: Iterator[Window], size: int) -> Iterator[list[Window]]:
    batch: list[Window] = []
    for window in found:
        batch.append(window)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


@torch.no_grad()
def _forward(opened: LoadedModel, batch: list[Window]) -> None:
    ids_BS = torch.from_numpy(np.stack([w.ids_S for w in batch])).to(opened.model.device)
    size = opened.model.config.vocab_size
    require(
        int(ids_BS.max()) < size, f"token {int(ids_BS.max())} is outside the model's vocabulary of {size}"
    )
    opened.model.model(input_ids=ids_BS, use_cache=False)  # without the head: its logits are not looked at


def _excerpt(window: Window, seen: list[Routing], row: int, pieces: Pieces, stream: Stream) -> Excerpt:
    """The first tokens of a window, fewer where a model has many layers and experts."""
    numbers = sum(routing.probs.shape[-1] for routing in seen)
    most = max(1, min(EXCERPT_TOKENS, MOST_NUMBERS // (EXCERPTS * numbers)))
    return Excerpt(
        pieces=pieces.show(window.ids_S[:most]),
        types=window.types_S[:most].tolist(),
        domain=stream.names[int(window.domains_S[0])],
        experts=[leading_expert(routing)[row, :most].tolist() for routing in seen],
        probs=[
            [[round(p, 3) for p in token] for token in routing.probs[row, :most].tolist()] for routing in seen
        ],
    )
