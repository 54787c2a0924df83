"""How fast trained models are at each setting, and what they lose at a given speed: results/post-hoc-speed.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from grmoe.files import read_json
from grmoe.studies.models.store import Run
from grmoe.studies.models.summary import VALIDATION

ROUNDS = 9
AS_FAST = 0.02  # share of a throughput that counts as equal: two timings differ by as much


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Prefill of one model at one setting."""

    recipe: str
    setting: str
    tokens_per_second: float
    how: str
    """What was timed: the eager model, or the compiled one in a CUDA graph."""


def speed_file(results: Path) -> Path:
    return results / "post-hoc-speed.json"


def read_speeds(results: Path) -> dict[tuple[str, str], Speed]:
    """By recipe and setting; empty if nothing was timed."""
    path = speed_file(results)
    rows = read_json(path)["rows"] if path.is_file() else []
    return {(row["recipe"], row["setting"]): Speed(**row) for row in rows}


def time_run(recipe: str, folder: Path, device: str) -> list[Speed]:
    """Prefill speed of a trained run at every setting it was measured at."""
    from grmoe.dial.meter import Meter
    from grmoe.dial.speed import TOKENS, time_points
    from grmoe.probe.windows import read_texts
    from grmoe.runs.open import open_model
    from grmoe.studies.models.worker import settings_of

    loaded = open_model(folder, "last", device=device, dtype="served")
    (text,) = read_texts((None,), loaded, None, TOKENS.get(loaded.model.device.type, 1024))
    meter = Meter(loaded.model, text)
    _, settings = settings_of(loaded.model.config)
    points = {name: meter.measure(s, "uniform") for name, s in settings.items() if s is not None}
    found = time_points(loaded.model, text, points.values(), meter.trained, ROUNDS)
    return [
        Speed(
            recipe=recipe,
            setting=name,
            tokens_per_second=round(found[p].tokens_per_second, 1),
            how=found[p].how,
        )
        for name, p in points.items()
    ]


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
