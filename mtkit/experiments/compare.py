"""A comparison: a runner runs its trials, several at a time, until each has a row or a signal stops them.

Several commands may work on one folder at the same time: a trial that another process holds is left to it.
"""

from collections.abc import Callable, Mapping, Sequence
from time import sleep
from typing import Protocol, Self

from filelock import FileLock, Timeout

from mtkit.experiments.children import DECODING
from mtkit.experiments.folder import Folder, lock_error
from mtkit.experiments.pruning import Pruning
from mtkit.experiments.rows import Row, is_measured
from mtkit.experiments.trials import Trial

LOOK_SECONDS = 0.5
WAITS = 20
"""Looks at the running trials before the folder is read again, for results of other processes."""

Show = Callable[[str], object]
"""Function that shows one line of progress, which replaces the previous line."""


class Planned(Protocol):
    """A plan of trials: `mtkit.experiments.trials.Plan`."""

    def due(self, rows: Sequence[Row], begun: Sequence[Row] = ()) -> list[Trial]:
        """Return all trials that can be named, given the rows that exist and the trials that were started."""


class Runner(Protocol):
    """Runs trials: child processes on this machine, or tasks on a cluster."""

    @property
    def signal(self) -> int | None:
        """The signal that stops the comparison, or None."""

    @property
    def slots(self) -> int:
        """Number of trials that may run at the same time."""

    def start(self, trial: Trial) -> None:
        """Start a trial."""

    def ended(self) -> list[tuple[str, str]]:
        """Return the names of trials that have ended since the last call, each with how it ended, for people."""

    def stop(self, name: str) -> None:
        """Stop a running trial, which saves its work; it ends later."""

    def step(self, name: str) -> str:
        """Return what a running trial is doing, for people; DECODING if it has been trained."""


def compare(
    folder: Folder,
    plan: Planned,
    data: Mapping[str | None, str],
    runner: Runner,
    *,
    show: Show,
    done: Callable[[str], object],
    pruning: Pruning | None = None,
) -> int | None:
    """Run all trials of the plan that have no row. Return the signal that stopped the comparison, or None.

    `data` are the fingerprints of the prepared data by task. A trial that failed before is tried again, once. `done` is
    called with the name of each trial that has finished or failed, or that `pruning` has stopped.

    Raises: MtkitError if the folder has trials of the plan with other settings or other data, finished or not.
    """
    begun_before = folder.begun()
    names = {trial["trial"] for trial in begun_before}
    for trial in plan.due(folder.rows(), begun_before):
        if trial.name in names:
            folder.check(trial, data[trial.task])
    running: dict[str, Trial] = {}
    pruned: set[str] = set()
    retried = {row["trial"] for row in folder.rows() if "failed" in row}
    """Failures from before this call that no command has tried again."""
    with _Claims(folder) as claims:
        while True:
            rows, begun = folder.rows(), folder.begun()
            retried &= {row["trial"] for row in rows if "failed" in row}
            finished = {row["trial"] for row in rows} - retried
            due = plan.due([row for row in rows if row["trial"] in finished], begun)
            left = [trial for trial in due if trial.name not in finished and trial.name not in running]
            known, changed = {trial["trial"] for trial in begun}, False
            for trial in left:
                if runner.signal is not None or len(running) >= runner.slots:
                    break
                if trial.name not in known:
                    folder.add(trial, data[trial.task])
                    changed = True
                if claims.take(trial.name):
                    changed = True
                    if trial.name not in retried and folder.row(trial.name) is not None:
                        claims.release(trial.name)  # another command has just finished it
                        continue
                    folder.check(trial, data[trial.task])
                    folder.forget(trial.name)
                    retried.discard(trial.name)
                    running[trial.name] = trial
                    runner.start(trial)
            if changed and runner.signal is None and len(running) < runner.slots:
                continue  # a search by Optuna may name another trial
            if not running and (runner.signal is not None or not left):
                return runner.signal
            total = len({trial.name for trial in due} | finished)
            count = f"{min(len(finished) + 1, total)}/{total}"
            for name, how in _wait(folder, runner, running, pruned, pruning, count, show):
                _finish(folder, name, how, runner, pruning if name in pruned else None)
                del running[name]
                claims.release(name)
                if folder.row(name) is not None:
                    done(name)


def _finish(folder: Folder, name: str, how: str, runner: Runner, pruning: Pruning | None) -> None:
    """Write the row of an ended trial if its process has not: of a trial that was pruned, or that failed."""
    if folder.row(name) is not None:
        return
    if pruning is not None:
        folder.prune(name, pruning.curve(name))
    elif runner.signal is None:
        folder.fail(name, f"its process {how}")


def _wait(
    folder: Folder,
    runner: Runner,
    running: Mapping[str, Trial],
    pruned: set[str],
    pruning: Pruning | None,
    count: str,
    show: Show,
) -> list[tuple[str, str]]:
    """Show progress until a trial ends; return the trials that ended. Without any running, wait for other processes.

    Trials that the pruner stops are added to `pruned`.
    """
    for _ in range(WAITS):
        for name, trial in running.items():
            step = runner.step(name)
            show(f"[{count}] {name} ({folder.log(name)}): {step}")
            if pruning is not None and name not in pruned and step != DECODING and pruning.stops(trial):
                pruned.add(name)
                runner.stop(name)
        if not running:
            show(f"[{count}] waiting for the trials of other processes: locked")
        sleep(LOOK_SECONDS)
        if ended := runner.ended():
            return ended
    return []


class _Claims:
    """Locks of the trials that this process has started, so that other commands on the folder leave them to it.

    A trial's own process holds another lock, which outlives this process until it has saved its work.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._locks: dict[str, FileLock] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self._locks):
            self.release(name)

    def take(self, name: str) -> bool:
        """Claim a trial; return False if another process has it. Raises: MtkitError if it cannot be locked."""
        path = self._folder.claim(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path)
            lock.acquire(blocking=False)
        except Timeout:
            return False
        except (OSError, NotImplementedError) as error:
            raise lock_error(path, error) from error
        self._locks[name] = lock
        return True

    def release(self, name: str) -> None:
        """Release a claimed trial."""
        self._locks.pop(name).release()


def outcome_of(folder: Folder, name: str) -> str:
    """Return the outcome of a trial in one line: its score, why it failed, or that it was stopped early."""
    row = folder.row(name) or {"failed": "its row is gone"}
    if "failed" in row:
        return f"{name}: failed: {row['failed']}; see {folder.log(name)}"
    if not is_measured(row):
        return f"{name}: stopped by the pruner at validation {len(row['curve'])}"
    metric, score = next(iter(row["scores"][row["side"]].items()))
    return f"{name}: {metric} {score['value']:.2f} after {row['training']['updates']:,} updates"
