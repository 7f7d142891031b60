"""Batches of segments (`map_batches`), several at once on a CPU: in threads, or in forked processes (`Workers`).

Two threads speed up one batch of small products little, two batches almost twofold. Python runs one thread at a time
between PyTorch's operations; processes do not wait for each other.

A process begins as a copy of this one, so that it has the model and only batches are sent. It computes with one thread,
because OpenMP's threads are not copied. A program that embeds mtkit should not fork: a lock that another of its threads
holds at that moment stays locked in the copy.
"""

import pickle
import signal
import sys
import threading
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch

from mtkit.memory import Halving

MOST = 8
"""Maximum items at a time: between PyTorch's operations, Python runs only one thread."""

Item = TypeVar("Item")
Result = TypeVar("Result")

LEAST = 512
"""Padded pieces below which batches are not made smaller for the sake of evenness."""


def map_batches(
    work: Callable[[Sequence[int]], Sequence[Result]],
    lengths: Sequence[int],
    batch_tokens: int | None,
    device: torch.device,
    *,
    hypotheses: int = 1,
    most: int = MOST,
) -> Iterator[list[tuple[int, Result]]]:
    """Yield the index of each segment with its result, by batches of `plan`; batch_tokens None: `usual_batch_tokens`.

    `work` returns the results of the segments with these indices. A batch that exceeds the memory is halved. On a CPU,
    at most `most` batches are computed at once.
    """
    size = batch_tokens or usual_batch_tokens(device, hypotheses)
    batches = plan(lengths, size, hypotheses, at_once(device, most=most))
    halves = parallel_map(partial(Halving(lengths).run, work), batches, device, most)
    for indices, results in zip(batches, halves, strict=True):
        yield list(zip(indices, chain.from_iterable(results), strict=True))


def usual_batch_tokens(device: torch.device, hypotheses: int) -> int:
    """Return a batch's padded source pieces times hypotheses: few enough for a CPU's caches, enough to fill a GPU.

    Several hypotheses of a segment read the same source.
    """
    if device.type != "cpu":
        return 65_536
    return 8_192 if hypotheses == 1 else 16_384


def plan(lengths: Sequence[int], batch_tokens: int, hypotheses: int, at_once: int = 1) -> list[list[int]]:
    """Return the segments of each batch by index, longest first, so that memory runs out in the first batch or never.

    A batch holds at most `batch_tokens` padded source pieces, each counted once per hypothesis, or one segment. If
    several batches are computed `at_once`, the number of batches is raised to a multiple of this number, with batches
    as small as that allows, so that all end at about the same time.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()

    def filled(limit: int) -> list[list[int]]:
        batches: list[list[int]] = []
        room = 0
        for index in order:
            if room < 1:
                batches.append([])
                room = max(1, limit // (hypotheses * lengths[index]))
            batches[-1].append(index)
            room -= 1
        return batches

    batches = filled(batch_tokens)
    if at_once > 1:
        count = -(-len(batches) // at_once) * at_once
        least = min(LEAST, batch_tokens)
        batches = filled(bisect_left(range(batch_tokens), True, least, key=lambda limit: len(filled(limit)) <= count))
    return batches


def parallel_map(
    work: Callable[[Item], Result], items: Sequence[Item], device: torch.device, most: int = MOST
) -> Iterator[Result]:
    """Yield the results of `work`, in order; a CPU computes up to `most` at once, which share PyTorch's threads.

    `work` runs under the inference mode and autocast of the caller. An accelerator, which has one queue, computes one
    item at a time. A caller that leaves early or is interrupted waits for the items already started.
    """
    workers = at_once(device, len(items), most)
    if workers <= 1:
        yield from map(work, items)
        return
    modes = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def in_modes(item: Item) -> Result:
        inference, autocast, dtype = modes
        with torch.inference_mode(inference), torch.autocast("cpu", dtype, enabled=autocast):
            return work(item)

    threads = torch.get_num_threads()
    torch.set_num_threads(threads // workers)  # a new thread reads it at its first operation
    try:
        with ThreadPoolExecutor(workers) as pool:
            try:
                for result in [pool.submit(in_modes, item) for item in items]:
                    yield result.result()
            finally:  # after an error, or if the caller leaves early
                pool.shutdown(cancel_futures=True)
    finally:
        torch.set_num_threads(threads)


def at_once(device: torch.device, items: int | None = None, most: int = MOST) -> int:
    """Return the number of items computed at a time; on a CPU, they share PyTorch's threads equally.

    `items` is the number of items; None: at least `most`.
    """
    if device.type != "cpu":
        return 1
    threads = torch.get_num_threads()
    threads_each = -(-threads // max(1, min(threads, most if items is None else items, most)))
    return threads // threads_each  # with 12 threads six of two each, rather than eight of one


Serve = Callable[[Any, Callable[[], bool]], Any]
"""Computes the answer to a job; both are pickled. The second argument returns whether the job is stopped."""

LOOK_SECONDS = 0.05
"""Seconds between two checks whether a job has been stopped."""

STOP = b""
"""The message that stops a job; no pickled job is empty."""


class Workers:
    """Processes that each answer one job at a time; they end with this object, or with the parent process."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._idle: SimpleQueue[Connection | None] | None = None

    @classmethod
    def where_possible(cls, device: torch.device) -> "Workers | None":
        """Return a process for each thread of PyTorch; None if there is one thread, or if this thread may not fork.

        On macOS, system libraries fail in a copy.
        """
        count, in_main = torch.get_num_threads(), threading.current_thread() is threading.main_thread()
        possible = sys.platform == "linux" and in_main and not current_process().daemon
        return cls(count) if possible and device.type == "cpu" and count > 1 else None

    def start(self, serve: Serve) -> None:
        """Forks the processes, which answer with `serve`, unless they run already."""
        if self._idle is None:
            self._idle = SimpleQueue()
            for _ in range(self.count):
                self._idle.put(_fork(serve))

    def answer(self, job: Any, stopped: Callable[[], bool] | None = None) -> Any:
        """Return the answer of the next idle process; None if it failed, has died, or was `stopped`."""
        assert self._idle is not None
        process, still_usable = self._idle.get(), None
        try:
            if process is None:
                return None
            process.send_bytes(pickle.dumps(job))
            while stopped is not None and not process.poll(LOOK_SECONDS):
                if stopped():
                    process.send_bytes(STOP)
                    break
            answer = pickle.loads(process.recv_bytes())
            still_usable = process
            return answer
        except (EOFError, OSError):  # the system has killed it, perhaps for its memory
            return None
        finally:
            self._idle.put(still_usable)  # a process whose answer was not read would give it to the next job


def _fork(serve: Serve) -> Connection | None:
    """Return the pipe to a new process; None if the system has no memory, or no number, for one more."""
    context = get_context("fork")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_answer_jobs, args=(serve, child_end, parent_end), daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 warns of any thread; OpenMP's are idle, and the copy does not need them
        warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
        # Python treats an interrupt that arrives while it forks as an error of a fork hook, and goes on
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        except OSError:
            return None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    child_end.close()  # the process alone holds its end, so that the pipe breaks when the process ends
    return parent_end


def _answer_jobs(serve: Serve, jobs: Connection, parent_end: Connection) -> None:
    """The main function of a process, until the parent closes its end of the pipe."""
    parent_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles an interrupt
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while True:
            message = jobs.recv_bytes()
            if message == STOP:  # for the job that has been answered
                continue
            job = pickle.loads(message)
            try:
                answer = serve(job, jobs.poll)
            except Exception:  # the parent computes the job again, and gets the error itself
                answer = None
            jobs.send_bytes(pickle.dumps(answer))
