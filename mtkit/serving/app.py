"""The HTTP interface: LibreTranslate's requests and errors, /health and /metrics, and the page."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from mtkit.errors import MtkitError
from mtkit.serving.batcher import Batcher, Job, QueueFullError, ServingLimits
from mtkit.serving.middleware import BodyLimit, Entrance, Hosts, ServingMetrics
from mtkit.serving.service import LINE_END, AttentionJob, Service, join_parts
from mtkit.text.characters import is_blank

LOOK_SECONDS = 0.2
"""Seconds between two checks whether a client has left."""

CLIENT_LEFT = 499
"""nginx's status of a request whose client leaves."""

FORM = "application/x-www-form-urlencoded"

PAGE = Path(__file__).parent / "page.html"
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
"""The page may load only itself and this server's answers."""


class _Body(BaseModel):
    """The fields of a request."""

    @classmethod
    async def parse(cls, request: Request) -> Self:
        """The fields of a request's body, which is a JSON object or a form; a field of a form may be repeated.

        `curl -d` calls any body a form, so a form that begins with a brace is read as JSON.
        Raises: HTTPException (400) for another body, and for the first field that has a wrong value; (499) if the
        client leaves before the body has arrived.
        """
        try:
            body = await request.body()
        except ClientDisconnect as error:
            raise HTTPException(CLIENT_LEFT, "the client has left") from error
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            if kind == FORM and not body.lstrip().startswith(b"{"):
                form = parse_qs(body.decode(), keep_blank_values=True, errors="strict")
                fields = {name: values if len(values) > 1 else values[0] for name, values in form.items()}
            else:
                fields = json.loads(body)
                if not isinstance(fields, dict):
                    raise ValueError(f"it holds a {type(fields).__name__}")
        except (ValueError, RecursionError) as error:
            wrong = f"the body is neither an object of JSON nor a form ({FORM}, not multipart): {error}"
            raise HTTPException(400, wrong) from error
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            field, *kinds = first["loc"]
            wrong = "should be a string or a list of strings" if kinds else first["msg"]  # only `q` is of two kinds
            raise HTTPException(400, f"{field}: {wrong}") from error

    @field_validator("*")
    @classmethod
    def _check_characters(cls, value: Any) -> Any:
        """Refuses half of a surrogate pair, which JSON can escape, and which no answer can hold."""
        try:
            for text in value if isinstance(value, list) else [value]:
                str(text).encode()
        except UnicodeEncodeError as error:
            raise PydanticCustomError("surrogate", "half of a surrogate pair is no character") from error
        return value


class TranslateBody(_Body):
    """A request of LibreTranslate; other fields, such as its api_key, are ignored."""

    q: str | list[str]
    source: str = "auto"
    target: str
    format: str = "text"
    alternatives: int = Field(default=0, ge=0)


class DetectBody(_Body):
    """A request for the language of a text."""

    q: str


class AttentionBody(_Body):
    """A request of the page: a line, the number of hypotheses, and the one whose attention is shown."""

    q: str
    source: str = "auto"
    target: str
    alternatives: int = Field(default=0, ge=0)
    hypothesis: int = Field(default=0, ge=0)


class Handlers:
    """Answers to requests, from a service and its batcher. Raises: HTTPException with the status of each failure."""

    def __init__(self, service: Service, batcher: Batcher, limits: ServingLimits, metrics: ServingMetrics) -> None:
        self._service, self._batcher, self._limits, self._metrics = service, batcher, limits, metrics

    async def translate(self, body: TranslateBody, left: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        """The translations, in the form of `q`; `left` returns whether the client has left."""
        if body.format not in ("text", "html"):
            raise HTTPException(400, f"format '{body.format[:80]}' is not known; this server translates text and html")
        strings = [body.q] if isinstance(body.q, str) else body.q
        direction, n_best = self._check(strings, body)
        try:
            jobs = await asyncio.to_thread(
                self._service.jobs, strings, direction, n_best, self._limits.share, html=body.format == "html"
            )
        except MtkitError as error:
            raise HTTPException(400, f"this server translates no HTML: {error}") from error
        hypotheses = join_parts(jobs, await self._results(jobs, left))
        self._metrics.strings.inc(len(strings))
        self._metrics.pieces.inc(sum(job.size for job in jobs))
        answer: dict[str, Any] = {"translatedText": [best for best, *_ in hypotheses]}
        if n_best > 1:
            answer["alternatives"] = [others for _, *others in hypotheses]
        return {key: values[0] for key, values in answer.items()} if isinstance(body.q, str) else answer

    async def attention(self, body: AttentionBody, left: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        """Hypotheses of a line with scores, pieces, and attention weights for one of them."""
        direction, n_best = self._check([body.q], body)
        lines = [line for line in LINE_END.split(body.q) if not is_blank(line)]
        if len(lines) != 1:
            raise HTTPException(400, "attention is shown for one line that is not blank")
        if body.hypothesis >= n_best:
            raise HTTPException(400, f"hypothesis may be {n_best - 1} at most")
        (size,) = await asyncio.to_thread(self._service.sizes, lines)
        if size > self._limits.share:
            jobs = await asyncio.to_thread(self._service.jobs, lines, direction, n_best, self._limits.share)
            (texts,) = join_parts(jobs, await self._results(jobs, left))
            note = f"the attention is shown of up to {self._limits.share:,} pieces; the text has {size:,}"
            return {"hypotheses": [{"text": text, "score": None} for text in texts], "note": note}
        shown: dict[str, Any]
        (shown,) = await self._results([AttentionJob(lines[0], direction, n_best, body.hypothesis, size)], left)
        return shown

    def detect(self, body: DetectBody) -> list[dict[str, Any]]:
        """The source language, in LibreTranslate's form, if there is only one; mtkit does not recognise languages.

        Raises: HTTPException (501) if there are several.
        """
        sources = [language["code"] for language in self._service.languages()]
        if len(sources) > 1:
            listed = ", ".join(sources)
            raise HTTPException(501, f"this server cannot recognise which of its source languages a text has: {listed}")
        return [{"confidence": 100.0, "language": sources[0]}]

    def _check(self, strings: list[str], body: TranslateBody | AttentionBody) -> tuple[str, int]:
        """The direction and the number of hypotheses. Raises: HTTPException for what is above a limit."""
        characters = sum(map(len, strings))
        if len(strings) > self._limits.strings:
            raise HTTPException(400, f"q holds {len(strings):,} strings; a request takes {self._limits.strings:,}")
        if characters > self._limits.characters:
            raise HTTPException(400, f"q holds {characters:,} characters; a request takes {self._limits.characters:,}")
        if body.alternatives >= self._service.most:
            raise HTTPException(400, f"alternatives may be {self._service.most - 1} at most")
        try:
            return self._service.direction(body.source, body.target), body.alternatives + 1
        except MtkitError as error:
            raise HTTPException(400, str(error)) from error

    async def _results(self, jobs: Sequence[Job], left: Callable[[], Awaitable[bool]]) -> list[Any]:
        """The results of one request's jobs, which are withdrawn if its time is over or the client has left."""
        results = asyncio.create_task(self._batcher.submit(jobs))
        try:
            async with asyncio.timeout(self._limits.seconds):
                while not (await asyncio.wait({results}, timeout=LOOK_SECONDS))[0]:
                    if await left():
                        raise HTTPException(CLIENT_LEFT, "the client has left")
                return results.result()
        except QueueFullError as error:
            message = f"{self._limits.queue} requests wait already; try again later"
            raise HTTPException(503, message, {"Retry-After": "1"}) from error
        except TimeoutError as error:
            raise HTTPException(504, f"no translation within {self._limits.seconds:g} seconds") from error
        finally:
            results.cancel()


def make_app(service: Service, limits: ServingLimits | None = None, hosts: Hosts | None = None) -> FastAPI:
    """The application over a service; `hosts` None: clients may call it by any name."""
    limits = limits or ServingLimits()
    metrics = ServingMetrics()
    batcher = Batcher(service.work, limits, metrics.batches.observe)
    metrics.waiting.set_function(lambda: batcher.waiting)
    handlers = Handlers(service, batcher, limits, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(batcher.run())
        yield
        batcher.stop()
        await running

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.add_middleware(BodyLimit, limits=limits)
    app.add_middleware(Entrance, metrics=metrics, hosts=hosts)

    @app.exception_handler(StarletteHTTPException)
    async def refuse(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": "the translation failed; the server's log has the reason"}, 500)

    @app.post("/translate")
    async def translate(request: Request) -> JSONResponse:
        return JSONResponse(await handlers.translate(await TranslateBody.parse(request), request.is_disconnected))

    @app.post("/detect")
    async def detect(request: Request) -> JSONResponse:
        return JSONResponse(handlers.detect(await DetectBody.parse(request)))

    @app.post("/attention")
    async def attention(request: Request) -> JSONResponse:
        return JSONResponse(await handlers.attention(await AttentionBody.parse(request), request.is_disconnected))

    @app.get("/languages")
    async def languages() -> list[dict[str, Any]]:
        return service.languages()

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> dict[str, Any]:
        return {"status": "ok", "waiting": batcher.waiting, "hypotheses": service.most}

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/", methods=["GET", "HEAD"])
    async def page() -> FileResponse:
        return FileResponse(PAGE, headers={"Content-Security-Policy": PAGE_POLICY, "X-Content-Type-Options": "nosniff"})

    return app
