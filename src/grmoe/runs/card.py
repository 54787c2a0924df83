"""The model card: how to load the model, what its run says of it, and what was measured of it since.

Results of `grmoe dial` and `grmoe eval` are read as the JSON they leave: the card of a run and that of a dialled model
have the same sections.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grmoe.runs.checkpoint import Checkpoint
from grmoe.runs.folder import read_log

MODEL_CARD = "README.md"
FRONTIER = 3  # points of the frontier that are shown

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [grmoe, mixture-of-experts]
---

# {name}

{kind}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)  # no need to with grmoe installed
tokenizer = AutoTokenizer.from_pretrained("{name}")
model.set_alpha(2.0)  # sharper routing, nothing is retrained
```

{numbers}
"""
_GRASSMANN = """A Grassmannian Mixture-of-Experts language model: each expert owns a subspace, a token goes to the
experts that hold most of its energy, and one number, α, sets the sparsity after training."""
_OTHER = "A Mixture-of-Experts language model of grmoe, with its router {router}."


def run_card(run: Path, checkpoint: Checkpoint, name: str, router: str, saved: str) -> str:
    """The card of a run's checkpoint. saved: which setting of the dial the folder has."""
    kind = _GRASSMANN if router == "grassmann" else _OTHER.format(router=router)
    card = _CARD.format(name=name, kind=kind, numbers=_training(run, checkpoint))
    makers: dict[str, Callable[[Any], str]] = {
        "dial": lambda results: dial_section(results, saved),
        "eval": evaluation_section,
    }
    for folder, make in makers.items():
        path = run / folder / "results.json"
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
            if results["step"] == checkpoint.step:  # those of another checkpoint say nothing of this one
                card = put_section(card, make(results))
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged or of another version: measure again, or remove it"
            ) from error
    return card


def put_section(card: str, section: str) -> str:
    """The card with a section in place of the one of the same heading, or at its end."""
    heading = section.partition("\n")[0]
    found = re.search(rf"^{re.escape(heading)}\n.*?(?=^## |\Z)", card, re.MULTILINE | re.DOTALL)
    if found is None:
        return f"{card.rstrip()}\n\n{section}".lstrip()
    return card[: found.start()] + section + ("\n" if card[found.end() :] else "") + card[found.end() :]


def dial_section(results: Mapping[str, Any], saved: str) -> str:
    """What `grmoe dial` found: its results.json in tables. saved: which setting the folder has."""
    chosen, trained, text = results["chosen"], results["trained"], results["calibration"]
    named = [("as trained", trained), *((f"{r['alpha']:g}", r) for r in results["table"]), ("chosen", chosen)]
    best = [p for p in results["points"] if p["on_frontier"] and p["speed"] is not None]
    tau, cap = (results["table"][0]["setting"][key] for key in ("selection_tau", "num_experts_per_tok"))
    alphas = _table(
        ("α", "exp(H)", "1/Σg²", "experts computed", "perplexity", "relative throughput"),
        [
            (
                name,
                f"{p['effective_experts_entropy']:.2f}",
                f"{p['effective_experts_inverse']:.2f}",
                f"{p['experts']:.3f}",
                f"{p['perplexity']:.3f}",
                _speed(p),
            )
            for name, p in named
        ],
    )
    frontier = _table(
        ("experts a token", "perplexity", "increase", "relative throughput", "setting"),
        [
            (
                f"{p['experts']:.3f}",
                f"{p['perplexity']:.3f}",
                _percent(p["increase"]["value"]),
                _speed(p),
                _setting(p),
            )
            for p in _spread(best, FRONTIER)
        ],
    )
    certificates = _table(
        ("block", "dropped mass", "at most", "entropy within", "entropy", "‖ŷ‖", "error", "bound"),
        [
            (
                str(c["layer"]),
                f"{c['dropped_mean']:.3f}",
                f"{c['dropped_max']:.3f}",
                f"{c['entropy_lower']:.2f} to {c['entropy_upper']:.2f}",
                f"{c['entropy']:.2f}",
                f"{c['output']:.3g}",
                f"{c['exact']:.3g}",
                f"{c['bound']:.3g}" if c["holds"] else "∞ for some",
            )
            for c in results["certificates"]
        ],
    )
    checks = "".join(f"{_check(c)}\n" for c in results["checks"])
    grown, source = chosen["increase"], f"{text['tokens']:,} tokens of “{_name(text['text'])}”"
    return f"""## The dial

Measured with `grmoe dial` on {source} ({results["device"]}, {results["dtype"]}).
This folder has {saved}.

- Asked: {results["asked"]}.
- Chosen: {_setting(chosen)}: {chosen["experts"]:.3f} experts a token, perplexity {chosen["perplexity"]:.3f},
  {_percent(grown["value"])} (90 % interval {_percent(grown["low"])} to {_percent(grown["high"])}).
- As trained: {_setting(trained)}: {trained["experts"]:.3f} experts a token, perplexity {trained["perplexity"]:.3f}.
{checks}
One α for all layers, mass {tau:g}, cap {cap}:

{alphas}

Of the frontier:

{frontier}

Certificates of the chosen setting, against all experts at the same α (error: measured; bound: proved):

{certificates}
"""


def evaluation_section(results: Mapping[str, Any]) -> str:
    """What `grmoe eval` found: its results.json as a table with a column for each α."""
    points = results["points"]
    first = points[0]
    rows = [("experts a token", *(f"{p['experts_per_token']:.3f}" for p in points))]
    for text in first["totals"]:
        for key, label, digits in (("perplexity", "perplexity", 3), ("bits_per_byte", "bits/byte", 4)):
            cells = (f"{p['totals'][text][key]:.{digits}f}" for p in points)
            rows.append((f"{_name(text)}, {label}", *cells))
    for task, numbers in first["tasks"].items():
        for key in numbers:
            metric, _, rule = key.partition(",")
            if rule and not metric.endswith("_stderr"):
                error = f"{metric}_stderr,{rule}"
                cells = (_with_error(p["tasks"][task][key], p["tasks"][task].get(error)) for p in points)
                rows.append((f"{task}, {numbers['shots']}-shot, {metric}", *cells))
    table = _table(("", *(f"α = {_numbers(p['alpha'])}" for p in points)), rows)
    windows = f"windows of {results['length']} tokens, stride {results['stride']}"
    return f"""## Measured

With `grmoe eval` at the trained selection of experts, {windows} ({results["device"]}, {results["dtype"]}):

{table}
"""


def _training(run: Path, checkpoint: Checkpoint) -> str:
    """What the log says about the checkpoint."""
    lines = [v for v in read_log(run) if v["kind"] == "validation" and v["step"] <= checkpoint.step]
    if not lines:
        return f"Trained for {checkpoint.step} steps."
    last: dict[str, Any] = lines[-1]
    rows = [
        ("validation perplexity", f"{last['perplexity']:.3f}"),
        *((f"validation loss, {name}", f"{loss:.4f}") for name, loss in last["domains"].items()),
        ("experts a token", f"{last['experts_per_token']:.2f}"),
        ("entropy of the gate, nats", f"{last['entropy']:.3f}"),
        ("load CV", f"{last['load_cv']:.3f}"),
        ("smallest load", f"{last['min_load']:.3f}"),
        *([("leading expert CV", f"{last['leading_cv']:.3f}")] if "leading_cv" in last else []),
        ("largest overlap", "–" if last["max_overlap"] is None else f"{last['max_overlap']:.3f}"),
    ]
    return f"After {last['step']} steps:\n\n{_table(('', ''), rows)}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _spread(points: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of them, at even distances, the first and the last among them."""
    if len(points) <= count:
        return list(points)
    return [points[i * (len(points) - 1) // (count - 1)] for i in range(count)]


def _setting(point: Mapping[str, Any]) -> str:
    """As it stands in config.json."""
    return ", ".join(f"{name} {_numbers(v)}" for name, v in point["setting"].items() if v is not None)


def _numbers(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(f"{v:g}" for v in value) + "]"
    return value if isinstance(value, str) else f"{value:g}"


def _check(check: Mapping[str, Any]) -> str:
    missed = check["missed_by"]
    verdict = "" if missed is None else ": missed" if missed > 0 else ": kept"
    return (
        f"- Checked on {_name(check['text'])} ({check['tokens']:,} tokens): {check['experts']:.3f} experts a token, "
        f"perplexity {check['perplexity_trained']:.3f} → {check['perplexity']:.3f}, "
        f"{_percent(check['increase']['value'])}{verdict}."
    )


def _name(text: str) -> str:
    """A text's own name: a card is published, the folders of a disk need not be."""
    return Path(text).name


def _speed(point: Mapping[str, Any]) -> str:
    return "–" if point["speed"] is None else f"{point['speed']['relative']:.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:+.2f} %"


def _with_error(value: float, error: Any) -> str:
    return f"{value:.4g} ± {error:.2g}" if isinstance(error, float) else f"{value:.4g}"
