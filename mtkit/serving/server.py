"""The process: a socket, uvicorn, and a clean end on Ctrl-C and SIGTERM."""

import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from types import FrameType

import uvicorn

from mtkit.errors import MtkitError
from mtkit.serving.app import make_app
from mtkit.serving.limits import BriefLog, Connection, Hosts, ServingLimits
from mtkit.serving.service import Service, Strings, Unit

SAME_SECONDS = 2.0
"""A Ctrl-C this soon after the first signal is the same one: launchers signal a process and its group."""


class _Server(uvicorn.Server):
    """Ends in order after a signal, instead of raising it once more; a second Ctrl-C, a while later, ends at once."""

    _since = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self._since = monotonic()
        elif monotonic() - self._since < SAME_SECONDS:
            return
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def serve(
    service: Service,
    limits: ServingLimits,
    *,
    host: str,
    port: int,
    say: Callable[[str], object],
    names: Sequence[str] = (),
) -> None:
    """Serve until a signal; requests in work are answered first. Port 0 is a free one; `say` gets the address.

    Clients may call the server by its address and by `names` (`Hosts`).

    Raises: MtkitError where the address cannot be taken.
    """
    service.work([Strings((Unit(".", 0),), service.directions[0], 1, 1)])  # what is loaded at first use is loaded now
    http = Connection.limited(limits)
    backlog = max(8, http.most // 4)  # asyncio accepts that many at once, before it closes one of them
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        taken = socket.create_server((host, port), family=family, backlog=backlog)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MtkitError(f"cannot serve at {host}, port {port}: {reason}; choose another --host or --port") from error
    with taken:
        config = uvicorn.Config(
            make_app(service, limits, Hosts(host, taken.getsockname()[0], names)),
            http=http,
            ws="none",
            backlog=backlog,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=math.ceil(2 * limits.seconds) + 1,  # the request to arrive, and to be answered
        )
        brief = BriefLog()
        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).addFilter(brief)
        shown = f"[{host}]" if ":" in host else host
        say(f"serving {', '.join(service.directions)} at http://{shown}:{taken.getsockname()[1]}/ (Ctrl-C stops it)")
        _Server(config).run(sockets=[taken])
    say("stopped")
