"""Dynamic batching: jobs that arrive while a batch is decoded, or within some milliseconds, are decoded together.

A large request is a sequence of jobs. After each of them the other waiting requests have their turn.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

Work = Callable[[Sequence[Any], Callable[[], bool]], Sequence[Any]]
"""Computes the results of a batch's jobs, in order. The second argument returns whether all clients have left; any
thread may call it."""


@dataclass(frozen=True)
class ServingLimits:
    """The limits of a server."""

    wait: float = 5.0
    """Milliseconds for which the first request of a batch waits for others."""
    pieces: int = 4096
    """Maximum source pieces decoded together."""
    queue: int = 256
    """Maximum waiting requests; more are refused (503)."""
    strings: int = 256
    """Maximum strings per request."""
    characters: int = 20_000
    """Maximum characters per request, all strings together."""
    seconds: float = 60.0
    """Maximum seconds until the request has arrived (408), and from then to its answer (504)."""
    connections: int = 1000
    """Maximum open connections; also at most half of the files that the process may open."""

    @property
    def share(self) -> int:
        """Maximum source pieces of one request in a batch; a longer line is split."""
        return max(1, min(1024, self.pieces // 4))

    @property
    def header_seconds(self) -> float:
        """Maximum seconds from the connection, or the previous answer, to the end of a request's header."""
        return min(10.0, self.seconds)

    @property
    def bytes(self) -> int:
        """Maximum bytes of a request's body: JSON may escape a character as 12 bytes."""
        return 12 * self.characters + 16 * self.strings + 4096


class Job(Protocol):
    """A request, or a part of one."""

    @property
    def kind(self) -> Hashable:
        """Jobs of equal kinds may share a batch."""

    @property
    def size(self) -> int:
        """The number of source pieces."""


class QueueFullError(Exception):
    """The maximum number of requests is waiting."""


@dataclass
class _Request:
    """A waiting request with at least one unfinished job."""

    jobs: deque[Job]
    since: float
    results: list[Any] = field(default_factory=list)
    """The results of its finished jobs."""
    finished: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """A bounded queue of jobs, and one thread that works on a batch of them at a time."""

    def __init__(self, work: Work, limits: ServingLimits, on_batch: Callable[[int], object]) -> None:
        """`on_batch` is called with each batch's number of jobs."""
        self._work, self._limits, self._on_batch = work, limits, on_batch
        self._queue: deque[_Request] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "decoding")
        self._stopping = False

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._queue)

    async def submit(self, jobs: Sequence[Job]) -> list[Any]:
        """The results of one request's jobs, in order; a cancelled caller withdraws them.

        Raises: QueueFullError at once if too many requests wait; what `work` raises for a job by itself.
        """
        if not jobs:
            return []
        if len(self._queue) >= self._limits.queue or self._stopping:
            raise QueueFullError
        request = _Request(deque(jobs), asyncio.get_running_loop().time())
        self._queue.append(request)
        self._arrived.set()
        try:
            await request.finished
            return request.results
        finally:
            with suppress(ValueError):  # it is in a batch
                self._queue.remove(request)

    async def run(self) -> None:
        """Decodes batches until `stop` is called and no request waits."""
        while True:
            while not self._queue:
                if self._stopping:
                    self._thread.shutdown()
                    return
                self._arrived.clear()
                await self._arrived.wait()
            await self._fill(self._queue[0].since + self._limits.wait / 1000)
            batch = self._next_batch()
            if batch:
                self._on_batch(len(batch))
                await self._decode(batch)

    def stop(self) -> None:
        """Refuses further jobs; `run` ends when the waiting ones are done."""
        self._stopping = True
        self._arrived.set()

    async def _fill(self, until: float) -> None:
        """Waits until that time, or until the batch is full."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while sum(request.jobs[0].size for request in self._queue) < self._limits.pieces and not self._stopping:
                    self._arrived.clear()
                    await self._arrived.wait()

    def _next_batch(self) -> list[_Request]:
        """Removes the first request from the queue, and later ones whose next job has the same kind and fits."""
        batch: list[_Request] = []
        room = self._limits.pieces
        for request in list(self._queue):
            job = request.jobs[0]
            if batch and (job.kind != batch[0].jobs[0].kind or job.size > min(room, self._limits.share)):
                continue
            batch.append(request)
            room -= job.size if job.size <= self._limits.share else room
            self._queue.remove(request)
        return batch

    async def _decode(self, batch: list[_Request]) -> None:
        """Computes the next job of each request; if the batch fails, its jobs one by one.

        The batch ends early if all its requests are withdrawn.
        """
        batch = [request for request in batch if not request.finished.done()]
        if not batch:
            return

        def stopped() -> bool:
            return all(request.finished.done() for request in batch)

        jobs, loop = [request.jobs[0] for request in batch], asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(self._thread, self._work, jobs, stopped)
        except Exception as error:
            if len(batch) > 1:
                for request in batch:
                    await self._decode([request])
            elif not batch[0].finished.done():
                batch[0].finished.set_exception(error)
            return
        for request, result in zip(batch, results, strict=True):
            if request.finished.done():
                continue
            request.jobs.popleft()
            request.results.append(result)
            if request.jobs:
                self._queue.append(request)
            else:
                request.finished.set_result(None)
