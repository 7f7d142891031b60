"""Signs of life of the processes that train together: one that is silent ends the training, with its rank named.

A thread of each process writes a number that rises into the store of the process group, and watches that of the next
rank. It says that a process lives, whatever its work takes: validation and checkpoints on one process are no silence. A
process that a machine lost or stopped has none, where a collective operation would wait for it for hours. A ring of
watchers suffices: of several silent processes one has a watcher that lives.
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

INTERVAL = 3.0
"""Seconds between signs of life."""

SILENCE = 45.0
"""Seconds without one after which a process counts as lost."""

DONE = "done"
"""The last sign of a process that leaves by itself."""


class Heartbeat:
    """The sign of life of one process, and the watch over the next."""

    def __init__(self, store: Any, rank: int, size: int, end: Callable[[str], object] | None = None) -> None:
        """`store` is one of torch.distributed, of which no other thread uses this client; `end` gets the message."""
        self._store, self._rank, self._watched = store, rank, (rank + 1) % size
        self._end = end or _end
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to give signs of life, and to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Say that this process leaves, and watch no longer."""
        self._left.set()
        self._thread.join()

    def _beat(self) -> None:
        last, since, number = "", monotonic(), 0
        try:
            while not self._left.wait(INTERVAL if number else 0.0):
                number += 1
                self._store.set(_key(self._rank), str(number))
                seen = self._store.get(_key(self._watched)).decode() if self._store.check([_key(self._watched)]) else ""
                if seen != last:
                    last, since = seen, monotonic()
                if seen != DONE and monotonic() - since > SILENCE:
                    self._end(
                        f"process {self._watched} of this training has given no sign of life for {SILENCE:.0f} s, so "
                        f"process {self._rank} ends it; see that machine. The same command goes on from the last "
                        "checkpoint"
                    )
                    return
            self._store.set(_key(self._rank), DONE)
        except RuntimeError:  # the store is gone, and with it torchrun, which ends all processes unless it was killed
            return


def _key(rank: int) -> str:
    return f"mtkit/heartbeat/{rank}"


def _end(message: str) -> None:
    """At once: the main thread waits within an operation that nothing interrupts. torchrun then ends the others."""
    with suppress(AttributeError, OSError, ValueError):  # nobody may be there to read it
        sys.stderr.write(f"mtkit: {message}\n")
        sys.stderr.flush()
    os._exit(1)
