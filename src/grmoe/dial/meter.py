"""Measure settings of one model on one text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from grmoe.dial.saved import Book
from grmoe.dial.setting import Setting, apply, current
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.losses import Measurement, measure
from grmoe.probe.windows import Text

Family = Literal["trained", "top-k", "uniform", "per layer", "k per layer", "gate × norm"]
IN_WORDS = {"uniform": "one α for all", "per layer": "one α per layer"}  # families in the words of the tables
RULES: tuple[Family, ...] = ("k per layer", "gate × norm")  # beside τ and α


@dataclass(frozen=True, eq=False)
class Point:
    """A setting and what was measured with it."""

    setting: Setting
    family: Family
    measured: Measurement

    @property
    def experts_per_token(self) -> float:
        return self.measured.experts_per_token

    @property
    def loss(self) -> float:
        return self.measured.loss


class Meter:
    """Measures settings, each of them once. The first one is the setting the model has now."""

    def __init__(
        self,
        model: GrmoeForCausalLM,
        text: Text,
        step: Callable[[str], None] = lambda stage: None,
        book: Book | None = None,
    ) -> None:
        """step: called after each measurement with what was measured.

        book: what an interrupted dial measured before, and where new measurements go.
        """
        self.model, self.text, self.step, self.book = model, text, step, book or Book()
        self.points: dict[Setting, Point] = {}
        self.trained = self.measure(current(model.config), "trained")

    @property
    def layers(self) -> int:
        return len(self.trained.setting.alphas)

    @property
    def renormalizes(self) -> bool:
        """Whether the kept weights are scaled back to sum one."""
        return bool(self.model.config.norm_topk_prob)

    def measure(self, setting: Setting, family: Family) -> Point:
        """The model stays at `setting` if it was not measured before."""
        if setting not in self.points:
            measured = self.book.take(setting, lambda: self._run(setting))
            self.points[setting] = Point(setting, family, measured)
            self.step(IN_WORDS.get(family, family))
        return self.points[setting]

    def _run(self, setting: Setting) -> Measurement:
        apply(self.model, setting)
        try:
            return measure(self.model, self.text)
        except ValueError as error:
            raise ValueError(f"{error} ({setting})") from error
