"""A server in a thread of this process."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from mtkit.serving.app import make_app
from mtkit.serving.batcher import ServingLimits
from mtkit.serving.server import Connection


@contextmanager
def served(service: Any, limits: ServingLimits) -> Iterator[int]:
    """The port of a server in a thread of this process."""
    app = make_app(service, limits)
    config = uvicorn.Config(app, http=Connection.limited(limits), ws="none", log_level="critical", access_log=False)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
        thread.start()
        try:
            yield taken.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(20)
