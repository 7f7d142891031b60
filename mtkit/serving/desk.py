"""Requests for translations: checked against the limits, queued, answered in LibreTranslate's form."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self
from urllib.parse import parse_qs

from fastapi import HTTPException, Request
from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect

from mtkit.decoding.lines.source import is_blank
from mtkit.errors import MtkitError
from mtkit.serving.batcher import Batcher, Job, QueueFullError
from mtkit.serving.limits import ServingLimits
from mtkit.serving.metrics import ServingMetrics
from mtkit.serving.service import LINE_END, Look, Service, joined

LOOK_SECONDS = 0.2
"""Seconds between two looks at whether a client has left."""

CLIENT_LEFT = 499
"""The status of a request whose client leaves, as nginx counts it."""

FORM = "application/x-www-form-urlencoded"


class _Body(BaseModel):
    """A request whose text is of characters: JSON can escape half of a surrogate pair, which no answer can hold."""

    @classmethod
    async def of(cls, request: Request) -> Self:
        """The fields of a request's body, which is an object of JSON or a form; a field of a form may be repeated.

        `curl -d` calls any body a form, so that a form that begins with a brace is JSON.
        Raises: HTTPException (400) for another body, and for the first field that has a wrong value; (499) if the
        client leaves before the body is whole.
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
            raise HTTPException(400, f"the body is neither an object of JSON nor a form ({FORM}): {error}") from error
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise HTTPException(400, f"{where}: {first['msg']}" if where else first["msg"]) from error

    @field_validator("*")
    @classmethod
    def _check_characters(cls, value: Any) -> Any:
        try:
            for each in value if isinstance(value, list) else [value]:
                str(each).encode()
        except UnicodeEncodeError as error:
            raise PydanticCustomError("surrogate", "half of a surrogate pair is no character") from error
        return value


class TranslateBody(_Body):
    """A request of LibreTranslate; other fields, as its api_key, are not read."""

    q: str | list[str]
    source: str = "auto"
    target: str
    format: str = "text"
    alternatives: int = Field(default=0, ge=0)


class DetectBody(_Body):
    """A request for the language of a text."""

    q: str


class LookBody(_Body):
    """A request of the page: a line, how many hypotheses, and which of them the attention is of."""

    q: str
    source: str = "auto"
    target: str
    alternatives: int = Field(default=0, ge=0)
    hypothesis: int = Field(default=0, ge=0)


class Desk:
    """Answers requests by a service behind a batcher. Raises: HTTPException with the status of each failure."""

    def __init__(self, service: Service, batcher: Batcher, limits: ServingLimits, metrics: ServingMetrics) -> None:
        self._service, self._batcher, self._limits, self._metrics = service, batcher, limits, metrics

    async def translate(self, body: TranslateBody, left: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        """The translations, in the form of `q`; `left`, here and below, returns whether the client has left."""
        if body.format != "text":
            raise HTTPException(400, f"format '{body.format[:80]}' is not known; this server translates format text")
        strings = [body.q] if isinstance(body.q, str) else body.q
        direction, n_best = self._checked(strings, body)
        parts = self._service.parts(strings, direction, n_best, self._limits.share)
        found = joined(parts, await self._done(parts, left))
        self._metrics.strings += len(strings)
        self._metrics.pieces += sum(part.size for part in parts)
        best, others = [each[0] for each in found], [each[1:] for each in found]
        if isinstance(body.q, str):
            return {"translatedText": best[0]} | ({"alternatives": others[0]} if n_best > 1 else {})
        return {"translatedText": best} | ({"alternatives": others} if n_best > 1 else {})

    async def attention(self, body: LookBody, left: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        """Hypotheses of a line with scores, pieces, and attention weights of one of them."""
        direction, n_best = self._checked([body.q], body)
        lines = [line for line in LINE_END.split(body.q) if not is_blank(line)]
        if len(lines) != 1:
            raise HTTPException(400, "attention is that of one line that is not blank")
        if body.hypothesis >= n_best:
            raise HTTPException(400, f"hypothesis is {body.hypothesis}, the last one is {n_best - 1}")
        (size,) = self._service.sizes(lines)
        if size > self._limits.share:
            parts = self._service.parts(lines, direction, n_best, self._limits.share)
            (texts,) = joined(parts, await self._done(parts, left))
            note = f"the attention is shown of up to {self._limits.share:,} pieces; the text has {size:,}"
            return {"hypotheses": [{"text": text, "score": None} for text in texts], "note": note}
        look = Look(lines[0], direction, n_best, body.hypothesis, size)
        shown: dict[str, Any]
        (shown,) = await self._done([look], left)
        return shown

    def detect(self, body: DetectBody) -> list[dict[str, Any]]:
        """The source language, in LibreTranslate's form, if there is only one; mtkit does not recognise languages.

        Raises: HTTPException (501) if there are several.
        """
        sources = [each["code"] for each in self._service.languages()]
        if len(sources) > 1:
            listed = ", ".join(sources)
            raise HTTPException(501, f"this server cannot recognise which of its source languages a text has: {listed}")
        return [{"confidence": 100.0, "language": sources[0]}]

    def _checked(self, strings: list[str], body: TranslateBody | LookBody) -> tuple[str, int]:
        """The direction and the number of hypotheses. Raises: HTTPException for what is above a limit."""
        characters = sum(map(len, strings))
        if len(strings) > self._limits.strings:
            raise HTTPException(400, f"q holds {len(strings):,} strings; a request takes {self._limits.strings:,}")
        if characters > self._limits.characters:
            raise HTTPException(400, f"q holds {characters:,} characters; a request takes {self._limits.characters:,}")
        if body.alternatives >= self._service.most:
            raise HTTPException(
                400, f"alternatives is {body.alternatives}; this server has {self._service.most - 1} at most"
            )
        try:
            return self._service.direction(body.source, body.target), body.alternatives + 1
        except MtkitError as error:
            raise HTTPException(400, str(error)) from error

    async def _done(self, jobs: Sequence[Job], left: Callable[[], Awaitable[bool]]) -> list[Any]:
        """The results of the jobs of one request, which are withdrawn if time is over or the client has left."""
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
        except MtkitError as error:
            raise HTTPException(500, str(error)) from error
        except TimeoutError as error:
            raise HTTPException(504, f"no translation within {self._limits.seconds:g} seconds") from error
        finally:
            results.cancel()
