"""The HTTP interface: LibreTranslate's requests and errors, what monitoring asks for, and the page."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtkit.serving.batcher import Batcher
from mtkit.serving.desk import Desk, DetectBody, LookBody, TranslateBody
from mtkit.serving.limits import Hosts, ServingLimits
from mtkit.serving.metrics import ServingMetrics
from mtkit.serving.service import Service
from mtkit.version import __version__

PAGE = Path(__file__).parent / "page.html"
OWN = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
"""What the page may load: itself, and answers of this server."""


def make_app(service: Service, limits: ServingLimits | None = None, hosts: Hosts | None = None) -> FastAPI:
    """The application over a service; `hosts` None: it may be called by any name."""
    limits = limits or ServingLimits()
    metrics = ServingMetrics()
    batcher = Batcher(service.work, limits, metrics.batches.observe)
    desk = Desk(service, batcher, limits, metrics)

    @asynccontextmanager
    async def at_work(app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(batcher.run())
        yield
        batcher.stop()
        await running

    # the pages of documentation that fastapi brings load scripts from the network
    app = FastAPI(title="mtkit", version=__version__, lifespan=at_work, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, limits=limits)
    app.add_middleware(Entrance, metrics=metrics, hosts=hosts)
    app.add_exception_handler(AnyHTTPException, _refused)
    app.add_exception_handler(Exception, _failed)

    @app.post("/translate")
    async def translate(request: Request) -> JSONResponse:
        return JSONResponse(await desk.translate(await TranslateBody.of(request), request.is_disconnected))

    @app.post("/detect")
    async def detect(request: Request) -> JSONResponse:
        return JSONResponse(desk.detect(await DetectBody.of(request)))

    @app.post("/attention")
    async def attention(request: Request) -> JSONResponse:
        return JSONResponse(await desk.attention(await LookBody.of(request), request.is_disconnected))

    @app.get("/languages")
    async def languages() -> list[dict[str, Any]]:
        return service.languages()

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "waiting": batcher.waiting, "hypotheses": service.most}

    @app.get("/metrics")
    async def numbers() -> PlainTextResponse:
        return PlainTextResponse(metrics.text(batcher.waiting), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE, headers={"Content-Security-Policy": OWN, "X-Content-Type-Options": "nosniff"})

    return app


class Entrance:
    """Refuses requests that name another server (403), and measures requests for translations."""

    def __init__(self, app: ASGIApp, metrics: ServingMetrics, hosts: Hosts | None) -> None:
        self._app, self._metrics, self._hosts = app, metrics, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = monotonic(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        refusal = self._hosts and self._hosts.refusal(Headers(scope=scope))
        try:
            await (JSONResponse({"error": refusal}, 403) if refusal else self._app)(scope, receive, noted)
        finally:
            if scope["path"] == "/translate":
                self._metrics.requests[status] += 1
                self._metrics.seconds.observe(monotonic() - started)


class BodyLimit:
    """Refuses a body that is too large before it is in memory (413), and one that is not whole in time (408)."""

    def __init__(self, app: ASGIApp, limits: ServingLimits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and counts its bytes as they come."""
        most, seconds = self._limits.bytes, self._limits.seconds
        taken, until = 0, asyncio.get_running_loop().time() + seconds if scope["type"] == "http" else None

        async def counted() -> Message:
            nonlocal taken, until
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError as error:
                late = f"the request did not arrive whole within {seconds:g} seconds"
                raise HTTPException(408, late, {"Connection": "close"}) from error
            if not message.get("more_body"):
                until = None  # only the client's end follows, whenever it comes
            taken += len(message.get("body", b""))
            if taken > most:
                raise HTTPException(413, f"the request is larger than {most:,} bytes")
            return message

        await self._app(scope, counted if scope["type"] == "http" else receive, send)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, AnyHTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _failed(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": "the translation failed; the server's log says why"}, 500)
