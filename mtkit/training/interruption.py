"""Signals that stop a training at its next update."""

import signal
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Any, Self

SAME_SECONDS = 2.0
"""Signals that come within this time after the first count as the same one.

Schedulers and launchers signal a process and its group, or repeat a signal that has reached the process already.
"""


class Interruption:
    """Records SIGTERM and Ctrl-C, so that training stops at the next update; a later signal acts as usual."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The first signal received, or None."""
        self._received = 0.0
        self._handlers: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> Self:
        # only the main thread can handle signals in Python
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._received = number, monotonic()
        elif monotonic() - self._received >= SAME_SECONDS:
            self.__exit__()
            signal.raise_signal(number)
