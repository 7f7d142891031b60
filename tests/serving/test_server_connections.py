"""Connections: clients that do not send, do not read, or are too many, hold up nobody."""

import asyncio
import errno
import logging
import resource
import signal
import socket
import threading
import time
from contextlib import ExitStack

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from mtkit.errors import MtkitError
from mtkit.serving import server
from mtkit.serving.batcher import ServingLimits
from mtkit.serving.middleware import Entrance, ServingMetrics
from mtkit.serving.server import BriefLog, Connection
from tests.serving.slow import Slow
from tests.serving.threads import served

BODY = b'{"q": "ab", "target": "de"}'
HEADER = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
REQUEST = HEADER % len(BODY) + BODY
UNFINISHED = {"header": REQUEST[:40], "body": REQUEST[:-1]}


def connected(port: int, sent: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=20)
    client.sendall(sent)
    return client


def answer(client: socket.socket) -> bytes:
    """The next answer, whose body is an object of JSON."""
    found = b""
    while not found.endswith(b"}"):
        found += client.recv(65536)
    return found


def rest(client: socket.socket) -> bytes:
    """What the server sends before it closes the connection."""
    try:
        return b"".join(iter(lambda: client.recv(65536), b""))
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("answered", [False, True], ids=["first request", "second request"])
@pytest.mark.parametrize("sent", [b"", REQUEST[:40]], ids=["nothing", "part of a header"])
def test_a_header_that_does_not_arrive_is_given_up(sent: bytes, answered: bool) -> None:
    service = Slow()
    service.go.set()
    with served(service, ServingLimits(wait=0, seconds=0.3)) as port, ExitStack() as clients:
        client = clients.enter_context(connected(port, REQUEST if answered else b""))
        if answered:
            assert answer(client).startswith(b"HTTP/1.1 200 ")
        client.sendall(sent)
        assert rest(client) == b""


@pytest.mark.parametrize("unfinished", UNFINISHED)
def test_a_connection_that_sends_nothing_more_is_replaced(unfinished: str) -> None:
    service = Slow()
    service.go.set()
    with served(service, ServingLimits(wait=0, connections=8)) as port, ExitStack() as clients:
        waiting = [clients.enter_context(connected(port, UNFINISHED[unfinished])) for _ in range(20)]
        with connected(port, REQUEST) as client:
            assert answer(client).startswith(b"HTTP/1.1 200 ")
        assert rest(waiting[0]) == b""
        waiting[-1].sendall(REQUEST[len(UNFINISHED[unfinished]) :])
        assert answer(waiting[-1]).startswith(b"HTTP/1.1 200 ")


def test_no_connection_is_free_while_all_have_work() -> None:
    service = Slow()
    with served(service, ServingLimits(wait=0, connections=8)) as port, ExitStack() as clients:
        for _ in range(8):
            clients.enter_context(connected(port, REQUEST))
        while not service.batches:
            time.sleep(0.01)
        time.sleep(0.2)  # the others' bodies are there too
        with connected(port, REQUEST) as client:
            assert answer(client).startswith(b"HTTP/1.1 503 ")


def test_a_client_that_does_not_read_is_given_up() -> None:
    service = Slow()
    service.go.set()
    limits = ServingLimits(wait=0, seconds=0.5, characters=10**8)
    body = b'{"q": "%s", "target": "de"}' % (b"a" * 20_000_000)
    with served(service, limits) as port, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.settimeout(20)
        client.sendall(HEADER % len(body) + body)
        time.sleep(2.5)  # five times as long as the server waits
        assert len(rest(client)) < 20_000_000


def test_the_work_for_a_client_that_leaves_is_stopped() -> None:
    service = Slow()
    with served(service, ServingLimits(wait=0)) as port:
        with connected(port, REQUEST):
            while not service.batches:
                time.sleep(0.01)
        end = time.monotonic() + 5
        while not service.stopped and time.monotonic() < end:
            time.sleep(0.01)
        assert service.stopped == 1


def test_half_of_the_open_files_are_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, most in ((256, 128), (10**6, 1000), (resource.RLIM_INFINITY, 1000), (4, 8)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, files=files: (files, files))
        assert Connection.limited(ServingLimits()).most == most


def test_the_log_has_a_line_per_fault(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("of this test")
    logger.addFilter(BriefLog())
    for _ in range(3):
        for error in (OSError(errno.EMFILE, "Too many open files"), MtkitError("x is damaged"), ValueError("a bug")):
            logger.error("accept failed\nsocket: x", exc_info=error)
        logger.warning("Invalid HTTP request received.")
    assert [record.getMessage() for record in caplog.records] == [
        "accept failed: [Errno 24] Too many open files",
        "accept failed: x is damaged",
        "accept failed\nsocket: x",
        "Invalid HTTP request received.",
    ]
    assert [bool(record.exc_info) for record in caplog.records] == [False, False, True, False]


def test_a_client_that_sends_far_too_much_reads_why_it_is_refused() -> None:
    with served(Slow(), ServingLimits(characters=1)) as port:
        size = 16_000_000  # more than the buffers of a connection hold
        header = HEADER.replace(b"Host", b"Connection: close\r\nHost") % size
        with connected(port, header + b" " * size) as client:
            assert answer(client).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_arrive_delays_a_stop_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "UPLOAD_SECONDS", 0.05)
    service = Slow()
    with ExitStack() as clients:
        with served(service, ServingLimits(wait=0)) as port:
            unfinished, whole = (clients.enter_context(connected(port, sent)) for sent in (REQUEST[:-1], REQUEST))
            while not service.batches:
                time.sleep(0.01)
            threading.Timer(0.2, service.go.set).start()  # long after the bodies should be there
            stopped = time.monotonic()
        assert time.monotonic() - stopped < 8
        assert rest(unfinished) == b""
        assert rest(whole).startswith(b"HTTP/1.1 200 ")


def test_a_request_that_a_second_stop_cancels_is_answered_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    log, sent = logging.getLogger("uvicorn.error"), list[Message]()

    async def work(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(60)

    async def send(message: Message) -> None:
        sent.append(message)

    async def cancelled() -> None:
        entrance = Entrance(work, ServingMetrics(), hosts=None)
        task = asyncio.create_task(entrance({"type": "http", "path": "/translate", "headers": []}, asyncio.sleep, send))
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(cancelled())
    assert sent[0]["status"] == 503
    monkeypatch.setattr(server, "SAME_SECONDS", 0.0)
    monkeypatch.setattr(log, "level", logging.WARNING)
    stopping = server._Server(uvicorn.Config(work, log_config=None))
    stopping.handle_exit(signal.SIGINT, None)
    assert log.isEnabledFor(logging.ERROR)
    stopping.handle_exit(signal.SIGINT, None)
    assert not log.isEnabledFor(logging.ERROR)
