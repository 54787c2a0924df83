"""How fast trained models are at each setting, and what they lose at a given speed: results/post-hoc-speed.json.

Models take turns: in each round every model is timed at every setting. A ratio of two speeds is taken round by round,
because both were then timed under the same conditions. Its interval is the middle 80 % of the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from grmoe.dial.speed import TOKENS, put
from grmoe.files import read_json
from grmoe.probe.timing import Timer, Times, quantile, warmed_up
from grmoe.probe.windows import read_texts
from grmoe.runs.open import open_model
from grmoe.studies.benchmarks import Measured
from grmoe.studies.models.store import Run
from grmoe.studies.models.summary import VALIDATION
from grmoe.studies.models.worker import settings_of
from grmoe.terminal import Progress, silent

ROUNDS = 9
AS_FAST = 0.02  # share of a throughput that counts as equal
_RECOMPILES = 32  # more than the settings of all models need: past its limit Dynamo falls back to eager code


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Prefill of one model at one setting."""

    recipe: str
    setting: str
    rounds: tuple[float, ...]
    """Tokens per second, by round."""
    how: str
    """What was timed: the eager model, or the compiled one in a CUDA graph."""

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(self.rounds)

    @property
    def interval(self) -> tuple[float, float]:
        return quantile(list(self.rounds), 0.1), quantile(list(self.rounds), 0.9)


def speed_ratio(over: Speed, under: Speed) -> Measured:
    """The median of the ratios by round, with the middle 80 % of them."""
    ratios = [a / b for a, b in zip(over.rounds, under.rounds, strict=True)]
    return Measured(statistics.median(ratios), quantile(ratios, 0.1), quantile(ratios, 0.9))


def speed_file(results: Path) -> Path:
    return results / "post-hoc-speed.json"


def read_speeds(results: Path) -> dict[tuple[str, str], Speed]:
    """By recipe and setting; empty if nothing was timed."""
    path = speed_file(results)
    rows = read_json(path)["rows"] if path.is_file() else []
    return {(row["recipe"], row["setting"]): Speed(**row | {"rounds": tuple(row["rounds"])}) for row in rows}


class Prefill:
    """A trained model that is ready to be timed at every setting it was measured at.

    On a GPU each setting has a CUDA graph of the compiled model. A model that does not compile raises: eager and
    compiled models do not compare.
    """

    @torch.no_grad()
    def __init__(self, recipe: str, folder: Path, device: str) -> None:
        loaded = open_model(folder, "last", device=device, dtype="served")
        self.recipe, self.model = recipe, loaded.model
        where = self.model.device
        tokens = TOKENS.get(where.type, TOKENS["cpu"])
        (text,) = read_texts((None,), loaded, None, tokens)
        ids = text.some(tokens).inputs_WS.contiguous().to(where)
        self.tokens = ids.numel()
        _, settings = settings_of(self.model.config)
        self.settings = {name: setting for name, setting in settings.items() if setting is not None}
        graphs = where.type == "cuda"
        self.how = "compiled, CUDA graph" if graphs else "eager"
        # As in the dial: all settings that take the most probable experts run the same kernels.
        self.room = max(setting.cap for setting in self.settings.values()) if graphs else None
        forward: Callable[..., object] = torch.compile(self.model, dynamic=False) if graphs else self.model

        def prefill() -> object:
            return forward(input_ids=ids, use_cache=False, logits_to_keep=1)

        self.calls: dict[str, Callable[[], object]] = {}
        for name, setting in self.settings.items():
            put(self.model, setting, self.room)
            if graphs:
                prefill()  # a capture must find the model compiled
            self.calls[name] = warmed_up(prefill, where)
        self.times = {name: Times() for name in self.settings}

    @torch.no_grad()
    def turn(self, timer: Timer) -> None:
        """Time every setting once more."""
        for name, setting in self.settings.items():
            put(self.model, setting, self.room)
            self.times[name].add(timer, self.calls[name])

    def speeds(self) -> list[Speed]:
        return [
            Speed(
                recipe=self.recipe,
                setting=name,
                rounds=tuple(round(1e3 * self.tokens / statistics.median(turn), 1) for turn in times.rounds),
                how=self.how,
            )
            for name, times in self.times.items()
        ]


def time_models(runs: Iterable[tuple[str, Path]], device: str, progress: Progress = silent) -> list[Speed]:
    """Speeds of trained runs, given as (recipe, folder), at all their settings. They take turns in each round."""
    todo = list(runs)
    steps = len(todo) + ROUNDS
    ready: list[Prefill] = []
    with torch._dynamo.config.patch(recompile_limit=_RECOMPILES, accumulated_recompile_limit=8 * _RECOMPILES):
        for recipe, folder in todo:
            progress(f"compiling {recipe}", len(ready), steps)
            ready.append(Prefill(recipe, folder, device))
        timer = Timer(ready[0].model.device)
        for number in range(ROUNDS):
            progress("timing", len(todo) + number, steps)
            for each in ready:
                each.turn(timer)
    return [speed for each in ready for speed in each.speeds()]


def loss_at(run: Run, speeds: Mapping[str, float], wanted: float) -> float | None:
    """Loss of a model where it is as fast as `wanted`, between its settings; None if it cannot be as fast.

    speeds: by setting. Settings that are slower and worse than another do not count.
    """
    rows = [
        (speeds[row.setting], row.loss)
        for row in run.rows
        if row.text == VALIDATION and row.setting in speeds
    ]
    front: list[tuple[float, float]] = []  # from fast to slow
    for speed, loss in sorted(rows, key=lambda row: (-row[0], row[1])):
        if not front or loss < front[-1][1]:
            front.append((speed, loss))
    if not front or wanted > front[0][0] * (1 + AS_FAST):
        return None
    for (fast, high), (slow, low) in pairwise(front):
        if slow <= wanted <= fast:
            return low + (high - low) * (wanted - slow) / (fast - slow)
    return front[0][1] if wanted > front[0][0] else front[-1][1]
