"""The dynamic batch: jobs that arrive while another batch is decoded, or within some milliseconds, go together."""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from mtkit.serving.limits import ServingLimits


class Job(Protocol):
    """A request as the batcher sees it."""

    @property
    def kind(self) -> Hashable:
        """Jobs of equal kinds may go together."""

    @property
    def size(self) -> int:
        """Its source pieces."""


class QueueFullError(Exception):
    """As many jobs wait as may."""


@dataclass
class _Waiting:
    job: Job
    since: float
    result: "asyncio.Future[Any]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """A bounded queue of jobs, and one thread that works on a batch of them at a time."""

    def __init__(
        self, work: Callable[[Sequence[Any]], Sequence[Any]], limits: ServingLimits, on_batch: Callable[[int], object]
    ) -> None:
        """`work` gives the result of each job of a batch, in order; `on_batch` gets the number of jobs of each."""
        self._work, self._limits, self._on_batch = work, limits, on_batch
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "decoding")
        self._stopping = False

    @property
    def waiting(self) -> int:
        """Jobs that no batch has taken yet."""
        return len(self._waiting)

    async def submit(self, job: Job) -> Any:
        """The result of the job; a caller that is cancelled takes its job out of the queue.

        Raises: QueueFullError at once where too many wait; what `work` raises for this job alone.
        """
        if len(self._waiting) >= self._limits.queue or self._stopping:
            raise QueueFullError
        entry = _Waiting(job, asyncio.get_running_loop().time())
        self._waiting.append(entry)
        self._arrived.set()
        try:
            return await entry.result
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
                while sum(each.job.size for each in self._waiting) < self._limits.pieces and not self._stopping:
                    self._arrived.clear()
                    await self._arrived.wait()

    def _taken(self) -> list[_Waiting]:
        """The first job that waits, and those of its kind behind it that the limit has room for."""
        batch: list[_Waiting] = []
        room = self._limits.pieces
        for each in list(self._waiting):
            if batch and (each.job.kind != batch[0].job.kind or each.job.size > room):
                continue
            batch.append(each)
            room -= each.job.size
            self._waiting.remove(each)
        return batch

    async def _answer(self, loop: asyncio.AbstractEventLoop, batch: list[_Waiting]) -> None:
        """Give each job its result; where a batch fails, its jobs are done one by one, so that one alone fails."""
        try:
            results = await loop.run_in_executor(self._thread, self._work, [each.job for each in batch])
            for each, result in zip(batch, results, strict=True):
                if not each.result.done():  # given up meanwhile
                    each.result.set_result(result)
        except Exception as error:
            if len(batch) > 1:
                for each in batch:
                    await self._answer(loop, [each])
            elif not batch[0].result.done():
                batch[0].result.set_exception(error)
