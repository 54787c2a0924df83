"""Log-probabilities of tokens: from logits, and in OpenAI's two forms.

They are those of the model at temperature 1: log_softmax of its logits in fp32, whatever the request samples with.

Legend: S tokens of a prompt, D model width, V tokens of the vocabulary, C positions computed at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

MAX_ENTRIES = 1 << 20
"""Log-probabilities per request: tokens of all prompts and answers, times one plus `logprobs`."""
_CHUNK = 256  # positions: all logits of a long prompt at once would take S·V·4 bytes
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# Bytes of UTF-8. As many replacement characters at the end are no unfinished character.
_LONGEST_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class Score:
    """The log-probability of a token where it stands, and the most probable tokens there."""

    token: int
    logprob: float | None
    """None for the first token of a prompt, because nothing stands before it."""
    top: list[tuple[int, float]]


def score_token(logits_V: Tensor, token: int, alternatives: int) -> Score:
    """The score of a token that was chosen from these logits."""
    [score] = _scores(logits_V.unsqueeze(0), [token], alternatives)
    return score


def score_prompt(
    hidden_SD: Tensor, head: Callable[[Tensor], Tensor], prompt: list[int], alternatives: int
) -> list[Score]:
    """The score of each token of a prompt: position i predicts token i + 1."""
    found = [Score(prompt[0], None, [])]
    for start in range(0, len(prompt) - 1, _CHUNK):
        end = min(start + _CHUNK, len(prompt) - 1)
        found += _scores(head(hidden_SD[start:end]), prompt[start + 1 : end + 1], alternatives)
    return found


def _scores(logits_CV: Tensor, tokens: list[int], alternatives: int) -> Iterable[Score]:
    logp_CV = logits_CV.float().log_softmax(-1)
    chosen = logp_CV.gather(1, logp_CV.new_tensor(tokens).long().unsqueeze(1)).squeeze(1).tolist()
    best = logp_CV.topk(min(alternatives, logp_CV.shape[1]))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    for token, logprob, (ids, values) in zip(tokens, chosen, rows, strict=True):
        yield Score(token, logprob, list(zip(ids, values, strict=True)))


class TokenTexts:
    """The text of each token, decoded once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = set(tokenizer.all_special_ids)
        self.known: dict[int, str] = {}

    def alone(self, token: int) -> str:
        """A token by itself. Half a character shows as a replacement character."""
        if token not in self.known:
            self.known[token] = self.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return self.known[token]

    def together(self, tokens: list[int]) -> str:
        """Tokens as an answer shows them: without special ones."""
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class ScoreWriter:
    """Writes the scores of one answer, piece by piece. It knows where in the text each token begins."""

    def __init__(self, texts: TokenTexts, chat: bool) -> None:
        self.texts, self.chat = texts, chat
        self.tokens: list[int] = []  # the last one that ends a character, and those after it
        self.whole = 0  # of these, how many stand before `offset`
        self.offset = 0  # characters before the next token
        self.base = 0  # characters before the first of `tokens` that is not among `whole`

    def add(self, scores: list[Score]) -> dict[str, Any]:
        """The value of `logprobs` for these scores, which follow the ones before."""
        return self._content(scores) if self.chat else self._lists(scores)

    def _lists(self, scores: list[Score]) -> dict[str, Any]:
        """The form of completions. A token that is not among the alternatives is added to them."""
        tops: list[dict[str, float] | None] = []
        for score in scores:
            if score.logprob is None:
                tops.append(None)
                continue
            top: dict[str, float] = {}
            for token, logprob in [*score.top, (score.token, score.logprob)]:
                top.setdefault(self.texts.alone(token), logprob)  # several tokens can show as the same text
            tops.append(top)
        tokens = [score.token for score in scores]
        return {
            "tokens": [self.texts.alone(token) for token in tokens],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": tops,
            "text_offset": self._prompt_offsets(tokens) or [self._pass(token) for token in tokens],
        }

    def _content(self, scores: list[Score]) -> dict[str, Any]:
        """The form of chats."""
        content = [
            self._entry(score.token, score.logprob)
            | {"top_logprobs": [self._entry(token, logprob) for token, logprob in score.top]}
            for score in scores
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.texts.alone(token)
        whole = _UNFINISHED not in text
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}

    def _prompt_offsets(self, tokens: list[int]) -> list[int]:
        """Offsets of the first tokens at once, if their texts joined are the text. Otherwise nothing.

        A prompt has thousands of tokens, and decoding the neighbours of each takes long.
        """
        shown = ["" if token in self.texts.special else self.texts.alone(token) for token in tokens]
        joined = "".join(shown)
        if self.tokens or _UNFINISHED in joined or joined != self.texts.together(tokens):
            return []
        *offsets, self.offset = accumulate(map(len, shown), initial=0)
        self.base = self.offset
        self.tokens, self.whole = tokens[-1:], 1
        return offsets

    def _pass(self, token: int) -> int:
        """Where a token begins. A character of several tokens begins at the first of them."""
        start, before = self.offset, self.texts.together(self.tokens[: self.whole])
        self.tokens.append(token)
        new = self.texts.together(self.tokens)[len(before) :]
        unfinished = len(new) - len(new.rstrip(_UNFINISHED))
        self.offset = self.base + len(new)
        if 0 < unfinished < _LONGEST_CHARACTER:  # a token may end one character and begin the next
            self.offset -= unfinished
        else:
            # The last token stays: some tokenizers decode a token otherwise where none stands before it.
            self.base, self.tokens, self.whole = self.offset, self.tokens[-1:], 1
        return start
