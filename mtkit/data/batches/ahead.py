"""A thread that makes ahead what a loop is going to ask for."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

Job = TypeVar("Job")
Made = TypeVar("Made")


def prefetched(make: Callable[[Job], Made], jobs: Iterable[Job], *, ahead: int = 8) -> Iterator[Made]:
    """What `make` gives for each job, made up to `ahead` in advance by a thread, which goes through the jobs as well.

    The thread ends with the loop, also when that is left early; what goes wrong in it is raised here.
    """
    ready: queue.Queue[Made | BaseException | None] = queue.Queue(maxsize=ahead)
    left = threading.Event()

    def put(item: Made | BaseException | None) -> bool:
        while not left.is_set():
            with suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return True
        return False

    def work() -> None:
        try:
            for job in jobs:
                if left.is_set() or not put(make(job)):
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, name="mtkit-batches", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        left.set()
        thread.join()
