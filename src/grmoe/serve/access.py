"""Who may ask: host names, web pages, the content type, and how many at a time. Checked before any route.

A web page can send requests to a server on 127.0.0.1. Three checks keep pages out that were not invited:

- `Host` must be a name of this server. A page that points its own name at 127.0.0.1 has another one.
- `Origin`, which browsers send with requests of pages, must be allowed.
- A POST must be JSON. Browsers ask first (CORS) before a page may send JSON elsewhere.

`/health` and `/ready` are answered always: they take nothing and tell nothing else.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from grmoe.serve.errors import Invalid, error_body, shorten, to_json
from grmoe.serve.options import Options

OPEN = ("/health", "/ready")
_LOCAL = {"localhost", "127.0.0.1", "::1"}


class Access:
    """Refuses what must not reach the routes. Everything else goes on to them."""

    def __init__(
        self,
        app: ASGIApp,
        options: Options,
        crowded: Callable[[], bool],
        refused: Callable[[Scope, Invalid], None],
    ) -> None:
        """crowded: whether there are too many connections. refused: called with each refusal, for the log."""
        self.crowded, self.refused = crowded, refused
        self.origins = set(options.allowed_origins)
        self.hosts = _LOCAL | {host.lower() for host in options.allowed_hosts} | {options.host.lower()}
        # On every network the address is not known. An address as such is safe: no page can have it as its name.
        self.any_address = options.host in ("0.0.0.0", "::")
        if self.any_address:
            self.hosts.add(socket.gethostname().lower())
        self.app = app
        if self.origins:
            self.app = CORSMiddleware(
                app,
                allow_origins=list(self.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type"],
                max_age=600,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            try:
                self.check(scope)
            except Invalid as error:
                self.refused(scope, error)
                body = error_body(error.message, error.status, error.param, error.code)
                response = Response(to_json(body), error.status, media_type="application/json")
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def check(self, scope: Scope) -> None:
        """Raise `Invalid` unless the headers are those of a client that may ask."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._is_allowed(host):
            name = shorten(_without_port(host))
            raise Invalid(f"Host {name} is not served here; allow it with --allow-host", status=403)
        origin = headers.get("origin")
        if origin is not None and not self.origins & {origin, "*"}:
            raise Invalid(
                f"Origin {shorten(origin)} is not allowed; allow it with --allow-origin", status=403
            )
        if self.crowded():
            raise Invalid("all connections are in use; try again later", status=503)
        if scope["method"] == "POST":
            kind = headers.get("content-type", "")
            if kind.partition(";")[0].strip().lower() != "application/json":
                raise Invalid(f"Content-Type must be application/json, got {shorten(kind)}", status=415)

    def _is_allowed(self, host: str) -> bool:
        name = _without_port(host).lower()
        if "*" in self.hosts or name in self.hosts:
            return True
        return self.any_address and _is_address(name)


def _without_port(host: str) -> str:
    """The name in a Host header: "[::1]:8000" → "::1"."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
