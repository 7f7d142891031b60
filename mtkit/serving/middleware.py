"""Middleware for every request: metrics, the check of the host name, limits of size and time.

A page of another site can make a browser send requests to a server on the same machine or network. Such a request names
the other site in its header Host (if the site's name leads to the server) or Origin.
"""

import asyncio
import re
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from ipaddress import ip_address
from time import monotonic
from urllib.parse import urlsplit

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtkit.errors import MtkitError
from mtkit.serving.batcher import ServingLimits

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
JOBS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServingMetrics:
    """The counts and times of a server, for Prometheus."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # they would double the number of series
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "mtkit_requests", "Translation requests by the status of their answer.", ["status"], registry=self.registry
        )
        self.strings = Counter("mtkit_strings", "Strings translated.", registry=self.registry)
        self.pieces = Counter("mtkit_source_pieces", "Source pieces translated.", registry=self.registry)
        self.waiting = Gauge("mtkit_waiting_requests", "Requests in the queue.", registry=self.registry)
        self.seconds = Histogram(
            "mtkit_request_seconds", "Seconds of answered requests.", registry=self.registry, buckets=SECONDS
        )
        self.batches = Histogram(
            "mtkit_batch_requests", "Requests decoded together.", registry=self.registry, buckets=JOBS
        )


class Hosts:
    """The names by which clients may call a server."""

    def __init__(self, host: str, bound: str, others: Collection[str] = ()) -> None:
        """`bound` is the IP address of the name or address `host`; `*` among the others allows any name.

        A server that listens at all addresses may be called by any IP address and by the machine's name.
        The others may have a scheme and a port, which are ignored. Raises: MtkitError for one that is no name.
        """
        address = ip_address(bound.partition("%")[0])
        self._any = "*" in others
        self._names = {_host_name(host), _host_name(bound)}
        for other in () if self._any else others:
            try:
                self._names.add(_host_name(other))
            except ValueError as error:
                raise MtkitError(f"--allow-host '{other}' is no host name; give one such as mt.example.com") from error
        self._any_address = address.is_unspecified
        if address.is_unspecified or address.is_loopback:
            self._names |= {"localhost", "127.0.0.1", "::1"}
        if address.is_unspecified:
            self._names.add(socket.gethostname().lower())

    def refusal(self, headers: Mapping[str, str]) -> str | None:
        """The reason to refuse a request with these headers; None if it names this server, or no server."""
        for header in () if self._any else ("host", "origin"):
            if header in headers and not self._is_own(headers[header]):
                named = headers[header][:80]
                return f"{header.title()} '{named}' is no name of this server; start it with --allow-host NAME"
        return None

    def _is_own(self, address: str) -> bool:
        try:
            name = _host_name(address)
            return name in self._names or (self._any_address and bool(ip_address(name)))
        except ValueError:  # no name, or no IP address
            return False


def _host_name(address: str) -> str:
    """The name, in ASCII, or IP address of an address as in Host, in Origin or typed. Raises: ValueError for none."""
    with suppress(ValueError):
        return str(ip_address(address.strip("[]")))
    name = urlsplit(address if "//" in address else f"//{address}").hostname or ""
    name = name.rstrip(".").encode("idna").decode()
    if not re.fullmatch(r"[\w.:-]+", name):
        raise ValueError
    return name


class Entrance:
    """Refuses requests that name another server (403), and measures translation requests."""

    def __init__(self, app: ASGIApp, metrics: ServingMetrics, hosts: Hosts | None) -> None:
        self._app, self._metrics, self._hosts = app, metrics, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = monotonic()
        status: int | None = None

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        refusal = self._hosts and self._hosts.refusal(Headers(scope=scope))
        try:
            app = JSONResponse({"error": refusal}, 403) if refusal else self._app
            await app(scope, receive, send_and_note_status)
        except asyncio.CancelledError:  # a second Ctrl-C, or the time to stop is over
            if status is not None:
                raise
            await JSONResponse({"error": "the server stops"}, 503)(scope, receive, send_and_note_status)
        finally:
            if scope["path"] == "/translate":
                self._metrics.requests.labels(status or 500).inc()
                self._metrics.seconds.observe(monotonic() - started)


class BodyLimit:
    """Refuses a body that is too large (413) without keeping it, and a body that arrives too slowly (408)."""

    def __init__(self, app: ASGIApp, limits: ServingLimits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and counts its bytes as they arrive."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        largest, seconds = self._limits.bytes, self._limits.seconds
        size = 0
        until: float | None = asyncio.get_running_loop().time() + seconds

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            return message

        async def limited() -> Message:
            nonlocal until
            try:
                async with asyncio.timeout_at(until):
                    message = await counted()
                    while size > largest and message.get("more_body"):  # a client that still sends reads no answer
                        message = await counted()
            except TimeoutError as error:
                late = f"the request did not arrive whole within {seconds:g} seconds"
                raise HTTPException(408, late, {"Connection": "close"}) from error
            if not message.get("more_body"):
                until = None  # only the client's disconnect follows, at any time
            if size > largest:
                raise HTTPException(413, f"the request is larger than {largest:,} bytes")
            return message

        await self._app(scope, limited, send)
