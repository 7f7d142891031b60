"""A service that waits, and a request to a server."""

import threading
import time
from collections.abc import Callable
from typing import Any

from fastapi.testclient import TestClient

from mtkit.decoding.search.contract import StoppedError
from mtkit.errors import MtkitError
from mtkit.serving.service import Strings, Unit


def ask(client: TestClient, q: Any, target: str = "de", **more: Any) -> Any:
    return client.post("/translate", json={"q": q, "source": "en", "target": target, **more})


class Slow:
    """A service whose work waits for an event; strings come back reversed."""

    most, directions = 1, ["en-de"]

    def __init__(self) -> None:
        self.go, self.batches, self.texts = threading.Event(), list[int](), list[list[str]]()
        self.stops, self.stopped = True, 0

    def direction(self, source: str, target: str) -> str:
        return "en-de"

    def parts(self, strings: list[str], direction: str, n_best: int, most: int) -> list[Strings]:
        units = [Unit(string, number) for number, string in enumerate(strings)]
        cut = [tuple(units[first : first + most]) for first in range(0, len(units), most)]
        return [Strings(part, direction, n_best, len(part)) for part in cut]

    def work(self, jobs: list[Any], stopped: Callable[[], bool]) -> list[Any]:
        self.batches.append(len(jobs))
        self.texts.append([text for job in jobs for text in job.strings])
        end = time.monotonic() + 10
        while not self.go.wait(0.01) and time.monotonic() < end:
            if self.stops and stopped():
                self.stopped += 1
                raise StoppedError
        if any("bad" in job.strings for job in jobs):
            raise MtkitError("this is bad")
        return [[[text[::-1]] for text in job.strings] for job in jobs]
