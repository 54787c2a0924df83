"""The model card: how to load the model, how it was trained, and what was measured with it since.

Every command that measures a model writes its own section (`Results.card`). A section is enclosed by two comments,
`<!-- grmoe:dial -->` and `<!-- /grmoe:dial -->`, so that a later one of the same kind replaces it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from grmoe.model import GrmoeConfig
from grmoe.model.choices_grmoe import OWN_CHOICE
from grmoe.routing.selection import NO_LIMIT
from grmoe.runs.checkpoint import Checkpoint
from grmoe.runs.folder import read_log
from grmoe.runs.open import LoadedModel
from grmoe.runs.results import COMMANDS, belong, find_results
from grmoe.tables import Table, counted, largest, shortened

MODEL_CARD = "README.md"

_MOST_DOMAINS = 10  # rows of the table
_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [grmoe, mixture-of-experts]
---

# {title}

{kind}
"""
_GRASSMANN = """A Grassmannian Mixture-of-Experts language model. Each expert owns a subspace. A token goes to the
experts that hold most of its energy. How many experts compute a token is chosen after training."""
_OTHER = "A Mixture-of-Experts language model of grmoe, with its router `{router}`."

# The section of these lines before it had marks.
_OLD_USE = re.compile(
    r"^```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\nmodel = .*?^```\n\n?",
    re.MULTILINE | re.DOTALL,
)
_USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name}, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained({name}, trust_remote_code=True)
{dial}inputs = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))
```

Where grmoe is installed, write `import grmoe` first: it brings fast kernels, and `trust_remote_code` is not needed."""


def card_name(out: Path) -> str:
    """How the card of a folder names it: by its relative path as given, so that the lines run where it was made."""
    inside = out.name and not out.is_absolute() and ".." not in out.parts
    return out.as_posix() if inside else out.resolve().name


def model_card(
    loaded: LoadedModel, name: str, measured: bool = True, sections: Mapping[str, str] | None = None
) -> str:
    """The card of a run, or the card an exported folder came with, for the setting the model has now.

    name: what to load it by, see `card_name`.
    measured: keep the measurements of this model. False if its experts were changed.
    sections: new sections by kind, from the command that writes this card. They replace earlier ones.
    """
    sections = sections or {}
    card = ""
    path = loaded.path / MODEL_CARD
    if not loaded.is_run and path.is_file():
        card = path.read_text(encoding="utf-8")
    if not card:
        router = loaded.model.config.router
        kind = _GRASSMANN if router == "grassmann" else _OTHER.format(router=router)
        card = _CARD.format(title=name.rpartition("/")[2], kind=kind)
    card = put_section(_OLD_USE.sub("", card), "use", _use(loaded.model.config, name))
    if loaded.checkpoint is not None:
        card = put_section(card, "training", _training(loaded, loaded.checkpoint))
    card = put_section(card, "setting", f"Routing in this folder: {describe_setting(loaded.model.config)}.")
    card = put_section(card, "budget", _budgets(loaded.model.config))
    for kind in COMMANDS:
        if kind in sections:
            card = put_section(card, kind, sections[kind])
        elif not measured:
            card = put_section(card, kind, "")
        elif loaded.checkpoint is not None:
            results = find_results(loaded.path, kind)
            # Results of other weights say nothing about these.
            own = results is not None and belong(results, loaded.step, loaded.checkpoint.path)
            if results is not None and own and results.card:
                card = put_section(card, kind, results.card)
    return card


def _use(config: GrmoeConfig, name: str) -> str:
    """Lines that load the folder and turn its dial."""
    dial = ""
    if config.budget_range is not None:
        low, high = config.budget_range
        dial = f"model.set_budget({(low + high) / 2:.3g})  # experts per token, from {low:g} to {high:g}\n"
    elif config.router not in OWN_CHOICE:
        dial = "model.set_alpha(2.0)  # sharper routing; nothing is retrained\n"
    return _USE.format(name=json.dumps(name, ensure_ascii=False), dial=dial)


def put_section(card: str, kind: str, section: str) -> str:
    """Replace the section of this kind, or append it. An empty section removes it."""
    begin, end = f"<!-- grmoe:{kind} -->", f"<!-- /grmoe:{kind} -->"
    block = f"{begin}\n{section.strip()}\n{end}\n" if section.strip() else ""
    found = re.search(rf"^{re.escape(begin)}\n.*?^{re.escape(end)}\n?", card, re.MULTILINE | re.DOTALL)
    if found is not None:
        return (card[: found.start()] + block + card[found.end() :]).rstrip() + "\n"
    return f"{card.rstrip()}\n\n{block}".strip() + "\n"


def has_section(card: str, kind: str) -> bool:
    return f"<!-- grmoe:{kind} -->\n" in card


def describe_setting(config: GrmoeConfig) -> str:
    """Router, α and selection of a configuration, or its budget, as text."""
    if config.budget is not None:
        taus, sharpness, caps, _ = zip(*config.numbers, strict=True)
        shown = _values(1.0 if tau == NO_LIMIT else abs(tau) for tau in taus)
        rule = "those with a weight of at least" if min(taus) < 0 else "the fewest that reach probability"
        more = f"at most {_values(caps)}, α {_values(sharpness)}"
        return f"a budget of {counted(config.budget, 'expert')} per token ({rule} {shown}, {more})"
    alphas = ", ".join(f"{a:g}" for a in dict.fromkeys(config.alphas))
    if config.router in OWN_CHOICE:
        return f"router `{config.router}`, α {alphas}"
    cap, tau = config.num_experts_per_tok, config.selection_tau
    probable = "most probable expert" if cap == 1 else f"{cap} most probable experts"
    how = {
        "topk": f"the {probable} per token",
        "mass": f"the fewest experts per token that reach probability {tau}, at most {cap}",
        "at_least": f"the experts with a weight of at least {tau} per token, at most {cap}",
        "threshold": f"the experts of probability at least {tau} per token",
        "dense": "all experts per token",
    }[config.selection]
    return f"α {alphas}, {how}"


def _values(values: Iterable[float]) -> str:
    """The one value of all layers, or the value of every layer."""
    every = list(values)
    return ", ".join(f"{v:.4g}" for v in (every if len(set(every)) > 1 else every[:1]))


_BIAS = """
A budget chooses experts by the gate and a bias (`bias` of its point in config.json), which evens out the load of the
experts. It weighs them by the gate alone.
"""


def _budgets(config: GrmoeConfig) -> str:
    """The curve of budgets as a section of the card; empty without one."""
    if config.budget_curve is None:
        return ""
    rule = "weight" if "weight" in config.budget_curve[0] else "tau"
    heading = "weight at least" if rule == "weight" else "τ"
    table = Table("", ["experts per token", "perplexity", heading, "α", "at most"], left=0)
    for point in config.budget_curve:
        columns = (
            point[key] if isinstance(point[key], list) else [point[key]] for key in (rule, "alpha", "cap")
        )
        loss = point.get("loss")
        perplexity = "–" if loss is None else f"{math.exp(loss):.3f}"
        table.add(f"{point['experts_per_token']:.4g}", perplexity, *map(_values, columns))
    low, high = config.budget_range or (0, 0)
    return f"""## Budgets

`model.set_budget({(low + high) / 2:.3g})` sets the experts per token: any number from {low:g} to {high:g}. Nothing is
retrained. `model.set_budget(None)` is the trained setting again. Measured with `grmoe dial` on its calibration text:

{table.markdown()}
{_BIAS if config.biased else ""}"""


def _training(loaded: LoadedModel, checkpoint: Checkpoint) -> str:
    """What the run's log says about the checkpoint."""
    validations = (line for line in read_log(loaded.path) if line["kind"] == "validation")
    lines = [line for line in validations if line["step"] <= checkpoint.step]
    if not lines:
        return f"Trained for {checkpoint.step} steps."
    last = lines[-1]
    table = Table("", ["", ""])
    table.add("validation perplexity", f"{last['perplexity']:.3f}")
    shown, others = largest(list(last["domains"]), _MOST_DOMAINS)
    for name in shown:
        table.add(f"validation loss, {shortened(name)}", f"{last['domains'][name]:.4f}")
    if others:
        table.add(f"validation loss, {others}", "–")
    table.add("experts per token", f"{last['experts_per_token']:.2f}")
    table.add("entropy of the gate, nats", f"{last['entropy']:.3f}")
    table.add("load CV", f"{last['load_cv']:.3f}")
    table.add("smallest load", f"{last['min_load']:.3f}")
    table.add("largest overlap", "–" if last["max_overlap"] is None else f"{last['max_overlap']:.3f}")
    return f"After {last['step']} steps:\n\n{table.markdown()}"
