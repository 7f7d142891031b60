"""Forked processes that compute batches: each runs Python at once, where threads wait for each other.

A process begins as a copy of this one, so that the model is there and only batches are sent. It computes with one
thread, because those of OpenMP are not copied. A program that embeds mtkit should not fork: a lock that another of its
threads holds at that moment stays locked in the copy.
"""

import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

Serve = Callable[[Any, Callable[[], bool]], Any]
"""Computes the answer to a job; both are pickled. The second argument returns whether the job is stopped."""

LOOK_SECONDS = 0.05
"""Seconds between two looks at whether a job has been stopped."""

STOP = b""
"""The message that stops a job; no pickled job is empty."""


class Workers:
    """Processes that each answer one job at a time; they end with this object, or with the process that made them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._idle: SimpleQueue[Connection | None] | None = None

    @classmethod
    def where_possible(cls, device: torch.device) -> "Workers | None":
        """A process for each thread of PyTorch; None where one alone computes, or this thread may not fork.

        On macOS, system libraries fail in a copy.
        """
        count, in_main = torch.get_num_threads(), threading.current_thread() is threading.main_thread()
        possible = sys.platform == "linux" and in_main and not current_process().daemon
        return cls(count) if possible and device.type == "cpu" and count > 1 else None

    def start(self, serve: Serve) -> None:
        """Forks the processes, which answer with `serve`, where that has not been done."""
        if self._idle is None:
            self._idle = SimpleQueue()
            for _ in range(self.count):
                self._idle.put(_forked(serve))

    def answer(self, job: Any, stopped: Callable[[], bool] | None = None) -> Any:
        """The answer of the next process that is idle; None if it failed, has died, or was `stopped`."""
        assert self._idle is not None
        process, again = self._idle.get(), None
        try:
            if process is None:
                return None
            process.send_bytes(pickle.dumps(job))
            while stopped is not None and not process.poll(LOOK_SECONDS):
                if stopped():
                    process.send_bytes(STOP)
                    break
            answer = pickle.loads(process.recv_bytes())
            again = process
            return answer
        except (EOFError, OSError):  # the system has killed it, for its memory perhaps
            return None
        finally:
            self._idle.put(again)  # one that was not waited for would give its answer to the next job


def _forked(serve: Serve) -> Connection | None:
    """The way to a new process; None where the system has no memory, or no number, for one more."""
    context = get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_answer_all, args=(serve, there, here), daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 warns of every thread; those of OpenMP are idle, and the copy does without them
        warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
        # Python takes an interrupt that comes while it forks for an error in what runs then, and goes on
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        except OSError:
            return None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    there.close()  # when the process ends, nobody holds its end of the pipe
    return here


def _answer_all(serve: Serve, jobs: Connection, other_end: Connection) -> None:
    """What a process does, until the other end of the pipe is closed."""
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the process that asks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while True:
            message = jobs.recv_bytes()
            if message == STOP:  # of the job that has been answered
                continue
            job = pickle.loads(message)
            try:
                answer = serve(job, jobs.poll)
            except Exception:  # who asked does it again, and sees the error there
                answer = None
            jobs.send_bytes(pickle.dumps(answer))
