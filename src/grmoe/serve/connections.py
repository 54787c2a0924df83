"""Connections that give way: a client that sends nothing must not keep others out.

uvicorn counts idle connections like busy ones, answers all with 503 when there are too many, and waits for headers
without end. This protocol has a deadline for headers. When a connection too many arrives, it closes the one that has
been silent longest. Those with a whole request stay: they are computed, or wait in the engine's own queue.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from grmoe.serve.options import Options

_KEEP_ALIVE = 30  # seconds between two requests
_READ = 1 << 14  # bytes at a time
# Bytes beyond the limit that a client may still send after its answer: closing before it reads loses the answer.
_ON_ITS_WAY = 8 << 20
_SPARE = 32  # connections beyond the limit, so that /health is answered when all are busy


class Config(uvicorn.Config):
    """uvicorn's settings for these options."""

    def __init__(self, app: ASGIApp, options: Options) -> None:
        super().__init__(
            app,
            http=Connection,
            ws="none",
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE,
            server_header=False,
        )
        self.options = options


class Connection(H11Protocol):
    """One connection: it ends when its headers take too long, or when it is silent and others need its place."""

    def __init__(self, config: Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.options = config.options
        self.heard = time.monotonic()
        self.timer: asyncio.TimerHandle | None = None
        self.unread = 0  # bytes of a body after its answer

    @property
    def busy(self) -> bool:
        """Whether a whole request has arrived and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):
            # A body in parts of one byte takes a millisecond per 400 bytes. Other requests have their turn in between.
            transport.max_size = _READ
        self._watch_headers()
        if len(self.connections) <= self.options.connections:
            return
        others = [cast(Connection, other) for other in self.connections if other is not self]
        silent = min((c for c in others if not c.busy), key=lambda c: c.heard, default=None)
        if silent is not None:
            silent.drop()
        elif len(self.connections) > self.options.connections + _SPARE:
            self.drop()

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        super().data_received(data)
        self._watch_headers()
        answered = self.cycle is not None and self.cycle.response_complete
        if not (answered and self.conn.their_state is h11.SEND_BODY):
            self.unread = 0
            return
        # It was answered, such as with 413, and sends on. It may send what is on its way, not more.
        self.unread += len(data)
        if self.unread > self.options.max_body + _ON_ITS_WAY:
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close at once, and do not count any more."""
        self.connections.discard(self)
        self.transport.abort()

    def _watch_headers(self) -> None:
        """Run the timer while headers are incomplete. Between two requests uvicorn has a timer of its own."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self.timer is None:
            self.timer = self.loop.call_later(self.options.header_timeout, self._too_slow)

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _too_slow(self) -> None:
        self.timer = None
        self.drop()
