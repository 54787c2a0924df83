"""Tasks from local files without lm-evaluation-harness: the same prompts, examples, scores and standard errors.

A model answers with the choice of the largest log-likelihood (acc), or of the largest per character (acc_norm). LAMBADA
asks for the last word of a text: it counts as right where greedy decoding would write it.

Prompts, the draw of examples and the arithmetic are those of lm_eval 0.4.13. Two things differ: log-probabilities
are always computed in fp32, and the standard error of a perplexity is perplexity·s/√n instead of a bootstrap (s: the
standard deviation of the n log-likelihoods).

Legend: B sequences of a batch, S tokens of the longest, C tokens of all continuations of a batch.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch

from grmoe.checks import require
from grmoe.data.decompression import DAMAGE, decompress
from grmoe.evaluate.harness import STOCK, find_files, task_name
from grmoe.model import GrmoeForCausalLM
from grmoe.terminal import Progress, silent

Row = dict[str, Any]

SEED = 1234  # of the examples, as in the harness


class Prompt(NamedTuple):
    """A row of a task as text."""

    question: str
    choices: list[str]
    """What may follow, without the space before it. LAMBADA: the last word, with its space."""
    gold: int


def _hellaswag(row: Row) -> Prompt:
    def clean(text: str) -> str:
        # Brackets are left over from WikiHow.
        text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
        return text.replace("  ", " ")

    question = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return Prompt(clean(question), [clean(ending) for ending in row["endings"]], int(row["label"]))


def _arc(row: Row) -> Prompt:
    choices = row["choices"]
    return Prompt(
        f"Question: {row['question']}\nAnswer:", choices["text"], choices["label"].index(row["answerKey"])
    )


def _piqa(row: Row) -> Prompt:
    return Prompt(f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], int(row["label"]))


def _lambada(row: Row) -> Prompt:
    *words, last = row["text"].split(" ")
    return Prompt(" ".join(words), [f" {last}"], 0)


PROMPTS: dict[str, Callable[[Row], Prompt]] = {
    "hellaswag": _hellaswag, "arc_easy": _arc, "arc_challenge": _arc, "piqa": _piqa, "lambada_openai": _lambada,
    "lambada_standard": _lambada,
}  # fmt: skip


def read_rows(path: Path) -> list[Row]:
    """The rows of a .jsonl file (also .gz, .xz, .zst)."""
    rows: list[Row] = []
    try:
        with path.open("rb") as raw:
            for line in decompress(raw, path.name):
                if line.strip():
                    rows.append(json.loads(line))
    except (ValueError, *DAMAGE) as error:
        raise ValueError(f"{path} is not a JSONL file (row {len(rows) + 1}: {error})") from error
    require(bool(rows), f"{path} must hold a row, got none")
    return rows


@dataclass(frozen=True)
class Task:
    """A task and its rows."""

    name: str
    rows: list[Row]
    """Asked one after the other."""
    examples: list[Row]
    """Examples of a prompt are drawn from here."""
    apart: bool
    """The examples are other rows than the asked ones. If not, a row is never its own example."""

    @classmethod
    def read(cls, name: str, files: dict[str, Path]) -> Task:
        """From files by split. Examples come from the training rows, or from the evaluated ones without any."""
        stock = STOCK[name]
        evaluated = stock.evaluated if stock.evaluated in files else next(s for s in files if s != "train")
        rows = read_rows(files[evaluated])
        apart = "train" in files
        return cls(name, rows, read_rows(files["train"]) if apart else rows, apart)

    def prompt(self, row: Row) -> Prompt:
        try:
            return PROMPTS[self.name](row)
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            said = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"a row of {self.name} has other fields than the task ({said}): {row}"
            ) from error

    def questions(self, shots: int, limit: int | None) -> Iterator[Prompt]:
        """The first rows, each behind `shots` examples. The draw of a row depends on the rows before it."""
        draw = random.Random(SEED)
        for row in self.rows[:limit]:
            before = "".join(map(self._example, self._draw(row, shots, draw)))
            prompt = self.prompt(row)
            yield prompt._replace(question=before + prompt.question)

    def _draw(self, row: Row, shots: int, draw: random.Random) -> Sequence[Row]:
        if shots == 0:
            return []
        if self.apart:
            return draw.sample(self.examples, shots)
        found = [other for other in draw.sample(self.examples, shots + 1) if other != row][:shots]
        if len(found) < shots:  # the row stands there twice
            others = [other for other in self.examples if other != row]
            require(
                shots <= len(others),
                f"shots must be at most {len(others)}, the rows of {self.name} that differ from the one asked, "
                f"got {shots}",
            )
            found = draw.sample(others, shots)
        return found

    def _example(self, row: Row) -> str:
        question, choices, gold = self.prompt(row)
        return f"{question} {choices[gold]}\n\n"

    def continuations(self, prompt: Prompt) -> list[str]:
        return prompt.choices if _is_lambada(self.name) else [f" {choice}" for choice in prompt.choices]


def _is_lambada(name: str) -> bool:
    return name.startswith("lambada")


def encode_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Tokens of both. Spaces at the end of the context belong to the continuation, where words keep their space.

    The specification of `encode_pairs`.
    """
    context, continuation = _split(context, continuation)
    if not context:
        return [tokenizer.eos_token_id], list(tokenizer.encode(continuation))
    whole, first = tokenizer.encode(context + continuation), tokenizer.encode(context)
    return list(first), list(whole[len(first) :])


def _split(context: str, continuation: str) -> tuple[str, str]:
    """The context without spaces at its end, and the continuation with them."""
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def encode_pairs(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    """`encode_pair` of all of them: the choices of a question share its tokens, and texts are encoded side by side."""
    split = [_split(*pair) for pair in pairs]
    texts = list(dict.fromkeys(text for context, rest in split for text in (context, context + rest) if text))
    ids: dict[str, list[int]] = {"": []}
    if texts:
        ids.update(zip(texts, tokenizer(texts)["input_ids"], strict=True))
    found = []
    for context, rest in split:
        first, whole = ids[context], ids[context + rest]
        found.append((first or [tokenizer.eos_token_id], whole[len(first) :]))
    return found


class Score(NamedTuple):
    log_likelihood: float
    greedy: bool
    """Greedy decoding would write it."""


@torch.no_grad()
def score_pairs(
    model: GrmoeForCausalLM,
    pairs: Sequence[tuple[list[int], list[int]]],
    batch: int,
    progress: Callable[[int], None] = lambda done: None,
    longest: int | None = None,
) -> list[Score]:
    """log p(continuation | context) of every pair. A context too long for the model loses its beginning.

    longest: most tokens of a sequence. Default: what the model takes, as in the harness.
    """
    longest = longest or model.config.max_position_embeddings
    for _, continuation in pairs:
        require(
            0 < len(continuation) <= longest,
            f"a continuation must have 1 to {longest} tokens, the most of a sequence, got {len(continuation)}",
        )
    scores: list[Score | None] = [None] * len(pairs)
    # Long ones first: batches of equal lengths have little padding.
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
    for start in range(0, len(order), batch):
        places = order[start : start + batch]
        inputs = [(pairs[i][0] + pairs[i][1])[-(longest + 1) :][:-1] for i in places]
        width = max(map(len, inputs))
        ids_BS = torch.tensor([ids + [0] * (width - len(ids)) for ids in inputs], device=model.device)
        hidden = model.model(input_ids=ids_BS, use_cache=False).last_hidden_state
        counts = [len(pairs[i][1]) for i in places]
        kept = [
            hidden[row, len(ids) - n : len(ids)]
            for row, (ids, n) in enumerate(zip(inputs, counts, strict=True))
        ]
        wanted_C = torch.tensor([token for i in places for token in pairs[i][1]], device=model.device)
        logits_C = model.lm_head(torch.cat(kept)).float()
        log_p_C = torch.log_softmax(logits_C, -1).gather(-1, wanted_C.unsqueeze(-1)).squeeze(-1)
        right_C = logits_C.argmax(-1) == wanted_C
        for i, log_p, right in zip(places, log_p_C.split(counts), right_C.split(counts), strict=True):
            scores[i] = Score(float(log_p.sum()), bool(right.all()))
        progress(start + len(places))
    return [score for score in scores if score is not None]


def mean_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error s/√n; None for a single value."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def multiple_choice(prompts: Sequence[Prompt], scores: Sequence[Sequence[Score]]) -> dict[str, float | None]:
    """acc: the likeliest choice is the right one. acc_norm: likelihoods per character of the choice."""
    right: list[float] = []
    right_norm: list[float] = []
    for prompt, row in zip(prompts, scores, strict=True):
        likelihoods = [score.log_likelihood for score in row]
        lengths = [len(choice) or math.nan for choice in prompt.choices]
        relative = [value / length for value, length in zip(likelihoods, lengths, strict=True)]
        for found, values in ((right, likelihoods), (right_norm, relative)):
            found.append(float(max(range(len(values)), key=values.__getitem__) == prompt.gold))
    return _with_errors(acc=mean_error(right), acc_norm=mean_error(right_norm))


def last_word(scores: Sequence[Sequence[Score]]) -> dict[str, float | None]:
    """LAMBADA: perplexity of the last word (not of its tokens), and acc."""
    likelihoods = [row[0].log_likelihood for row in scores]
    mean, error = mean_error(likelihoods)
    perplexity = math.exp(min(-mean, 700.0))
    spread = None if error is None else perplexity * error
    return _with_errors(
        perplexity=(perplexity, spread), acc=mean_error([float(row[0].greedy) for row in scores])
    )


def _with_errors(**metrics: tuple[float, float | None]) -> dict[str, float | None]:
    """Names as in the harness: "acc,none" and "acc_stderr,none"."""
    named: dict[str, float | None] = {}
    for name, (value, error) in metrics.items():
        named |= {f"{name},none": value, f"{name}_stderr,none": error}
    return named


class Scorer:
    """Tasks of a folder and the model that answers them. The caller sets the dial between two runs."""

    def __init__(
        self,
        tasks: Sequence[str],
        folder: Path,
        model: GrmoeForCausalLM,
        tokenizer: Any,
        batch: int,
        shots: int | None,
        longest: int | None = None,
    ) -> None:
        """tasks: names; none for all of `folder`. shots: examples per prompt, None for zero.

        longest: most tokens of a prompt with its answer. None: what the model takes, as in the harness.
        """
        found = find_files(folder)
        require(
            bool(found),
            f"{folder} must hold TASK_SPLIT.jsonl (also .gz, .xz, .zst) of one of {', '.join(STOCK)}",
        )
        names = [task_name(given, found, folder) for given in dict.fromkeys(tasks or found)]
        self.tasks = [Task.read(name, found[name]) for name in names]
        self.model, self.tokenizer, self.batch, self.shots = model, tokenizer, batch, shots or 0
        self.longest = longest
        for task in self.tasks:
            rows = len(task.examples)
            require(
                not self.shots or self.shots < rows,
                f"shots must be below the {rows} rows of {task.name}, got {self.shots}",
            )

    def run(self, limit: int | None, progress: Progress = silent) -> dict[str, dict[str, Any]]:
        """{task: {"metric,none": number}} with "shots" and "rows", as `Harness.run`. limit: most rows of each task."""
        return {task.name: self._ask(task, limit, progress) for task in self.tasks}

    def _ask(self, task: Task, limit: int | None, progress: Progress) -> dict[str, Any]:
        prompts = list(task.questions(self.shots, limit))
        asked = [(prompt.question, text) for prompt in prompts for text in task.continuations(prompt)]
        pairs = encode_pairs(self.tokenizer, asked)
        done = partial(progress, task.name)
        found = score_pairs(self.model, pairs, self.batch, lambda n: done(n, len(pairs)), self.longest)
        flat = iter(found)
        scores = [[next(flat) for _ in prompt.choices] for prompt in prompts]
        metrics = last_word(scores) if _is_lambada(task.name) else multiple_choice(prompts, scores)
        return metrics | {"shots": self.shots, "rows": len(prompts)}
