"""The server process: its socket, uvicorn with limits of connections, and a clean end on Ctrl-C and SIGTERM."""

import asyncio
import logging
import math
import resource
import socket
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from types import FrameType
from typing import cast

import uvicorn
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from mtkit.errors import MtkitError
from mtkit.process import signals_to
from mtkit.serving.app import make_app
from mtkit.serving.batcher import ServingLimits
from mtkit.serving.middleware import Hosts
from mtkit.serving.service import Service, TextPart, TranslationJob
from mtkit.terminal import Say

SAME_SECONDS = 2.0
"""A Ctrl-C this soon after the first signal is the same one: launchers signal a process and its group."""

UPLOAD_SECONDS = 5.0
"""Seconds that clients have for the rest of their requests' bodies after a signal."""

REPEAT_SECONDS = 60.0
"""Seconds for which the log does not repeat a message."""

FULL = JSONResponse(
    {"error": "the server works on as many requests as it may; try again later"},
    503,
    {"Retry-After": "1", "Connection": "close"},
)
"""The answer to a request over a connection above the maximum."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at the address; port 0 is a free one. Raises: MtkitError if it cannot."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, TypeError, UnicodeError) as error:  # the last two for what is no host name
        reason = getattr(error, "strerror", None) or "no such host"
        raise MtkitError(f"cannot serve at {host}, port {port}: {reason}; choose another --host or --port") from error


def serve(service: Service, limits: ServingLimits, hosts: Hosts, *, host: str, port: int, say: Say) -> None:
    """Serves until a signal; requests in work are answered first. Port 0 is a free one; `say` gets the address.

    Raises: MtkitError if the server cannot listen at the address.
    """
    first = TranslationJob((TextPart(".", 0),), service.directions[0], 1, 1)
    service.work([first])  # loads now what is loaded at first use
    http = Connection.limited(limits)
    with listen(host, port) as listener:
        config = uvicorn.Config(
            make_app(service, limits, hosts),
            http=http,
            ws="none",
            backlog=max(8, http.most // 4),  # asyncio accepts that many at once, before it closes one of them
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=math.ceil(2 * limits.seconds) + 1,  # the request to arrive, and to be answered
        )
        brief = BriefLog()
        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).addFilter(brief)
        address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/"
        server = _Server(config)
        # from the first moment in which clients may come until the process has ended in order: repeated signals of a
        # launcher must not give it another exit code
        with signals_to(server.handle_exit, ignored_afterwards=True):
            say(f"serving {', '.join(service.directions)} at {address} (Ctrl-C stops it)")
            server.run(sockets=[listener])
    say("stopped")


class _Server(uvicorn.Server):
    """Shuts down after a signal, instead of raising it once more; a second Ctrl-C, a while later, ends at once."""

    _since = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self._since = monotonic()
        elif monotonic() - self._since < SAME_SECONDS:
            return
        super().handle_exit(sig, frame)
        if self.force_exit:  # uvicorn would log the cancelled tasks' tracebacks
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Nothing: `serve` has set the handlers before."""
        return nullcontext()


class Connection(H11Protocol):
    """uvicorn's HTTP connection with deadlines, and with a maximum number of open connections.

    If all are open, a new connection replaces the one that has waited longest for bytes of its client. If the server
    works on the requests of all, the request of the new one gets 503.
    """

    most = 8
    """Maximum open connections."""
    header_seconds = seconds = 10.0
    """Maximum seconds for a request's header, and for each of its body, its answer and the transfer of the answer."""
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
        """Opens the connection; if there are too many, it replaces another."""
        super().connection_made(transport)
        self._expect(self.header_seconds)
        others = [cast(Connection, other) for other in self.connections if other is not self]
        others = [other for other in others if not other.transport.is_closing()]
        if len(others) < self.most:
            return
        idle = [other for other in others if other.waits_for_client]
        if idle:
            min(idle, key=lambda other: other.since).transport.abort()
        else:
            self.app = FULL

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the connection."""
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def handle_events(self) -> None:
        """Handles what has arrived; a request whose header is complete gets a new deadline."""
        previous = self.cycle
        super().handle_events()
        if self.cycle is not previous:
            self._expect(3 * self.seconds)

    def on_response_complete(self) -> None:
        """Waits for the next request, and for the client to read the answer."""
        self._expect(self.seconds if self.transport.get_write_buffer_size() else self.header_seconds)
        super().on_response_complete()

    def shutdown(self) -> None:
        """Ends the connection after its current answer, or if the current request does not arrive soon."""
        super().shutdown()
        self.loop.call_later(UPLOAD_SECONDS, self._end_upload)

    def _end_upload(self) -> None:
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete:
            self.transport.abort()

    @property
    def waits_for_client(self) -> bool:
        """Whether the server has nothing to do for the connection until more bytes arrive."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _should_upgrade(self) -> bool:
        """Serves HTTP to a client that requests another protocol; uvicorn would log advice to install one."""
        return False

    def _expect(self, seconds: float) -> None:
        """Begins a phase with this maximum duration."""
        if self._deadline is not None:
            self._deadline.cancel()
        self.since = self.loop.time()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)


class BriefLog(logging.Filter):
    """Removes repeated messages, and the tracebacks of mtkit's and the system's errors, such as too many open files."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the record."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, OSError | MtkitError):
            message = record.getMessage().partition("\n")[0]
            record.msg, record.args, record.exc_info = f"{message}: {error}", (), None
        key, now = (record.getMessage(), repr(error)), monotonic()
        if now - self._logged.get(key, -math.inf) < REPEAT_SECONDS:
            return False
        if len(self._logged) > 100:
            self._logged.clear()
        self._logged[key] = now
        return True
