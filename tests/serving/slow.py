"""A service that waits, and a request to a server."""

import threading
import time
from collections.abc import Callable
from typing import Any

from fastapi.testclient import TestClient

from mtkit.decoding.contract import StoppedError
from mtkit.errors import MtkitError
from mtkit.serving.service import TextPart, TranslationJob


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

    def jobs(self, strings: list[str], direction: str, n_best: int, most: int, *, html: bool) -> list[TranslationJob]:
        parts = [TextPart(string, number) for number, string in enumerate(strings)]
        cut = [tuple(parts[first : first + most]) for first in range(0, len(parts), most)]
        return [TranslationJob(part, direction, n_best, len(part)) for part in cut]

    def work(self, jobs: list[Any], stopped: Callable[[], bool]) -> list[Any]:
        self.batches.append(len(jobs))
        self.texts.append([part.text for job in jobs for part in job.parts])
        end = time.monotonic() + 10
        while not self.go.wait(0.01) and time.monotonic() < end:
            if self.stops and stopped():
                self.stopped += 1
                raise StoppedError
        if any(part.text == "bad" for job in jobs for part in job.parts):
            raise MtkitError("this is bad")
        return [[[part.text[::-1]] for part in job.parts] for job in jobs]
