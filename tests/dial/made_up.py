"""A meter, points and gates that were made up, for tests of single steps of `grmoe dial`."""

from __future__ import annotations

import math
from typing import Any

import torch

from grmoe.dial.meter import Family, Meter, Point
from grmoe.dial.results import Check
from grmoe.dial.setting import Setting, mass
from grmoe.probe.losses import Increase, Measurement


def measured(experts: float, loss: float) -> Measurement:
    return Measurement(
        losses_W=torch.full((8,), loss, dtype=torch.float64),
        layer_experts=(experts,),
        entropy=1.0,
        effective_experts_entropy=2.0,
        effective_experts_inverse=2.0,
    )


def point(experts: float, loss: float, family: Family = "uniform", setting: Setting | None = None) -> Point:
    return Point(setting or mass((experts, loss), 0.5, 4), family, measured(experts, loss))


NOTHING = Increase(0.0, 0.0, 0.0)


def a_check(text: str = "t", grown: Increase = NOTHING, missed_by: float | None = 0.0) -> Check:
    return Check(
        text=text, tokens=1024, perplexity_trained=10.0, perplexity=10.1, experts_per_token=2.0, increase=grown,
        missed_by=missed_by,
    )  # fmt: skip


class SmoothMeter(Meter):
    """Experts grow with τ, and fall with α and the least weight; the loss is 4 − experts. Measurements are noted."""

    renormalizes = False  # type: ignore[assignment]

    def __init__(self, layers: int, trained: Setting | None = None) -> None:
        self.points: dict[Setting, Point] = {}
        self.asked: list[tuple[Setting, Family]] = []
        self.model = self.text = None  # type: ignore[assignment]
        self.trained = self.measure(trained or mass((1.0,) * layers, 0.987, 4), "trained")

    def measure(self, setting: Setting, family: Family) -> Point:
        self.asked.append((setting, family))
        if setting not in self.points:
            share = setting.tau if setting.tau is not None else (setting.cap - 1) / 3
            share = 1 - share if setting.selection == "at_least" else share
            alpha = math.prod(setting.alphas) ** (1 / len(setting.alphas))
            experts = 1 + 3 * share / (1 + 0.01 * alpha)
            self.points[setting] = point(experts, 4 - experts, family, setting)
        return self.points[setting]


class NotingGates:
    """Answers every question with another number, and keeps the questions."""

    def __init__(self, *_: Any) -> None:
        self.tau_asked: list[tuple[tuple[float, ...], float]] = []
        self.weight_asked: list[tuple[tuple[float, ...], float]] = []
        self.alpha_asked: list[tuple[int, float, float]] = []

    def times(self, norms: Any) -> NotingGates:
        """Of gate × norm; its questions are not noted here."""
        return NotingGates()

    def tau_for(self, alphas: Any, experts: float) -> float:
        self.tau_asked.append((tuple(alphas), experts))
        return (experts - 1) / 4 + 0.01 * alphas[0]

    def weight_for(self, alphas: Any, experts: float) -> float:
        self.weight_asked.append((tuple(alphas), experts))
        return 1 - (experts - 1) / 4

    def alpha_for(self, layer: int, tau: float, experts: float) -> float:
        self.alpha_asked.append((layer, tau, experts))
        return 10 + len(self.alpha_asked)
