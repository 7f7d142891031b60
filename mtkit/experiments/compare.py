"""Child processes of a comparison: run one at a time, show progress from its log, and forward stop signals."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

from mtkit.experiments.folder import Folder

LOOK_SECONDS = 0.5
TAIL_BYTES = 4096

Show = Callable[[str], object]
"""Function that shows one line of progress, which replaces the previous line."""


def compare(folder: Folder, names: Sequence[str], *, show: Show, done: Callable[[str], object]) -> int | None:
    """Train, translate and score each mechanism without a result. Return the signal that stopped it, or None.

    `done` is called with the name of each mechanism that has finished or failed.
    """
    with Children() as children:
        for number, name in enumerate(names, start=1):
            result = folder.result(name)
            if result is not None and "failed" not in result:
                continue
            folder.forget(name)
            status = children.run(folder, name, show, title=f"[{number}/{len(names)}] {name} ({folder.log(name)}): ")
            if children.signal is not None:
                return children.signal
            if folder.result(name) is None:
                folder.fail(name, f"its process {_ended(status)}; see {folder.log(name)}")
            done(name)
    return None


class Children:
    """Runs one child process at a time, and forwards SIGTERM and SIGINT to it."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The last received signal, or None."""
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def run(self, folder: Folder, name: str, show: Show, *, title: str) -> int:
        """Run one mechanism's process, and show `title` and its progress. Return its exit status."""
        log = folder.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        offset = log.stat().st_size
        root = str(Path(__file__).parents[2])
        paths = [root, os.environ.get("PYTHONPATH", "")]
        with log.open("ab") as output:
            # in a new session, it receives Ctrl-C only from this process
            self._process = subprocess.Popen(
                # -P: without it, Python would import a torch.py of the current folder
                [sys.executable, "-P", "-m", "mtkit.experiments.run", str(folder.path), name],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
        if self.signal is not None:  # the signal came before the process was started
            self._process.terminate()
        try:
            while True:
                try:
                    return self._process.wait(LOOK_SECONDS)
                except subprocess.TimeoutExpired:
                    show(title + _last_step(log, offset))
        finally:
            if self._process.stdin is not None:
                self._process.stdin.close()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def _last_step(log: Path, offset: int) -> str:
    """Return the last progress line of a log: "training, update 150/1000  ETA 0:00:42", or "decoding"."""
    with log.open("rb") as file:
        file.seek(max(offset, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")[:-1]
    for line in reversed(lines):
        if line == "decoding":
            return "decoding"
        if line.startswith("update ") and "  " in line:
            return f"training, {line.partition('loss ')[0].rstrip()}"
    return "training"


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was stopped by {name}" + (", perhaps out of memory" if name == "SIGKILL" else "")
