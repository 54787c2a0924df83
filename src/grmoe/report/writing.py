"""Text that a model writes at three budgets, from one prompt and one seed.

The same seed draws the same random numbers at every budget: texts agree for as long as the probabilities do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from grmoe.model import GrmoeForCausalLM
from grmoe.probe.text import Stream
from grmoe.runs.open import LoadedModel

PROMPT_TOKENS = 16
TEMPERATURE = 0.7
SEED = 0


def three_budgets(slider: Mapping[str, Any] | None) -> list[float | None]:
    """The fewest experts, the chosen ones and the most; None is the setting saved with the model.

    slider: `grmoe.report.dialled.slider_stops`.
    """
    if slider is None or not slider["exact"] or len(slider["stops"]) < 2:
        return [None]
    counts: list[float] = [stop["experts_per_token"] for stop in slider["stops"]]
    chosen = round(slider["chosen"]["experts_per_token"], 4) if slider["chosen"] else counts[0]
    middle = chosen if counts[0] < chosen < counts[-1] else counts[len(counts) // 2]
    return list(dict.fromkeys((counts[0], middle, counts[-1])))


def prompt_ids(loaded: LoadedModel, stream: Stream | None) -> list[int]:
    """The beginning of the text, or of any text where there is none. Empty for a tokenizer that knows no such text."""
    ids: list[int]
    if stream is None:
        ids = loaded.tokenizer("The").input_ids
    else:
        room = max(1, loaded.model.config.max_position_embeddings // 2)
        ids = stream.read(0, min(PROMPT_TOKENS, room, stream.tokens)).tolist()
    special = set(loaded.tokenizer.all_special_ids)
    return [i for i in ids if i not in special]


def write_samples(
    loaded: LoadedModel,
    ids: Sequence[int],
    budgets: Sequence[float | None],
    new_tokens: int,
    curve: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """One text per budget. The model is left as it was.

    curve: what the budgets follow. None: the model's own.
    """
    model: Any = loaded.model
    tokenizer = loaded.tokenizer
    room = model.config.max_position_embeddings - len(ids)
    texts = []
    for budget in budgets:
        with _at(model, budget, curve), torch.random.fork_rng():
            torch.manual_seed(SEED)
            given = torch.tensor([ids], device=model.device)
            out = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=min(new_tokens, room),
                do_sample=True,
                temperature=TEMPERATURE,
                pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
            )
        text = tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        texts.append({"budget": budget, "text": text})
    return {"prompt": tokenizer.decode(ids), "temperature": TEMPERATURE, "seed": SEED, "texts": texts}


@contextmanager
def _at(
    model: GrmoeForCausalLM, budget: float | None, curve: list[dict[str, Any]] | None = None
) -> Iterator[None]:
    """A budget of a curve for a while; None changes nothing."""
    if budget is None:
        yield
        return
    config = model.config
    before = config.budget, config.budget_curve
    try:
        config.budget, config.budget_curve = None, curve or config.budget_curve
        model.set_budget(budget)
        yield
    finally:
        config.budget, config.budget_curve = None, before[1]
        model.set_budget(before[0])
