"""Scoring of trained routers on fresh tokens.

Legend: S seeds, B tokens, N experts, A dial settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from grmoe import geometry
from grmoe.certificates import EntropyBounds, entropy_bounds
from grmoe.routing import RoutingMetrics
from grmoe.routing.metrics import COLLAPSE_FRACTION, summarize
from grmoe.studies.synthetic.task import Task
from grmoe.studies.synthetic.training import StackedRouters, Trained, mixture_output

# Figures of `RoutingMetrics` that a score keeps.
_METRICS = (
    "load_cv", "min_load", "collapsed", "collapsed_paper", "leading_cv", "leading_min_load", "entropy",
    "experts_per_token",
)  # fmt: skip
_BOUNDS = ("lower", "upper", "paper_lower", "paper_upper")
_ROUNDING = 1e-5  # of an entropy in fp32


@dataclass(kw_only=True)
class SeedScore:
    """One seed of one method. Load and collapse are those of `RoutingMetrics`: of the tokens an expert receives."""

    accuracy: float
    """Share of tokens sent to the expert matched to their class."""
    share: float
    """`accuracy` over the Bayes oracle's accuracy on the same tokens."""
    load_cv: float
    min_load: float
    collapsed: bool
    collapsed_paper: bool
    leading_cv: float
    leading_min_load: float
    leading_collapsed: bool
    """Some expert leads less than a tenth of its fair share 1/N of the tokens."""
    entropy: float
    experts_per_token: float
    loss: float
    """Mean squared error relative to the variance of the targets."""

    def is_dense(self, num_experts: int) -> bool:
        """Every expert computes every token: received load is uniform, only the leading expert differs."""
        return self.experts_per_token == num_experts

    def without_lead(self) -> bool:
        """Some expert leads less than 1 % of the tokens: the paper's rule, for gates that compute every expert."""
        return self.leading_min_load < 0.01

    def least_share(self, num_experts: int) -> float:
        """Tokens of the least used expert over its fair share: received ones, or led ones where all are computed."""
        if self.is_dense(num_experts):
            return self.leading_min_load * num_experts
        return self.min_load * num_experts / self.experts_per_token


def score(task: Task, trained: Trained, x_SBD: Tensor, label_SB: Tensor, group: int) -> list[SeedScore]:
    """Accuracy under the best matching of experts to classes, load, entropy and loss, for every entry.

    Tokens are routed `group` at a time, as in training: some routers look at all tokens they are given.
    """
    routers, N = trained.routers, trained.maps_SNDO.shape[1]
    sums = routers.buffers["counter.sums"].zero_()
    experts, errors, variances = [], [], []
    with torch.no_grad():
        for x, label in zip(x_SBD.split(group, 1), label_SB.split(group, 1), strict=True):
            routing = routers(x, train=False)
            # A token no expert took (Switch, Expert Choice) is scored by the gate's own preference.
            taken = routing.weights.sum(-1) > 0
            experts.append(torch.where(taken, routing.weights.argmax(-1), routing.probs.argmax(-1)))
            target = task.targets(x, label)
            error = mixture_output(x, trained.maps_SNDO, routing) - target
            errors.append(error.square().mean(-1))
            variances.append(target.square().mean(-1))
        loss_S = torch.cat(errors, 1).mean(-1) / torch.cat(variances, 1).mean(-1)
        oracle_S = (task.oracle(x_SBD) == label_SB).double().mean(-1)
    scores = []
    rows = zip(
        torch.cat(experts, 1).cpu(),
        label_SB.cpu(),
        loss_S.tolist(),
        oracle_S.tolist(),
        sums.cpu(),
        strict=True,
    )
    for expert_B, label_B, loss, oracle, counts in rows:
        metrics: RoutingMetrics = summarize(counts, N)
        accuracy = matched_accuracy(expert_B, label_B, N)
        scores.append(
            SeedScore(
                accuracy=accuracy,
                share=accuracy / oracle,
                leading_collapsed=metrics.leading_min_load < COLLAPSE_FRACTION / N,
                loss=loss,
                **{name: getattr(metrics, name) for name in _METRICS},
            )
        )
    return scores


def confusion(expert_B: Tensor, label_B: Tensor, num: int) -> Tensor:
    """Counts of (expert, class) pairs, (N, N)."""
    return torch.bincount(expert_B * num + label_B, minlength=num * num).view(num, num)


def matched_accuracy(expert_B: Tensor, label_B: Tensor, num: int) -> float:
    """Share of tokens sent to the expert of their class, under the best one-to-one matching of experts to classes."""
    counts = confusion(expert_B, label_B, num).cpu()
    experts, classes = best_matching(counts)
    return float(counts[experts, classes].sum()) / len(label_B)


def best_matching(gain_NN: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the one-to-one matching of largest total gain (Hungarian method)."""
    from scipy.optimize import linear_sum_assignment  # an extra: the command line names it when it is missing

    rows, columns = linear_sum_assignment(gain_NN.cpu().numpy(), maximize=True)
    return torch.as_tensor(rows), torch.as_tensor(columns)


@dataclass(kw_only=True)
class DialSweep:
    """Entropy along the dial, and certificates. Bounds are means over all tokens and seeds."""

    alphas: list[float]
    entropy_AS: list[list[float]]
    """Mean entropy of each seed."""
    lower: list[float]
    upper: list[float]
    paper_lower: list[float]
    paper_upper: list[float] | None = None
    outside: int | None = None
    """Tokens, over all α and seeds, with an entropy outside the sharp bounds."""
    paper_outside: int | None = None
    """The same for the paper's bounds."""
    tokens: int | None = None
    """Tokens that were checked."""

    def falling_seeds(self) -> int:
        """Seeds in which entropy never rises along the dial."""
        return sum(
            all(b <= a + _ROUNDING for a, b in pairwise(seed)) for seed in zip(*self.entropy_AS, strict=True)
        )


def sweep_dial(
    routers: StackedRouters, x_SBD: Tensor, alphas: list[float], keep: slice = slice(None)
) -> DialSweep:
    """Turn α on trained routers without retraining. For a softmax gate α is the inverse temperature.

    keep: the entries to measure; all by default.
    """
    found: dict[str, list[Any]] = {name: [] for name in ("entropy_AS", *_BOUNDS)}
    outside = paper_outside = tokens = 0
    before = routers.alpha.clone()
    with torch.no_grad():
        for alpha in alphas:
            routers.alpha.fill_(alpha)
            routing = routers(x_SBD, train=False)
            logits, probs = routing.logits[keep], routing.probs[keep]
            entropy_SB = -torch.xlogy(probs, probs).sum(-1)
            sharp, paper = entropy_bounds(logits), entropy_bounds(logits, method="paper")
            found["entropy_AS"].append(entropy_SB.mean(-1).tolist())
            for name, bounds in (("", sharp), ("paper_", paper)):
                found[f"{name}lower"].append(float(bounds.lower.bound.mean()))
                found[f"{name}upper"].append(float(bounds.upper.bound.mean()))
            outside += _outside(entropy_SB, sharp)
            paper_outside += _outside(entropy_SB, paper)
            tokens += entropy_SB.numel()
        routers.alpha.copy_(before)
    return DialSweep(alphas=alphas, outside=outside, paper_outside=paper_outside, tokens=tokens, **found)


def _outside(entropy: Tensor, bounds: EntropyBounds) -> int:
    below, above = bounds.lower.bound - entropy, entropy - bounds.upper.bound
    return int((torch.maximum(below, above) > _ROUNDING).sum())


def frame_recovery(task: Task, routers: StackedRouters, entry: int = 0) -> list[list[float]] | None:
    """Overlap ‖U_learnedᵀU_true‖²_F/k of one entry's subspaces, rows matched to classes. None without frames."""
    frames = routers.params.get("frames")
    if frames is None:
        return None
    both = torch.cat([frames[entry].detach(), task.frames_SNDK[entry]])
    N = len(task.frames_SNDK[entry])
    cross = geometry.overlap(both)[:N, N:].cpu() / frames.shape[-1]
    experts, classes = best_matching(cross)
    rows: list[list[float]] = cross[experts[classes.argsort()]].tolist()
    return rows
