"""Connections of clients: their maximum number, and the maximum time for each phase of a request."""

import asyncio
import logging
import resource
from math import inf
from time import monotonic
from typing import cast

from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from mtkit.serving.limits import ServingLimits

REPEAT_SECONDS = 60.0
"""Seconds for which the log does not repeat a message."""

FULL = JSONResponse(
    {"error": "the server works on as many requests as it may; try again later"},
    503,
    {"Retry-After": "1", "Connection": "close"},
)
"""The answer to a request over a connection that is one too many."""


class Connection(H11Protocol):
    """uvicorn's HTTP connection with deadlines, and with a maximum number of open connections.

    If all are open, a new connection replaces the one that has waited longest for bytes of its client. If the server
    works on the requests of all, the request of the new one gets 503.
    """

    most = 8
    """Open connections, at most."""
    header_seconds = seconds = 10.0
    """Seconds for the header of a request, and for each of its body, its answer and the transfer of the answer."""
    since = 0.0
    """Time at which the present phase began."""
    _deadline: asyncio.TimerHandle | None = None

    @classmethod
    def limited(cls, limits: ServingLimits) -> type["Connection"]:
        """The class with these limits, which leaves half of the files that the process may open to other uses."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = limits.connections if files == resource.RLIM_INFINITY else min(limits.connections, files // 2)
        values = {"most": max(8, most), "header_seconds": limits.header_seconds, "seconds": limits.seconds}
        return type("LimitedConnection", (cls,), values)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Opens the connection, in place of another if there are too many."""
        super().connection_made(transport)
        self._expect(self.header_seconds)
        others = [cast(Connection, each) for each in self.connections if each is not self]
        others = [each for each in others if not each.transport.is_closing()]
        if len(others) < self.most:
            return
        idle = [each for each in others if each.waits_for_client]
        if idle:
            min(idle, key=lambda each: each.since).transport.abort()
        else:
            self.app = FULL

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the connection."""
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def handle_events(self) -> None:
        """Handles what has arrived; a request whose header is whole gets a new deadline."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._expect(3 * self.seconds)

    def on_response_complete(self) -> None:
        """Waits for the next request, and for the client to read the answer."""
        self._expect(self.seconds if self.transport.get_write_buffer_size() else self.header_seconds)
        super().on_response_complete()

    @property
    def waits_for_client(self) -> bool:
        """Whether the server has nothing to do for the connection before more bytes arrive."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _should_upgrade(self) -> bool:
        """Serves HTTP to a client that asks for another protocol; uvicorn would log advice to install one."""
        return False

    def _expect(self, seconds: float) -> None:
        """Begins a phase that may take that long."""
        if self._deadline is not None:
            self._deadline.cancel()
        self.since = self.loop.time()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)


class BriefLog(logging.Filter):
    """Removes repeated messages, and the tracebacks of the system's errors, such as too many open files."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the record."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, OSError):
            message = record.getMessage().partition("\n")[0]
            record.msg, record.args, record.exc_info = f"{message}: {error}", (), None
        key, now = (record.getMessage(), repr(error)), monotonic()
        if now - self._logged.get(key, -inf) < REPEAT_SECONDS:
            return False
        if len(self._logged) > 100:
            self._logged.clear()
        self._logged[key] = now
        return True
