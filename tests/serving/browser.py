"""A headless Chromium, driven by its DevTools protocol over pipes."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")


class Page:
    """An open page."""

    def __init__(self, commands: BinaryIO, events: BinaryIO) -> None:
        self._commands, self._events, self._numbers = commands, events, count(1)
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self._call("Page.enable")

    def open(self, address: str) -> None:
        """Load an address."""
        self._call("Page.navigate", url=address)
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        """The value, or the awaited value, of an expression in the page."""
        found = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _call(self, method: str, **values: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": values, **self._session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (answer := self._next()).get("id") != number:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        message = b""
        while not message.endswith(b"\0"):
            part = self._events.read(1)
            assert part, "the browser has ended"
            message += part
        answer: dict[str, Any] = json.loads(message[:-1])
        return answer


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a browser that keeps its files in a folder, and that ends after 60 seconds at the latest."""
    commands, to_browser = os.pipe()
    from_browser, events = os.pipe()
    command = [
        *("bash", "-c", f'exec timeout -s KILL 60 "$0" "$@" 3<&{commands} 4>&{events} 2>/dev/null'),
        *(str(CHROMIUM), *FLAGS, f"--user-data-dir={folder}", "--remote-debugging-pipe"),
    ]
    process = subprocess.Popen(command, pass_fds=(commands, events), stdout=subprocess.DEVNULL)
    os.close(commands)
    os.close(events)
    with os.fdopen(to_browser, "wb") as sent, os.fdopen(from_browser, "rb", buffering=0) as received:
        try:
            yield Page(sent, received)
        finally:
            process.terminate()  # `timeout` passes it on
            process.wait(20)
