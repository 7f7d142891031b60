"""The dynamic batch: jobs that arrive while another batch is decoded, or within some milliseconds, go together.

A large request is a sequence of jobs. After each of them the other requests that wait have their turn.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from mtkit.serving.limits import ServingLimits

Work = Callable[[Sequence[Any], Callable[[], bool]], Sequence[Any]]
"""Computes the result of each job of a batch, in order; the second argument returns whether nobody wants them any more,
and may be called from any thread."""


class Job(Protocol):
    """A request, or a part of one, as the batcher sees it."""

    @property
    def kind(self) -> Hashable:
        """Jobs of equal kinds may go together."""

    @property
    def size(self) -> int:
        """Its source pieces."""


class QueueFullError(Exception):
    """As many requests wait as may."""


@dataclass
class _Waiting:
    """A request with the jobs that are not done yet, at least one."""

    jobs: deque[Job]
    since: float
    done: list[Any] = field(default_factory=list)
    """The results of the jobs that are done."""
    result: "asyncio.Future[Any]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """A bounded queue of jobs, and one thread that works on a batch of them at a time."""

    def __init__(self, work: Work, limits: ServingLimits, on_batch: Callable[[int], object]) -> None:
        """`on_batch` gets the number of jobs of each batch."""
        self._work, self._limits, self._on_batch = work, limits, on_batch
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "decoding")
        self._stopping = False

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiting)

    async def submit(self, jobs: Sequence[Job]) -> list[Any]:
        """The results of the jobs of one request, in order; a caller that is cancelled withdraws them.

        Raises: QueueFullError at once if too many requests wait; what `work` raises for a single one of the jobs.
        """
        if not jobs:
            return []
        if len(self._waiting) >= self._limits.queue or self._stopping:
            raise QueueFullError
        entry = _Waiting(deque(jobs), asyncio.get_running_loop().time())
        self._waiting.append(entry)
        self._arrived.set()
        try:
            await entry.result
            return entry.done
        finally:
            with suppress(ValueError):  # a batch has it
                self._waiting.remove(entry)

    async def run(self) -> None:
        """Work on batches until `stop` is called and none waits."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._waiting:
                if self._stopping:
                    self._thread.shutdown()
                    return
                self._arrived.clear()
                await self._arrived.wait()
            await self._fill(self._waiting[0].since + self._limits.wait / 1000)
            batch = self._taken()
            if batch:
                self._on_batch(len(batch))
                await self._answer(loop, batch)

    def stop(self) -> None:
        """Take no more jobs; `run` ends when those that wait are done."""
        self._stopping = True
        self._arrived.set()

    async def _fill(self, until: float) -> None:
        """Wait until that time, or until the batch is full."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while sum(each.jobs[0].size for each in self._waiting) < self._limits.pieces and not self._stopping:
                    self._arrived.clear()
                    await self._arrived.wait()

    def _taken(self) -> list[_Waiting]:
        """The first request that waits, and those after it whose next job is of the same kind and fits the batch."""
        batch: list[_Waiting] = []
        room = self._limits.pieces
        for each in list(self._waiting):
            job = each.jobs[0]
            if batch and (job.kind != batch[0].jobs[0].kind or job.size > min(room, self._limits.share)):
                continue
            batch.append(each)
            room -= job.size if job.size <= self._limits.share else room
            self._waiting.remove(each)
        return batch

    async def _answer(self, loop: asyncio.AbstractEventLoop, batch: list[_Waiting]) -> None:
        """Compute the next job of each request; if a batch fails, its jobs are computed one by one.

        A batch ends early if all its requests are withdrawn.
        """
        batch = [each for each in batch if not each.result.done()]
        if not batch:
            return

        def stopped() -> bool:
            return all(each.result.done() for each in batch)

        try:
            results = await loop.run_in_executor(self._thread, self._work, [each.jobs[0] for each in batch], stopped)
        except Exception as error:
            if len(batch) > 1:
                for each in batch:
                    await self._answer(loop, [each])
            elif not batch[0].result.done():
                batch[0].result.set_exception(error)
            return
        for each, result in zip(batch, results, strict=True):
            if each.result.done():
                continue
            each.jobs.popleft()
            each.done.append(result)
            if each.jobs:
                self._waiting.append(each)
            else:
                each.result.set_result(None)
