"""A model with its engine: checks of a request that only the model can make, and the jobs that answer it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from grmoe.model import GrmoeConfig
from grmoe.routing import LayerNumbers
from grmoe.serve.answer_text import AnswerText
from grmoe.serve.batching import Sequence
from grmoe.serve.chat import ChatTemplate
from grmoe.serve.engine import Engine, Event, Job
from grmoe.serve.errors import Invalid, shorten
from grmoe.serve.options import Options
from grmoe.serve.requests import ChatRequest, CompletionRequest, Request
from grmoe.serve.sampling import TokenSampler
from grmoe.serve.scores import MAX_ENTRIES, TokenTexts

_DEFAULT_TOKENS = 16  # of a completion, OpenAI's default; a chat answer may be as long as allowed


@dataclass(kw_only=True)
class Service:
    """A model that answers requests."""

    name: str
    engine: Engine
    tokenizer: Any
    options: Options
    template: ChatTemplate | None = None
    connections: Callable[[], int] = lambda: 0
    """How many are open. The server sets it."""
    started: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.tokenizer)

    @property
    def config(self) -> GrmoeConfig:
        return self.engine.generator.model.config

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        length: int = self.config.max_position_embeddings
        return length

    def numbers(
        self, alpha: float | None = None, budget: float | None = None
    ) -> tuple[tuple[LayerNumbers, ...], float | None]:
        """(τ, α and cap of each MoE layer, budget) for a request. Without α and budget: the model's own."""
        if alpha is not None:
            self.config.check_has_dial()
            self.options.check_alpha(alpha)
            return tuple(n._replace(alpha=alpha) for n in self.config.layer_numbers(None)), None
        budget = self.config.budget if budget is None else budget
        numbers = tuple(self.config.layer_numbers(budget))
        return numbers, budget

    def check_policy(self, budget: float | None) -> None:
        """A threshold or a dense gate is another rule than a budget: one server has one of them."""
        used = self.engine.generator.routers[0].selection
        wanted = self.config.router_policy(budget)
        if wanted is not None and type(wanted) is not type(used):
            rule = f"selection {self.config.selection!r}"
            raise Invalid(
                f"budget and {rule} cannot be served together; start with or without --budget", "budget"
            )

    # -- prompts -----------------------------------------------------------------------------------------------

    async def completion_jobs(self, request: CompletionRequest, events: asyncio.Queue[Any]) -> list[Job]:
        """The jobs of a completion: for each prompt, `n` answers."""
        self._check_count(len(request.prompt), request)
        prompts: list[list[int]] = []
        echoes: list[str] = []
        for prompt in request.prompt:
            if isinstance(prompt, str):
                ids, text = await asyncio.to_thread(self._encode, prompt), prompt
            else:
                ids = self._check_tokens(prompt)
                text = await asyncio.to_thread(self.texts.together, ids) if request.echo else ""
            prompts.append(ids)
            echoes += [text] if request.echo else []
        return self._jobs(request, "prompt", prompts, echoes, events)

    async def chat_jobs(self, request: ChatRequest, events: asyncio.Queue[Any]) -> list[Job]:
        """The jobs of a chat: `n` answers."""
        self._check_count(1, request)
        if self.template is None:
            raise Invalid("the model's tokenizer has no chat template; use /v1/completions", "messages")
        text = await self.template.render([message.plain() for message in request.messages])
        ids = await asyncio.to_thread(self._encode, text, add_special_tokens=False)
        return self._jobs(request, "messages", [ids], [], events)

    def _encode(self, text: str, **options: Any) -> list[int]:
        ids: list[int] = self.tokenizer(text, **options).input_ids
        return ids

    def _check_tokens(self, ids: list[int]) -> list[int]:
        last = self.config.vocab_size - 1
        if min(ids) < 0 or max(ids) > last:
            wrong = next(token for token in ids if not 0 <= token <= last)
            raise Invalid(f"prompt: tokens must be between 0 and {last}, got {shorten(wrong)}", "prompt")
        return ids

    # -- limits ------------------------------------------------------------------------------------------------

    def _check_count(self, prompts: int, request: Request) -> None:
        """Before a prompt is encoded: many prompts must not cost much."""
        limit, n = self.options.max_choices, request.n or 1
        if prompts * n > limit:
            field, got = ("n", shorten(n)) if n > 1 else ("prompt", f"{prompts} prompts")
            got = f"{prompts} prompts with n = {got}" if prompts > 1 < n else got
            raise Invalid(f"prompts times n must be at most {limit}, got {got}", field)

    def _token_limit(self, limit: int | None) -> int:
        """At most the context minus one token, which is left for the other of prompt and answer."""
        return min(limit or self.context - 1, self.context - 1)

    def _new_tokens(self, request: Request, longest: int) -> int:
        """Most tokens of an answer after a prompt of this length."""
        asked, limit = request.new_tokens(), self._token_limit(self.options.max_new_tokens)
        if asked is None:
            room = max(1, self.context - longest)
            return min(limit, room if isinstance(request, ChatRequest) else _DEFAULT_TOKENS)
        if asked > limit:
            raise Invalid(f"max_tokens must be at most {limit}, got {shorten(asked)}", "max_tokens")
        if asked == 0 and not getattr(request, "echo", False):
            raise Invalid("max_tokens must be at least 1, got 0; 0 is allowed with echo only", "max_tokens")
        return asked

    def _check_lengths(self, field: str, prompts: list[list[int]], tokens: int) -> None:
        most = self.context - min(tokens, 1)  # with no answer to write, a prompt may fill the context
        longest, limit = max(map(len, prompts)), min(self.options.max_prompt or most, most)
        if not all(prompts):
            raise Invalid(f"{field} must hold at least one token", field)
        if longest > limit:
            raise Invalid(f"{field} must have at most {limit} tokens, got {longest}", field)
        if longest + tokens > self.context:
            message = f"{field} and max_tokens must fit into {self.context} tokens, got {longest} + {tokens}"
            raise Invalid(message, "max_tokens", code="context_length_exceeded")

    # -- jobs --------------------------------------------------------------------------------------------------

    def _jobs(
        self,
        request: Request,
        field: str,
        prompts: list[list[int]],
        echoes: list[str],
        events: asyncio.Queue[tuple[int, Event]],
    ) -> list[Job]:
        """Check what is left, and make one job per answer, those of the first prompt first."""
        if request.model is not None and request.model != self.name:
            message = f"model must be {self.name!r}, got {shorten(request.model)}"
            raise Invalid(message, "model", 404, "model_not_found")
        if request.alpha is not None and request.budget is not None:
            raise Invalid("give alpha or budget, not both: a budget sets α too", "budget")
        try:
            numbers, budget = self.numbers(request.alpha, request.budget)
        except ValueError as error:
            raise Invalid(str(error), "alpha" if request.budget is None else "budget") from error
        self.check_policy(budget)
        tokens = self._new_tokens(request, max(map(len, prompts)))
        self._check_lengths(field, prompts, tokens)
        samplings, alternatives = request.samplings(), request.alternatives
        scored = [len(prompt) if echoes else 0 for prompt in prompts]
        entries = sum(count + tokens for count in scored) * len(samplings) * (1 + (alternatives or 0))
        if alternatives is not None and entries > MAX_ENTRIES:
            raise Invalid(
                f"logprobs must give at most {MAX_ENTRIES} numbers per request, got {entries}: prompts and answers"
                " times n times 1 + logprobs; send fewer prompts",
                "logprobs",
            )
        loop = asyncio.get_running_loop()
        jobs: list[Job] = []
        for i, prompt in enumerate(prompts):
            for sampling in samplings:
                sequence = Sequence(
                    prompt=prompt,
                    numbers=numbers,
                    budget=budget,
                    sampler=TokenSampler(sampling),
                    alternatives=alternatives,
                    score_prompt=bool(echoes),
                    answer=tokens > 0,
                )
                jobs.append(
                    Job(
                        request=request,
                        sequence=sequence,
                        text=AnswerText(self.tokenizer, request.stop),
                        max_tokens=tokens,
                        echo=echoes[i] if echoes else "",
                        stream=bool(request.stream),
                        deliver=partial(_deliver, loop, events, len(jobs)),
                    )
                )
        return jobs


def _deliver(
    loop: asyncio.AbstractEventLoop, events: asyncio.Queue[tuple[int, Event]], index: int, event: Event
) -> None:
    """Send an event of answer `index` from the engine's thread to the event loop."""
    loop.call_soon_threadsafe(events.put_nowait, (index, event))
