"""A comparison: its trials run in child processes, several at a time, and stop signals are forwarded to them.

Several commands may work on one folder at the same time: a trial that another process holds is left to it.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from types import FrameType
from typing import Any, Protocol, Self

from filelock import FileLock, Timeout

from mtkit.experiments.folder import Folder
from mtkit.experiments.rows import Row
from mtkit.experiments.trials import Trial

LOOK_SECONDS = 0.5
WAITS = 20
"""Looks at the running trials before the folder is read again, for results of other processes."""
TAIL_BYTES = 4096

Show = Callable[[str], object]
"""Function that shows one line of progress, which replaces the previous line."""


class Planned(Protocol):
    """Says which trials are due: `mtkit.experiments.trials.Plan`."""

    def due(self, rows: Sequence[Row], begun: Sequence[Row] = ()) -> list[Trial]:
        """Return all trials that can be named, given the rows that exist and the trials that were started."""


class Runner(Protocol):
    """Runs trials: child processes on this machine, or tasks on a cluster."""

    signal: int | None
    """The signal that stops the comparison, or None."""
    slots: int
    """Number of trials that may run at the same time."""

    def start(self, trial: Trial) -> None:
        """Start a trial."""

    def ended(self) -> list[tuple[str, str]]:
        """Return the names of trials that have ended since the last call, each with how it ended, for people."""

    def step(self, name: str) -> str:
        """Return what a running trial is doing, for people."""


def compare(
    folder: Folder,
    plan: Planned,
    data: Mapping[str | None, str],
    runner: Runner,
    *,
    show: Show,
    done: Callable[[str], object],
) -> int | None:
    """Run all trials of the plan that have no row. Return the signal that stopped the comparison, or None.

    `data` are the fingerprints of the prepared data by task. A trial that failed before is tried again, once. `done` is
    called with the name of each trial that has finished or failed.

    Raises: MtkitError if the folder has trials with other settings.
    """
    tried: set[str] = set()
    """Trials that this call has started."""
    running: dict[str, Trial] = {}
    while True:
        rows = folder.rows()
        finished = {row["trial"] for row in rows if "failed" not in row or row["trial"] in tried}
        due = plan.due([row for row in rows if row["trial"] in finished], folder.begun())
        left = [trial for trial in due if trial.name not in finished and trial.name not in running]
        started = 0
        for trial in left:
            if runner.signal is not None or len(running) >= runner.slots:
                break
            folder.add(trial, data[trial.task])
            if trial.name not in tried and _is_free(folder, trial.name):
                folder.forget(trial.name)
                tried.add(trial.name)
                running[trial.name] = trial
                runner.start(trial)
                started += 1
        if started and runner.signal is None and len(running) < runner.slots:
            continue  # a search by Optuna may name another trial
        if not running and (runner.signal is not None or not left):
            return runner.signal
        total = len({trial.name for trial in due} | finished)
        ended = _wait(folder, runner, running, f"{min(len(finished) + 1, total)}/{total}", show)
        for name, how in ended:
            del running[name]
            if folder.row(name) is None and runner.signal is None:
                folder.fail(name, f"its process {how}; see {folder.log(name)}")
            if folder.row(name) is not None:
                done(name)


def _wait(folder: Folder, runner: Runner, running: Collection[str], count: str, show: Show) -> list[tuple[str, str]]:
    """Show progress until a trial ends; return those that ended. Without any running, wait for other processes."""
    for _ in range(WAITS):
        for name in running:
            show(f"[{count}] {name} ({folder.log(name)}): {runner.step(name)}")
        if not running:
            show(f"[{count}] waiting for the trials of other processes: locked")
        sleep(LOOK_SECONDS)
        if ended := runner.ended():
            return ended
    return []


def _is_free(folder: Folder, name: str) -> bool:
    """Return whether no process works on the trial."""
    lock = folder.lock(name)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with suppress(Timeout), FileLock(lock, blocking=False):
        return True
    return False


@dataclass
class _Child:
    process: "subprocess.Popen[bytes]"
    log: Path
    offset: int
    """Bytes of the log before the process was started."""
    slot: int


@dataclass
class Children:
    """Runs trials in child processes on this machine, and forwards SIGTERM and SIGINT to them."""

    folder: Folder
    device: str
    threads: int
    """Threads of each trial."""
    slots: int = 1
    signal: int | None = None
    _children: dict[str, _Child] = field(default_factory=dict)
    _before: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for child in self._children.values():
            if child.process.poll() is None:
                child.process.kill()
                child.process.wait()

    def start(self, trial: Trial) -> None:
        """Start a trial's process."""
        log = self.folder.log(trial.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        offset = log.stat().st_size
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
        over = [(name, _ended(status)) for name, status in statuses.items() if status is not None]
        for name, _ in over:
            child = self._children.pop(name)
            assert child.process.stdin is not None
            child.process.stdin.close()
        return over

    def step(self, name: str) -> str:
        """Return the last line of progress in a trial's log."""
        child = self._children[name]
        return _last_step(child.log, child.offset)

    def _device_of(self, slot: int) -> dict[str, str]:
        """Return the environment that gives each slot a GPU of its own, if there are several."""
        if self.slots == 1 or not self.device.startswith("cuda"):
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


def outcome_of(folder: Folder, name: str) -> str:
    """Return the outcome of a trial in one line: its score, or why it failed."""
    row = folder.row(name) or {"failed": "its row is gone"}
    if "failed" in row:
        return f"{name}: failed: {row['failed']}; see {folder.log(name)}"
    metric, score = next(iter(row["scores"][row["side"]].items()))
    return f"{name}: {metric} {score['value']:.2f} after {row['training']['updates']:,} updates"


def child_command(folder: Folder, name: str, options: Sequence[str]) -> list[str]:
    """Return the command of a trial's process."""
    # -P: without it, Python would import a torch.py of the current folder
    return [sys.executable, "-P", "-m", "mtkit.experiments.run", str(folder.path), name, *options]


def child_environment() -> dict[str, str]:
    """Return the environment of a trial's process, which imports this mtkit."""
    root = str(Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}


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
