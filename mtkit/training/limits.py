"""When training stops: at its limits, or when it is told to; and how it ended."""

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, Self

from mtkit.recipe import TrainingSettings
from mtkit.training.progress import MEASURES, Progress


@dataclass(frozen=True)
class Outcome:
    """How a training ended."""

    folder: Path
    progress: Progress
    limit: str | None
    """The limit that ended it, as "max_updates = 500"; None where a signal did."""
    trained: int
    """Updates done by this call; 0 where the run was finished already."""
    signal: int | None = None
    """The signal that stopped the training; None where a limit did."""


ENDLESS = 1 << 62
"""Updates of a training that no limit ends."""


class Limits:
    """The limits of a recipe, over a training whose epochs have this many updates."""

    def __init__(self, settings: TrainingSettings, updates_per_epoch: int) -> None:
        self._settings = settings
        self._updates_per_epoch = updates_per_epoch

    def reached(self, progress: Progress) -> str | None:
        """The limit that ends training here, as "max_updates = 500", or None."""
        settings = self._settings
        counters = {
            "max_updates": progress.update,
            "max_epochs": progress.epoch,
            "max_minutes": progress.seconds / 60,
            "patience": progress.stale,
        }
        for name, count in counters.items():
            limit = getattr(settings, name)
            if limit is not None and count >= limit:
                return f"{name} = {limit:,.10g}"
        return None

    def describe(self) -> str:
        """All limits in words, e.g. "500 updates or 20 minutes"."""
        settings = self._settings
        names = {"max_updates": "updates", "max_epochs": "epochs", "max_minutes": "minutes"}
        given = [f"{getattr(settings, name):,.10g} {unit}" for name, unit in names.items() if getattr(settings, name)]
        if settings.patience:
            given.append(f"{settings.patience} validations without a better {MEASURES[settings.best_by]}")
        return " or ".join(given) or "Ctrl-C"

    def done(self, progress: Progress) -> float:
        """The share of training that is done, 0 to 1, by the limit that is nearest; 0 without one."""
        settings, shares = self._settings, [0.0]
        if settings.max_updates is not None:
            shares.append(progress.update / settings.max_updates)
        if settings.max_minutes is not None:
            shares.append(progress.seconds / 60 / settings.max_minutes)
        if settings.max_epochs is not None:
            shares.append(progress.update / self._by_epochs(settings.max_epochs))
        return min(max(shares), 1.0)

    def total_updates(self, progress: Progress) -> int:
        """How many updates training has, so far as the limits say: in the minutes left, as many per second as before.

        `ENDLESS` where they do not say.
        """
        settings, known = self._settings, [ENDLESS]
        if settings.max_updates is not None:
            known.append(settings.max_updates)
        if settings.max_epochs is not None:
            known.append(self._by_epochs(settings.max_epochs))
        if settings.max_minutes is not None and progress.seconds:
            known.append(round(progress.update * settings.max_minutes * 60 / progress.seconds))
        return max(min(known), progress.update)

    def seconds_left(self, progress: Progress, seconds_per_update: float) -> float | None:
        """Estimated seconds until the first limit; None without one."""
        settings, left = self._settings, []
        if settings.max_updates is not None:
            left.append((settings.max_updates - progress.update) * seconds_per_update)
        if settings.max_epochs is not None:
            left.append((self._by_epochs(settings.max_epochs) - progress.update) * seconds_per_update)
        if settings.max_minutes is not None:
            left.append(settings.max_minutes * 60 - progress.seconds)
        return max(min(left), 0.0) if left else None

    def _by_epochs(self, epochs: int) -> int:
        return epochs * self._updates_per_epoch


SAME_SECONDS = 2.0
"""Signals that come within this time after the first are taken for the same one.

Schedulers and launchers signal a process and its group, or pass on what has reached the process as well.
"""


class Interruption:
    """Turns SIGTERM and Ctrl-C into a wish to stop at the next update; a later signal acts as usual."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The first signal received, or None."""
        self._since = 0.0
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread and lets no other one handle them
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._since = number, monotonic()
        elif monotonic() - self._since >= SAME_SECONDS:
            self.__exit__()
            signal.raise_signal(number)
