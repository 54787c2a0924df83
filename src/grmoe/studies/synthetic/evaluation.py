"""Scoring of trained routers on fresh tokens.

Legend: S seeds, B tokens, N experts, A dial settings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grmoe import geometry
from grmoe.certificates import entropy_bounds
from grmoe.routing import RoutingMetrics
from grmoe.routing.metrics import COLLAPSE_FRACTION, summarize
from grmoe.studies.synthetic.task import Task
from grmoe.studies.synthetic.training import StackedRouters, Trained, mixture_output

# Figures of `RoutingMetrics` that a score keeps.
_METRICS = (
    "load_cv", "min_load", "collapsed", "collapsed_paper", "leading_cv", "leading_min_load", "entropy",
    "experts_per_token",
)  # fmt: skip


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

    def least_share(self, num_experts: int) -> float:
        """Tokens of the least used expert over its fair share: received ones, or led ones where all are computed."""
        if self.is_dense(num_experts):
            return self.leading_min_load * num_experts
        return self.min_load * num_experts / self.experts_per_token


def score(task: Task, trained: Trained, x_SBD: Tensor, label_SB: Tensor, group: int) -> list[SeedScore]:
    """Accuracy under the best matching of experts to classes, load and entropy, for every seed.

    `group` tokens make one sequence for routers that mix within a sequence.
    """
    S, B, D = x_SBD.shape
    routers, N = trained.routers, trained.maps_SNDO.shape[1]
    routers.buffers["counter.sums"].zero_()
    with torch.no_grad():
        routing = routers(x_SBD.view(S, B // group, group, D), train=False)
        loss_S = _task_loss(task, trained, x_SBD, label_SB, group)
    # A token no expert took (Switch, Expert Choice) is scored by the gate's own preference.
    weights, probs = routing.weights.view(S, B, N), routing.probs.view(S, B, N)
    expert_SB = torch.where(weights.sum(-1) > 0, weights.argmax(-1), probs.argmax(-1))
    oracle_S = (task.oracle(x_SBD) == label_SB).double().mean(-1)
    sums = routers.buffers["counter.sums"]
    scores = []
    for s in range(S):
        metrics: RoutingMetrics = summarize(sums[s], N)
        accuracy = matched_accuracy(expert_SB[s], label_SB[s], N)
        scores.append(
            SeedScore(
                accuracy=accuracy,
                share=accuracy / float(oracle_S[s]),
                leading_collapsed=metrics.leading_min_load < COLLAPSE_FRACTION / N,
                loss=float(loss_S[s]),
                **{name: getattr(metrics, name) for name in _METRICS},
            )
        )
    return scores


def _task_loss(task: Task, trained: Trained, x_SBD: Tensor, label_SB: Tensor, group: int) -> Tensor:
    """Mean squared error relative to the variance of the targets, on one group of tokens; (S,)."""
    x, label = x_SBD[:, :group], label_SB[:, :group]
    target = task.targets(x, label)
    error = mixture_output(x, trained.maps_SNDO, trained.routers(x, train=False)) - target
    return error.square().mean((-2, -1)) / target.square().mean((-2, -1))


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


@dataclass
class DialSweep:
    """Mean entropy of each seed along the dial, and the mean certificates over all tokens and seeds."""

    alphas: list[float]
    entropy_AS: list[list[float]]
    lower: list[float]
    upper: list[float]
    paper_lower: list[float]


def sweep_dial(routers: StackedRouters, x_SBD: Tensor, alphas: list[float]) -> DialSweep:
    """Turn α on trained routers without retraining. For a softmax gate α is the inverse temperature."""
    sweep = DialSweep(alphas, [], [], [], [])
    before = routers.alpha.clone()
    with torch.no_grad():
        for alpha in alphas:
            routers.alpha.fill_(alpha)
            routing = routers(x_SBD, train=False)
            entropy_SB = -torch.xlogy(routing.probs, routing.probs).sum(-1)
            sharp, paper = entropy_bounds(routing.logits), entropy_bounds(routing.logits, method="paper")
            sweep.entropy_AS.append(entropy_SB.mean(-1).tolist())
            sweep.lower.append(float(sharp.lower.bound.mean()))
            sweep.upper.append(float(sharp.upper.bound.mean()))
            sweep.paper_lower.append(float(paper.lower.bound.mean()))
        routers.alpha.copy_(before)
    return sweep


def frame_recovery(task: Task, routers: StackedRouters) -> list[list[float]] | None:
    """Overlap ‖U_learnedᵀU_true‖²_F/k of the first seed's subspaces, rows matched to classes. None without frames."""
    frames = routers.params.get("frames")
    if frames is None:
        return None
    both = torch.cat([frames[0].detach(), task.frames_SNDK[0]])
    N = len(task.frames_SNDK[0])
    cross = geometry.overlap(both)[:N, N:].cpu() / frames.shape[-1]
    experts, classes = best_matching(cross)
    rows: list[list[float]] = cross[experts[classes.argsort()]].tolist()
    return rows
