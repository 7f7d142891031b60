"""Signals that stop a training at its next update."""

import signal
from contextlib import ExitStack
from time import monotonic
from types import FrameType
from typing import Self

from mtkit.process import signals_to

SAME_SECONDS = 2.0
"""Signals that come within this time after the first count as the same one.

Schedulers and launchers signal a process and its group, or repeat a signal that has reached the process already.
"""


class Interruption:
    """Records SIGTERM, SIGHUP and Ctrl-C, so that training stops at the next update; a later signal acts as usual."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The first signal received, or None."""
        self._received = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(signals_to(self._record))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._received = number, monotonic()
        elif monotonic() - self._received >= SAME_SECONDS:
            self.__exit__()
            signal.raise_signal(number)
