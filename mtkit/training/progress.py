"""Where a training stands, and which of two validations is better.

Divergence: a loss that is finite, but stays far above the loss of a model that knows nothing.

When training stops: at its limits, or when it is told to; and how it ended.
"""

import math
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor

from mtkit.recipe import TrainingSettings
from mtkit.recipe.settings import BestBy
from mtkit.storage.records import Count

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

MEASURES: Mapping[BestBy, str] = {"bleu": "BLEU", "chrf": "chrF", "loss": "loss", "exact": "exact match", "ter": "TER"}
"""Names of the validation scores of `training.best_by` in messages."""

LOWER_IS_BETTER: Collection[BestBy] = ("loss", "ter")


@dataclass(frozen=True)
class Progress:
    """Where a training stands: with the weights and the optimiser, all that it takes to go on as if never stopped.

    The random state is not among it: the generators are seeded anew from seed, update and process for every update.
    """

    update: Count = 0
    """Number of updates made."""
    epoch: Count = 0
    batch: Count = 0
    """Global batches of `epoch` already trained on."""
    seconds: Seconds = 0.0
    """Seconds of training, including those before interruptions."""
    training_seconds: Seconds = 0.0
    """What of `seconds` went into updates: without validation and the writing of checkpoints."""
    tokens: Count = 0
    """Target tokens trained on."""
    validated: int = -1
    """The update of the last validation."""
    bleu: float | None = None
    """Validation BLEU, where this update was validated."""
    nll: float | None = None
    """Validation loss, where this update was validated."""
    best_by: BestBy = "bleu"
    """Measure of the scores below, as `training.best_by`."""
    score: float | None = None
    """Validation score, if this update was validated."""
    best_score: float | None = None
    best_nll: float | None = None
    """Loss of the validation with the best score: of equal scores the lower loss is better."""
    patience_score: float | None = None
    """Score of the validation that last reset patience."""
    stale: Count = 0
    """Validations since patience was last reset."""
    judged_by: str = ""
    """Fingerprint of the settings that these scores were made by: others do not compare with them."""
    baseline: tuple[float, float] = (0.0, 0.0)
    """The moving mean of the rewards of what attentions sample, and the weight it has gathered."""
    scaler: dict[str, Any] | None = None
    """Loss-scaling state of float16."""
    first_nll: float | None = None
    """Loss of the first update in nats per target token, which tells divergence from slow learning."""
    diverging: Count = 0
    """Last updates in a row whose loss was far above the loss of a uniform guess."""

    def is_bettered_by(self, score: float, nll: float) -> bool:
        """Whether a validation with these is better than the best so far."""
        if self.best_score is None:
            return True
        return rank(self.best_by, score, nll) > rank(self.best_by, self.best_score, self.best_nll)

    def after_update(self, epoch: int, batch: int, tokens: int) -> "Progress":
        """Where training stands after an update with so many target tokens, at this place in the data."""
        progress = replace(self, update=self.update + 1, epoch=epoch, batch=batch, tokens=self.tokens + tokens)
        return replace(progress, bleu=None, nll=None, score=None)

    def after_validation(self, bleu: float, nll: float, score: float, least_improvement: float) -> "Progress":
        """Where training stands after a validation.

        A validation resets patience if it improves on the score that last reset it by `least_improvement`; with 0, if
        it is the best so far.
        """
        better = resets = self.is_bettered_by(score, nll)
        if least_improvement and self.patience_score is not None:
            gain = score - self.patience_score
            resets = (-gain if self.best_by in LOWER_IS_BETTER else gain) >= least_improvement
        progress = replace(self, validated=self.update, bleu=bleu, nll=nll, score=score, stale=self.stale + 1)
        if better:
            progress = replace(progress, best_score=score, best_nll=nll)
        return replace(progress, patience_score=score, stale=0) if resets else progress

    def without_scores(self) -> "Progress":
        """The place in training, as if it had not been validated yet."""
        progress = replace(self, validated=-1, bleu=None, nll=None, score=None, stale=0)
        return replace(progress, best_score=None, best_nll=None, patience_score=None)


LATER = {
    "training_seconds",
    "judged_by",
    "nll",
    "best_nll",
    "first_nll",
    "diverging",
    "best_by",
    "score",
    "best_score",
    "patience_score",
}
"""Keys that are absent from checkpoints of earlier versions."""


def rank(best_by: BestBy, score: float, nll: float | None) -> tuple[float, float]:
    """Sort key of validations, larger for the better one; old checkpoints have no loss."""
    return -score if best_by in LOWER_IS_BETTER else score, -math.inf if nll is None else -nll


class Divergence:
    """Detects a training whose loss is finite, but stays far above the loss of a model that knows nothing.

    The bound is `FACTOR` times the larger of two losses: that of a uniform guess over the vocabulary, and that of the
    first update, before any weight has changed. A training that learns, however slowly, stays below it, and a training
    that recovers from a spike is below it again within a few updates. `UPDATES` updates in a row above it are
    divergence. All numbers stay on the device until they are read.
    """

    FACTOR = 2.0
    UPDATES = 50

    def __init__(self, vocabulary: int, device: torch.device, progress: Progress) -> None:
        """`vocabulary` is the number of target pieces; `progress` is where training begins or resumes."""
        self._uniform = math.log(vocabulary)
        first = math.nan if progress.first_nll is None else progress.first_nll
        self._first = torch.tensor(first, device=device)
        self._above = torch.tensor(progress.diverging, device=device)
        self._since = torch.zeros((), dtype=torch.int64, device=device)

    def follow(self, nll: Tensor, number: int) -> None:
        """Look at the mean loss per target token (scalar, without label smoothing) of update `number`."""
        self._first = torch.where(self._first.isnan(), nll, self._first)
        above = nll > self.FACTOR * self._first.clamp(min=self._uniform)
        self._above = torch.where(above, self._above + 1, 0)
        since = torch.where(self._above >= self.UPDATES, number + 1 - self._above, 0)
        self._since = torch.where(self._since == 0, since, self._since)

    def since(self) -> int | None:
        """The first of the updates that show the divergence; None if there is none. Waits for the device."""
        return int(self._since) or None

    def describe(self) -> str | None:
        """One sentence about the divergence; None if there is none. Waits for the device."""
        if (since := self.since()) is None:
            return None
        bound, name = max(
            (self._uniform, "a uniform guess over the vocabulary"), (float(self._first), "the first update")
        )
        return (
            f"training has diverged: from update {since} on, the loss is above {self.FACTOR * bound:.1f} nats per "
            f"target token, {self.FACTOR:g} times the loss of {name}"
        )

    def noted(self, progress: Progress) -> Progress:
        """The place in training, with the numbers that are kept here. Waits for the device."""
        first = float(self._first)
        return replace(progress, first_nll=None if math.isnan(first) else first, diverging=int(self._above))


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
