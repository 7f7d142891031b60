"""Child processes of a comparison, one for each running trial, and the steps that their logs show."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Self

from mtkit.experiments.folder import Folder
from mtkit.experiments.trials import Trial
from mtkit.process import signals_to

SAVING_SECONDS = 60.0
"""Time that processes have to save their work after an error."""
TAIL_BYTES = 4096
DECODING = "decoding"
"""Line in a trial's log after its training."""


@dataclass
class _Child:
    process: "subprocess.Popen[bytes]"
    log: Path
    offset: int
    """Bytes of the log before the process was started."""
    slot: int


@dataclass
class Children:
    """Runs trials in child processes on this machine, and forwards SIGTERM, SIGINT and SIGHUP to them."""

    folder: Folder
    device: str
    threads: int
    """Threads of each trial."""
    slots: int = 1
    signal: int | None = None
    _children: dict[str, _Child] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        self._stack.enter_context(signals_to(self._pass_on))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        for name in self._children:  # after an error
            self.stop(name)
        for child in self._children.values():
            try:
                child.process.wait(SAVING_SECONDS)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()

    def start(self, trial: Trial) -> None:
        """Start a trial's process."""
        log, offset = self.folder.open_log(trial.name)
        slot = min(set(range(self.slots)) - {child.slot for child in self._children.values()})
        shared = ["--shared"] if self.slots > 1 else []
        options = ["--threads", str(self.threads), "--device", self.device, *shared]
        with log.open("ab") as output:
            # in a new session, it receives Ctrl-C only from this process
            process = subprocess.Popen(
                child_command(self.folder, trial.name, options),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=child_environment() | self._device_of(slot),
            )
        self._children[trial.name] = _Child(process, log, offset, slot)
        if self.signal is not None:  # the signal came before the process was started
            process.terminate()

    def ended(self) -> list[tuple[str, str]]:
        """Return the trials whose processes have ended since the last call, and how they ended."""
        statuses = {name: child.process.poll() for name, child in self._children.items()}
        over = [(name, how_ended(status)) for name, status in statuses.items() if status is not None]
        for name, _ in over:
            child = self._children.pop(name)
            assert child.process.stdin is not None
            child.process.stdin.close()
        return over

    def stop(self, name: str) -> None:
        """Send SIGTERM to a trial's process."""
        self._children[name].process.terminate()

    def step(self, name: str) -> str:
        """Return the last line of progress in a trial's log."""
        child = self._children[name]
        return last_step(child.log, child.offset)

    def _device_of(self, slot: int) -> dict[str, str]:
        """Return the environment that gives each slot a GPU of its own, if there are several."""
        if self.slots == 1 or self.device != "cuda":
            return {}
        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
        return {"CUDA_VISIBLE_DEVICES": names[slot % len(names)]}

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for child in self._children.values():
            if child.process.poll() is None:
                child.process.send_signal(number)


def child_command(folder: Folder, name: str, options: Sequence[str]) -> list[str]:
    """Return the command of a trial's process."""
    # -P: without it, Python would import a torch.py of the current folder
    return [sys.executable, "-P", "-m", "mtkit.experiments.run", str(folder.path), name, *options]


def child_environment() -> dict[str, str]:
    """Return the environment of a trial's process, which imports this mtkit."""
    paths = [package_root(), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def package_root() -> str:
    """Return the folder that has this mtkit."""
    return str(Path(__file__).parents[2])


def last_step(log: Path, offset: int) -> str:
    """Return the last progress of a log after `offset`: "training, update 150/1000  ETA 0:00:42", or "decoding"."""
    with log.open("rb") as file:
        file.seek(max(offset, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")[:-1]
    for line in reversed(lines):
        if line == DECODING:
            return DECODING
        if line.startswith("update ") and "  " in line:
            return f"training, {line.partition('loss ')[0].rstrip()}"
    return "training"


def how_ended(status: int) -> str:
    """Return how a process ended, for people: "ended with status 1", "was stopped by SIGTERM"."""
    if status >= 0:
        return f"ended with status {status}"
    names = {number.value: number.name for number in signal.Signals}
    name = names.get(-status, f"signal {-status}")  # real-time signals have no name
    return f"was stopped by {name}" + (", perhaps out of memory" if name == "SIGKILL" else "")
