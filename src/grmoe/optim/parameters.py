"""Which optimiser trains which parameter of a model."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn


class ParameterSplit(NamedTuple):
    """A model's trainable parameters, grouped by the optimiser they need. Each parameter appears once."""

    frame_groups: list[dict[str, Any]]
    kappa: list[nn.Parameter]
    rest: list[nn.Parameter]


def split_parameters(model: nn.Module) -> ParameterSplit:
    """Split a model's parameters into frames, concentrations κ and everything else, by the last part of their names.

        split = split_parameters(model)
        frames = GrassmannAdam(split.frame_groups, lr=3e-4 * (width * rank) ** 0.5)
        others = AdamW([{"params": split.rest}, {"params": split.kappa, "weight_decay": 0.0}], lr=3e-4)

    `frames` next to a `log_kappa` with one entry per direction (a diagonal Λ_e: log_kappa.ndim == frames.ndim − 1) go
    into a group with manifold="stiefel". Other `frames` go into a group with manifold="grassmann". Parameters that do
    not require a gradient are left out. A tied parameter counts as frames if any of its names is `frames`. It counts
    as "stiefel" if any module that shares it needs that. A learned α counts as κ, because it multiplies κ.
    """
    kinds: dict[nn.Parameter, str] = {}
    order = ("rest", "kappa", "grassmann", "stiefel")  # a tied parameter takes the last of its kinds
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            kind = {"frames": "grassmann", "log_kappa": "kappa", "log_alpha": "kappa"}.get(name, "rest")
            kappa = getattr(module, "log_kappa", None)
            if name == "frames" and isinstance(kappa, Tensor) and kappa.ndim == p.ndim - 1:
                kind = "stiefel"
            if p.requires_grad:
                kinds[p] = max(kinds.get(p, "rest"), kind, key=order.index)
    of = {kind: [p for p in kinds if kinds[p] == kind] for kind in order}
    groups = [{"params": of[m], "manifold": m} for m in ("grassmann", "stiefel") if of[m]]
    return ParameterSplit(groups, of["kappa"], of["rest"])


def optimizer_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.1,
    frames_lr: float | None = None,
    kappa_lr: float | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(groups of AdamW, groups of `GrassmannAdam`), with a learning rate and a "kind" each.

    Matrices have weight decay; vectors, κ and frames have none. kappa_lr is lr by default. frames_lr is lr·√(d·k) for
    frames of d × k: a step then is as long as one of elementwise Adam with rate lr, so subspaces turn as fast as a
    linear gate of the same shape would.
    """
    split = split_parameters(model)
    matrices, vectors = [p for p in split.rest if p.ndim > 1], [p for p in split.rest if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"kind": "weights", "params": matrices, "weight_decay": weight_decay, "lr": lr},
        {"kind": "weights", "params": vectors, "weight_decay": 0.0, "lr": lr},
        {
            "kind": "kappa",
            "params": split.kappa,
            "weight_decay": 0.0,
            "lr": lr if kappa_lr is None else kappa_lr,
        },
    ]
    frames: list[dict[str, Any]] = []
    for group in split.frame_groups:
        by_rate: dict[float, list[nn.Parameter]] = {}
        for p in group["params"]:
            rate = lr * (p.shape[-2] * p.shape[-1]) ** 0.5 if frames_lr is None else frames_lr
            by_rate.setdefault(rate, []).append(p)
        frames += [{"kind": "frames", **group, "params": own, "lr": rate} for rate, own in by_rate.items()]
    return [group for group in groups if group["params"]], frames
