"""The HTTP side: routes, errors in OpenAI's form, one log line per request."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from grmoe.serve.access import Access
from grmoe.serve.answer import Answer, one_alpha
from grmoe.serve.engine import Event, Job, Refused
from grmoe.serve.errors import Invalid, cut, error_body, shorten, to_json
from grmoe.serve.metrics import Metrics
from grmoe.serve.options import Options
from grmoe.serve.requests import ChatRequest, CompletionRequest, Request, parse
from grmoe.serve.service import Service

log = logging.getLogger("grmoe.serve")


class Routes:
    """What each address does."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.metrics = Metrics()

    @property
    def options(self) -> Options:
        return self.service.options

    # -- requests ----------------------------------------------------------------------------------------------

    async def completions(self, http: HttpRequest) -> ASGIApp:
        request = parse(await self._body(http), CompletionRequest)
        return await self._answer(http, request, self.service.completion_jobs)

    async def chat(self, http: HttpRequest) -> ASGIApp:
        request = parse(await self._body(http), ChatRequest)
        return await self._answer(http, request, self.service.chat_jobs)

    async def _answer(
        self, http: HttpRequest, request: Any, make_jobs: Callable[..., Awaitable[list[Job]]]
    ) -> Answer:
        """Queue the answers of a request."""
        arrived, events = asyncio.get_running_loop().time(), asyncio.Queue[tuple[int, Event]]()
        jobs = await make_jobs(request, events)
        self.service.engine.submit(jobs)
        chat = isinstance(request, ChatRequest)
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        return Answer(
            jobs=jobs,
            events=events,
            request=request,
            chat=chat,
            head={"id": name, "created": int(time.time()), "model": self.service.name},
            texts=self.service.texts,
            timeout=self.options.timeout,
            arrived=arrived,
            cancel=self.service.engine.cancel,
            done=lambda status, outcome: self._log_answer(http, request, jobs, status, outcome),
        )

    async def _body(self, http: HttpRequest) -> bytes:
        """The body, unless it is too long or too slow."""
        limit, timeout, body = self.options.max_body, self.options.timeout, bytearray()
        too_long = Invalid(f"the body must have at most {limit} bytes", status=413)
        try:
            said = http.headers.get("content-length", "0")
            if not said.isdecimal() or len(said) > 18 or int(said) > limit:
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
        return _json(200, {"object": "list", "data": [self._about()]})

    async def model(self, http: HttpRequest) -> ASGIApp:
        asked = http.path_params["name"]
        if asked != self.service.name:
            message = f"model must be {self.service.name!r}, got {shorten(asked)}"
            raise Invalid(message, "model", 404, "model_not_found")
        return _json(200, self._about())

    def _about(self) -> dict[str, Any]:
        """The model: what it is called, how long its context is, and which α and budgets a request may name."""
        (low, high), config = self.options.alpha_range, self.service.config
        budget = None
        if config.budget_range is not None:
            fewest, most = config.budget_range
            budget = {"default": config.budget, "low": fewest, "high": most}
        return {
            "id": self.service.name,
            "object": "model",
            "created": self.service.started,
            "owned_by": "grmoe",
            "max_model_len": self.service.context,
            "alpha": {"default": one_alpha(n.alpha for n in config.numbers), "low": low, "high": high},
            "budget": budget,
        }

    async def health(self, http: HttpRequest) -> ASGIApp:
        """Whether the process can still compute."""
        ok = self.service.engine.alive
        return _json(200 if ok else 503, {"status": "ok" if ok else "the engine has stopped"})

    async def ready(self, http: HttpRequest) -> ASGIApp:
        """Whether new requests are taken."""
        why = self.service.engine.closing if self.service.engine.alive else "the engine has stopped"
        return _json(200 if why is None else 503, {"status": why or "ready"})

    async def show_metrics(self, http: HttpRequest) -> ASGIApp:
        engine = self.service.engine
        text = self.metrics.text(
            running=len(engine.running),
            waiting=len(engine.waiting),
            connections=self.service.connections(),
            recomputed=engine.generator.recomputed,
        )
        return Response(text, media_type="text/plain; version=0.0.4")

    # -- log and refusals --------------------------------------------------------------------------------------

    def refused(self, scope: Scope, error: Invalid) -> None:
        self._log_refusal(scope, error.status, error.param or "refused")

    def _log_refusal(self, scope: Scope, status: int, outcome: str) -> None:
        log.info(f"{_what(scope)} {status} {quote(outcome)}")
        self.metrics.add("refused_total", status=str(status))

    def _log_answer(
        self, http: HttpRequest, request: Request, jobs: list[Job], status: int, outcome: str
    ) -> None:
        sequences = [job.sequence for job in jobs]
        labels: dict[str, Any] = {"alpha": show_alphas(sequences[0].alphas)}
        if sequences[0].budget is not None:
            labels = {"budget": f"{sequences[0].budget:g}"}
        setting = " ".join(f"{name}={value}" for name, value in labels.items())
        prompt = sum(len(s.prompt) for s in sequences[:: request.n or 1])
        tokens, routed = sum(len(s.tokens) for s in sequences), sum(s.length for s in sequences)
        experts = sum(s.experts for s in sequences)
        shown = f" choices={len(jobs)}" if len(jobs) > 1 else ""
        shown += f" experts={experts / routed:.3f}" if routed else ""
        seconds = time.monotonic() - jobs[0].arrived
        log.info(
            f"{_what(http.scope)} {status} {outcome} {setting} prompt={prompt} tokens={tokens}{shown} {seconds:.3f}s"
        )
        self.metrics.add("requests_total", **labels, outcome=outcome)
        self.metrics.add("prompt_tokens_total", prompt, **labels)
        self.metrics.add("completion_tokens_total", tokens, **labels)
        self.metrics.add("experts_total", experts, **labels)
        self.metrics.add("routed_tokens_total", routed, **labels)

    def protected(
        self, route: Callable[[HttpRequest], Awaitable[ASGIApp]]
    ) -> Callable[[HttpRequest], Awaitable[ASGIApp]]:
        """A route that checks the key and turns refusals into OpenAI's form."""

        async def checked(http: HttpRequest) -> ASGIApp:
            try:
                self._check_key(http)
                return await route(http)
            except Invalid as error:
                self.refused(http.scope, error)
                return _json(error.status, error_body(error.message, error.status, error.param, error.code))
            except Refused as error:
                status = error.failure.status
                self._log_refusal(http.scope, status, "busy" if status == 429 else "closing")
                return _json(status, error_body(error.failure.message, status), {"retry-after": "1"})
            except ClientDisconnect:
                self._log_refusal(http.scope, 499, "gone")
                return Response(status_code=400)  # the client does not read it

        return checked

    def _check_key(self, http: HttpRequest) -> None:
        if self.options.api_key is None:
            return
        given = http.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.options.api_key}".encode()):
            raise Invalid("the Authorization header must be `Bearer KEY` with the server's key", status=401)


def build(service: Service) -> Starlette:
    """The ASGI application of a service."""
    routes = Routes(service)
    protected = routes.protected
    access = Middleware(
        Access,
        options=service.options,
        crowded=lambda: service.connections() > service.options.connections,
        refused=routes.refused,
    )
    app = Starlette(
        routes=[
            Route("/v1/completions", protected(routes.completions), methods=["POST"]),
            Route("/v1/chat/completions", protected(routes.chat), methods=["POST"]),
            Route("/v1/models", protected(routes.models)),
            Route("/v1/models/{name:path}", protected(routes.model)),
            Route("/metrics", protected(routes.show_metrics)),
            Route("/health", routes.health),
            Route("/ready", routes.ready),
        ],
        middleware=[access],
        exception_handlers={HTTPException: _http_error, Exception: _bug},
    )
    app.router.redirect_slashes = False  # a redirect would go to whatever the Host header names
    return app


def _what(scope: Scope) -> str:
    """Method and path of a request, for the log and for messages."""
    return cut(f"{scope['method']} {quote(scope['path'][:200])}", 200)


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    """Unknown route or method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {_what(http.scope)}"
    return _json(error.status_code, error_body(message, error.status_code), dict(error.headers or {}))


async def _bug(http: HttpRequest, error: Exception) -> Response:
    return _json(500, error_body(f"{type(error).__name__} in the server", 500))


def _json(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(body), status, headers, media_type="application/json")


def show_alphas(alphas: Iterable[float]) -> str:
    """One number where all layers have the same α."""
    return ",".join(f"{a:g}" for a in dict.fromkeys(alphas))
