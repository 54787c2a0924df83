"""The HTTP side: routes, checks, errors in OpenAI's form, one log line per request."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from grmoe.model import GrmoeConfig
from grmoe.routing import LayerNumbers
from grmoe.serve.answer import Answer, error_body, to_json
from grmoe.serve.answer_text import AnswerText
from grmoe.serve.batching import Sequence
from grmoe.serve.engine import Engine, Event, Job, Refused
from grmoe.serve.metrics import Metrics
from grmoe.serve.options import Options
from grmoe.serve.requests import ChatRequest, CompletionRequest, Invalid, Request, parse
from grmoe.serve.sampling import TokenSampler

log = logging.getLogger("grmoe.serve")
_DEFAULT_TOKENS = 16  # of a completion, OpenAI's default; a chat answer may be as long as allowed


@dataclass(kw_only=True)
class Service:
    """A model with its engine, and the routes that answer requests."""

    name: str
    engine: Engine
    tokenizer: Any
    options: Options
    metrics: Metrics = field(default_factory=Metrics)
    started: int = field(default_factory=lambda: int(time.time()))

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
            self.options.check_alpha(alpha)
            return tuple(n._replace(alpha=alpha) for n in self.config.layer_numbers(None)), None
        budget = self.config.budget if budget is None else budget
        numbers = tuple(self.config.layer_numbers(budget))
        return numbers, budget

    def _check_policy(self, budget: float | None) -> None:
        """A threshold or a dense gate is another rule than a budget: one server has one of them."""
        used = self.engine.generator.routers[0].selection
        wanted = self.config.router_policy(budget)
        if wanted is not None and type(wanted) is not type(used):
            rule = f"selection {self.config.selection!r}"
            raise Invalid(
                f"budget and {rule} cannot be served together; start with or without --budget", "budget"
            )

    # -- requests ----------------------------------------------------------------------------------------------

    async def completions(self, http: HttpRequest) -> ASGIApp:
        request = parse(await self._body(http), CompletionRequest)
        prompt = request.prompt
        if isinstance(prompt, str):
            ids = await asyncio.to_thread(self._encode, prompt)
        else:
            ids = prompt
            if any(not 0 <= token < self.config.vocab_size for token in ids):
                raise Invalid(f"prompt: tokens must be between 0 and {self.config.vocab_size - 1}", "prompt")
        return self._answer(http, request, "prompt", ids, request.max_tokens or _DEFAULT_TOKENS)

    async def chat(self, http: HttpRequest) -> ASGIApp:
        request = parse(await self._body(http), ChatRequest)
        if not self.tokenizer.chat_template:
            raise Invalid("the model's tokenizer has no chat template; use /v1/completions", "messages")
        messages = [message.plain() for message in request.messages]
        ids = await asyncio.to_thread(self._encode_chat, messages)
        room = max(1, self.context - len(ids))
        asked = request.max_completion_tokens or request.max_tokens
        return self._answer(
            http, request, "messages", ids, asked or min(room, self._token_limit(self.options.max_tokens))
        )

    def _answer(self, http: HttpRequest, request: Request, field: str, ids: list[int], tokens: int) -> Answer:
        """Check what only the model can tell, and queue the request."""
        if request.model is not None and request.model != self.name:
            message = f"model must be {self.name!r}, got {request.model!r:.60}"
            raise Invalid(message, "model", 404, "model_not_found")
        if request.alpha is not None and request.budget is not None:
            raise Invalid("give alpha or budget, not both: a budget sets α too", "budget")
        try:
            numbers, budget = self.numbers(request.alpha, request.budget)
        except ValueError as error:
            raise Invalid(str(error), "alpha" if request.budget is None else "budget") from error
        self._check_policy(budget)
        max_prompt = self._token_limit(self.options.max_prompt)
        max_tokens = self._token_limit(self.options.max_tokens)
        if not ids:
            raise Invalid(f"{field} must hold at least one token", field)
        if len(ids) > max_prompt:
            raise Invalid(f"{field} must have at most {max_prompt} tokens, got {len(ids)}", field)
        if tokens > max_tokens:
            raise Invalid(f"max_tokens must be at most {max_tokens}, got {tokens}", "max_tokens")
        if len(ids) + tokens > self.context:
            message = f"{field} and max_tokens must fit into {self.context} tokens, got {len(ids)} + {tokens}"
            raise Invalid(message, "max_tokens", code="context_length_exceeded")
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        job = Job(
            sequence=Sequence(
                prompt=ids, numbers=numbers, budget=budget, sampler=TokenSampler(request.sampling())
            ),
            text=AnswerText(self.tokenizer, request.stops()),
            max_tokens=tokens,
            stream=bool(request.stream),
            deliver=lambda event: loop.call_soon_threadsafe(events.put_nowait, event),  # type: ignore[arg-type]
        )
        self.engine.submit(job)
        chat = isinstance(request, ChatRequest)
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        return Answer(
            job=job,
            events=events,
            request=request,
            chat=chat,
            head={"id": name, "created": int(time.time()), "model": self.name},
            timeout=self.options.timeout,
            cancel=self.engine.cancel,
            done=lambda status, outcome: self._log(http, status, job, outcome),
        )

    def _token_limit(self, limit: int | None) -> int:
        """At most the context minus one token, which is left for the other of prompt and answer."""
        return min(limit or self.context - 1, self.context - 1)

    def _encode(self, prompt: str) -> list[int]:
        ids: list[int] = self.tokenizer(prompt).input_ids
        return ids

    def _encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        try:
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # templates raise errors of many kinds
            raise Invalid(f"messages do not fit the chat template: {error}", "messages") from error
        found: list[int] = ids["input_ids"]
        return found

    async def _body(self, http: HttpRequest) -> bytes:
        """The body, unless it is too long or too slow."""
        limit, timeout, body = self.options.max_body, self.options.timeout, bytearray()
        too_long = Invalid(f"the body must have at most {limit} bytes", status=413)
        try:
            if int(http.headers.get("content-length", 0)) > limit:
                raise too_long
            async with asyncio.timeout(timeout):
                async for chunk in http.stream():
                    body += chunk
                    if len(body) > limit:
                        raise too_long
        except TimeoutError as error:
            raise Invalid(f"the body took more than {timeout:g} s", status=408) from error
        return bytes(body)

    # -- the other routes --------------------------------------------------------------------------------------

    async def models(self, http: HttpRequest) -> ASGIApp:
        low, high = self.options.alpha_range
        about = {
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "grmoe",
            "max_model_len": self.context,
            "alpha": {"default": [n.alpha for n in self.config.numbers], "low": low, "high": high},
            "budget": None,
        }
        if self.config.budget_range is not None:
            fewest, most = self.config.budget_range
            about["budget"] = {"default": self.config.budget, "low": fewest, "high": most}
        return _json(200, {"object": "list", "data": [about]})

    async def health(self, http: HttpRequest) -> ASGIApp:
        """Whether the process can still compute."""
        ok = self.engine.alive
        return _json(200 if ok else 503, {"status": "ok" if ok else "the engine has stopped"})

    async def ready(self, http: HttpRequest) -> ASGIApp:
        """Whether new requests are taken."""
        why = self.engine.closing if self.engine.alive else "the engine has stopped"
        return _json(200 if why is None else 503, {"status": why or "ready"})

    async def show_metrics(self, http: HttpRequest) -> ASGIApp:
        engine = self.engine
        text = self.metrics.text(
            running=len(engine.running), waiting=len(engine.waiting), recomputed=engine.generator.recomputed
        )
        return Response(text, media_type="text/plain; version=0.0.4")

    def _log(self, http: HttpRequest, status: int, job: Job | None, outcome: str) -> None:
        what = f"{http.method} {quote(http.url.path)} {status} {outcome}"
        if job is None:
            log.info(what)
            self.metrics.add("refused_total", status=str(status))
            return
        sequence = job.sequence
        labels: dict[str, Any] = {"alpha": show_alphas(sequence.alphas)}
        if sequence.budget is not None:
            labels = {"budget": f"{sequence.budget:g}"}
        setting = " ".join(f"{name}={value}" for name, value in labels.items())
        prompt, tokens, experts = len(sequence.prompt), len(sequence.tokens), sequence.experts_per_token
        shown = "" if experts is None else f" experts={experts:.3f}"
        seconds = time.monotonic() - job.arrived
        log.info(f"{what} {setting} prompt={prompt} tokens={tokens}{shown} {seconds:.3f}s")
        self.metrics.add("requests_total", **labels, outcome=outcome)
        self.metrics.add("prompt_tokens_total", prompt, **labels)
        self.metrics.add("completion_tokens_total", tokens, **labels)
        self.metrics.add("experts_total", sequence.experts, **labels)
        self.metrics.add("routed_tokens_total", sequence.length, **labels)

    def protected(
        self, route: Callable[[HttpRequest], Awaitable[ASGIApp]]
    ) -> Callable[[HttpRequest], Awaitable[ASGIApp]]:
        """A route that checks the key and turns refusals into OpenAI's form."""

        async def checked(http: HttpRequest) -> ASGIApp:
            try:
                self._check_key(http)
                return await route(http)
            except Invalid as error:
                self._log(http, error.status, None, error.param or "refused")
                return _json(error.status, error_body(error.message, error.status, error.param, error.code))
            except Refused as error:
                status = error.failure.status
                self._log(http, status, None, "busy" if status == 429 else "closing")
                return _json(status, error_body(error.failure.message, status), {"retry-after": "1"})
            except ClientDisconnect:
                self._log(http, 499, None, "gone")
                return Response(status_code=400)  # the client does not read it

        return checked

    def _check_key(self, http: HttpRequest) -> None:
        if self.options.api_key is None:
            return
        given = http.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.options.api_key}".encode()):
            raise Invalid("the Authorization header must be `Bearer KEY` with the server's key", status=401)


def build(service: Service) -> Starlette:
    protected = service.protected
    return Starlette(
        routes=[
            Route("/v1/completions", protected(service.completions), methods=["POST"]),
            Route("/v1/chat/completions", protected(service.chat), methods=["POST"]),
            Route("/v1/models", protected(service.models)),
            Route("/metrics", protected(service.show_metrics)),
            Route("/health", service.health),
            Route("/ready", service.ready),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _bug},
    )


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    """Unknown route or method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {http.method} {quote(http.url.path)}"
    return _json(error.status_code, error_body(message, error.status_code), dict(error.headers or {}))


async def _bug(http: HttpRequest, error: Exception) -> Response:
    return _json(500, error_body(f"{type(error).__name__} in the server", 500))


def _json(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(body), status, headers, media_type="application/json")


def show_alphas(alphas: Iterable[float]) -> str:
    """One number where all layers have the same α."""
    return ",".join(f"{a:g}" for a in dict.fromkeys(alphas))
