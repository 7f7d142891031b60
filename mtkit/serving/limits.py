"""What a server takes at most, of a request and of all that wait.

The host names by which clients may call a server.

A page of another site can make a browser send requests to a server on the same machine or network. Such a request names
the other site in its header Host (if the site's name leads to the server) or Origin.

Connections of clients: their maximum number, and the maximum time for each phase of a request.
"""

import asyncio
import logging
import resource
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from math import inf
from time import monotonic
from typing import cast
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol


@dataclass(frozen=True)
class ServingLimits:
    """The limits of a server."""

    wait: float = 5.0
    """Milliseconds for which the first request of a batch waits for others."""
    pieces: int = 4096
    """Source pieces of the requests that are decoded together."""
    queue: int = 256
    """Requests that wait; a further one is refused (503)."""
    strings: int = 256
    """Strings of a request."""
    characters: int = 20_000
    """Characters of all strings of a request."""
    seconds: float = 60.0
    """Seconds until a request is given up that is not whole (408), and after that one that has no answer (504)."""

    connections: int = 1000
    """Open connections, and at most half of the files that the process may open."""

    @property
    def share(self) -> int:
        """Source pieces of one request in a batch; a line that has more is split."""
        return max(1, min(1024, self.pieces // 4))

    @property
    def header_seconds(self) -> float:
        """Seconds in which the header of a request must arrive, from the connection or the previous answer on."""
        return min(10.0, self.seconds)

    @property
    def bytes(self) -> int:
        """Bytes of the body of a request: each character may be escaped as 12 bytes of JSON."""
        return 12 * self.characters + 16 * self.strings + 4096


class Hosts:
    """The address that a server listens at, and other names of the server."""

    def __init__(self, host: str, bound: str, others: Iterable[str] = ()) -> None:
        """`bound` is the IP address of the name or address `host`; `*` among the others stands for every name.

        A server that listens at all addresses is called by any IP address or by the machine's name.
        """
        address = ip_address(bound.partition("%")[0])
        self._names = {each.lower().strip("[]").rstrip(".") for each in (host, bound, *others)}
        self._any_address = address.is_unspecified
        if address.is_unspecified or address.is_loopback:
            self._names |= {"localhost", "127.0.0.1", "::1"}
        if address.is_unspecified:
            self._names.add(socket.gethostname().lower())

    def refusal(self, headers: Mapping[str, str]) -> str | None:
        """The reason to refuse a request with these headers; None if it names this server, or no server."""
        for header, prefix in (("host", "//"), ("origin", "")):
            if header in headers and not self._is_own(prefix + headers[header]):
                named = headers[header][:80]
                return f"{header.title()} '{named}' is no name of this server; start it with --allow-host NAME"
        return None

    def _is_own(self, address: str) -> bool:
        if "*" in self._names:
            return True
        try:
            name = (urlsplit(address).hostname or "").rstrip(".")
        except ValueError:
            return False
        return bool(name) and (name in self._names or (self._any_address and _is_address(name)))


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


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
