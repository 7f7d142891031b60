"""The state of a training that resumes with it, its limits, how it ends, and whether it diverges."""

import math
import signal
import threading
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor

from mtkit.recipe import TrainingSettings
from mtkit.recipe.settings import LIMITS, BestBy
from mtkit.storage.records import Count

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

MEASURES: Mapping[BestBy, str] = {
    "bleu": "BLEU",
    "chrf": "chrF",
    "loss": "loss",
    "exact": "exact match",
    "token": "token match",
    "ter": "TER",
}
"""Names of the validation scores of `training.best_by` in messages."""

LOWER_IS_BETTER: Collection[BestBy] = ("loss", "ter")


@dataclass(frozen=True)
class Progress:
    """The place of a training; with weights and optimiser, all that a resumed training needs to equal the original.

    It has no random state: the generators are seeded from seed, update and process for every update.
    """

    update: Count = 0
    """Number of updates made."""
    epoch: Count = 0
    batch: Count = 0
    """Global batches of `epoch` already trained on."""
    seconds: Seconds = 0.0
    """Seconds of training, including those before interruptions."""
    training_seconds: Seconds = 0.0
    """Seconds of `seconds` spent on updates, without validation and the writing of checkpoints."""
    tokens: Count = 0
    """Target tokens trained on."""
    validated: int = -1
    """The update of the last validation."""
    bleu: float | None = None
    """Validation BLEU, if this update was validated."""
    nll: float | None = None
    """Validation loss, if this update was validated."""
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
    """Fingerprint of the search and scoring settings of these scores; other scores are not comparable."""
    baseline: tuple[float, float] = (0.0, 0.0)
    """State of `mtkit.training.objective.Baseline`."""
    scaler: dict[str, Any] | None = None
    """Loss-scaling state of float16."""
    first_nll: float | None = None
    """Loss of the first update in nats per target token, to distinguish divergence from slow learning."""
    diverging: Count = 0
    """Last updates in a row whose loss was far above the loss of a uniform guess."""

    def is_bettered_by(self, score: float, nll: float) -> bool:
        """Whether a validation with these is better than the best so far."""
        if self.best_score is None:
            return True
        return sort_key(self.best_by, score, nll) > sort_key(self.best_by, self.best_score, self.best_nll)

    def after_update(self, epoch: int, batch: int, tokens: int) -> "Progress":
        """The progress after an update with so many target tokens, at this place in the data."""
        progress = replace(self, update=self.update + 1, epoch=epoch, batch=batch, tokens=self.tokens + tokens)
        return replace(progress, bleu=None, nll=None, score=None)

    def after_validation(self, bleu: float, nll: float, score: float, least_improvement: float) -> "Progress":
        """The progress after a validation.

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
        """The progress as if nothing had been validated yet."""
        progress = replace(self, validated=-1, bleu=None, nll=None, score=None, stale=0)
        return replace(progress, best_score=None, best_nll=None, patience_score=None)


LATER = {
    *("training_seconds", "judged_by", "nll", "best_nll", "first_nll", "diverging"),
    *("best_by", "score", "best_score", "patience_score"),
}
"""Keys that are absent from checkpoints of earlier versions."""


def sort_key(best_by: BestBy, score: float, nll: float | None) -> tuple[float, float]:
    """Sort key of validations, larger for the better one; old checkpoints have no loss."""
    return -score if best_by in LOWER_IS_BETTER else score, -math.inf if nll is None else -nll


class Divergence:
    """Detects a training whose loss is finite, but stays far above the loss of a model that has learned nothing.

    The bound is `FACTOR` times the larger of two losses: a uniform guess over the vocabulary, and the first update,
    before any weight has changed. A training that learns, however slowly, stays below it, and a training that recovers
    from a spike is below it again within a few updates. `UPDATES` updates in a row above it are divergence. All numbers
    stay on the device until they are read.
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
        """Record the mean loss per target token (scalar, without label smoothing) of update `number`."""
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

    def save_state(self, progress: Progress) -> Progress:
        """The progress with the state of this object. Waits for the device."""
        first = float(self._first)
        return replace(progress, first_nll=None if math.isnan(first) else first, diverging=int(self._above))


@dataclass(frozen=True)
class Outcome:
    """Result of a training."""

    folder: Path
    progress: Progress
    limit: str | None
    """The limit that ended it, as "max_updates = 500"; None after a signal."""
    trained: int
    """Updates made by this call; 0 if the run was finished already."""
    signal: int | None = None
    """The signal that stopped the training; None at a limit."""


ENDLESS = 1 << 62
"""Updates of a training without a limit."""


class Limits:
    """The limits of a recipe, for a training with this many updates per epoch."""

    def __init__(
        self, settings: TrainingSettings, updates_per_epoch: int, flops_per_token: float | None = None
    ) -> None:
        """`flops_per_token` is only needed for a limit of FLOPs."""
        self._settings, self._limits = settings, settings.limits
        exact = {"max_updates": 1, "max_epochs": updates_per_epoch}
        self._totals = {
            name: int(self._limits[name]) * updates for name, updates in exact.items() if name in self._limits
        }
        """Updates until the limits whose number of updates is known."""
        if "max_flops" in self._limits:
            assert flops_per_token is not None
        self._flops_per_token = flops_per_token or 0.0

    def reached(self, progress: Progress) -> str | None:
        """The limit that ends training here, as "max_updates = 500", or None."""
        counted = {"max_updates": progress.update, "max_epochs": progress.epoch, "patience": progress.stale}
        counts = counted | self._measured(progress)
        patience = {} if self._settings.patience is None else {"patience": self._settings.patience}
        for name, limit in (self._limits | patience).items():
            if counts[name] >= limit:
                return f"{name} = {_number(limit)}"
        return None

    def describe(self) -> str:
        """Describe all limits, e.g. "500 updates or 20 minutes"."""
        settings = self._settings
        limits = [f"{_number(limit)} {LIMITS[name]}" for name, limit in self._limits.items()]
        if settings.patience:
            limits.append(f"{settings.patience} validations without a better {MEASURES[settings.best_by]}")
        return " or ".join(limits) or "Ctrl-C"

    def done(self, progress: Progress) -> float:
        """The share of training that is done, 0 to 1, by the nearest limit; 0 without one."""
        return min(max(self._shares(progress).values(), default=0.0), 1.0)

    def total_updates(self, progress: Progress) -> int:
        """The training's number of updates; else `ENDLESS`.

        For limits of tokens, FLOPs and minutes it is estimated from the pace until now.
        """
        return max(self._total(progress, self._limits.keys()), progress.update)

    def is_estimate(self, total: int) -> bool:
        """Whether this result of `total_updates` is estimated."""
        return total not in self._totals.values()

    def seconds_left(self, progress: Progress, seconds_per_update: float) -> float | None:
        """Estimated seconds until the first limit; None without one."""
        left = math.inf
        if (total := self._total(progress, self._limits.keys() - {"max_minutes"})) != ENDLESS:
            left = (total - progress.update) * seconds_per_update
        if self._settings.max_minutes is not None:
            left = min(left, self._settings.max_minutes * 60 - progress.seconds)
        return None if left == math.inf else max(left, 0.0)

    def _measured(self, progress: Progress) -> dict[str, float]:
        """Return the progress towards limits whose number of updates is not known, in their units."""
        flops = progress.tokens * self._flops_per_token
        return {"max_tokens": progress.tokens, "max_flops": flops, "max_minutes": progress.seconds / 60}

    def _shares(self, progress: Progress) -> dict[str, float]:
        """The share of each limit that is done; above 1 after the last update."""
        measured = {name: done for name, done in self._measured(progress).items() if name in self._limits}
        shares = {name: progress.update / total for name, total in self._totals.items()}
        return shares | {name: done / self._limits[name] for name, done in measured.items()}

    def _total(self, progress: Progress, names: Set[str]) -> int:
        """Updates until the first of these limits; `ENDLESS` without one, or if none is known before any update."""
        totals = [total for name, total in self._totals.items() if name in names]
        if progress.update:
            shares = self._shares(progress)
            others = names - self._totals.keys()
            totals += [round(progress.update / shares[name]) for name in others if shares[name]]
        return min(totals, default=ENDLESS)


def _number(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:,.10g}"


SAME_SECONDS = 2.0
"""Signals that come within this time after the first count as the same one.

Schedulers and launchers signal a process and its group, or repeat a signal that has reached the process already.
"""


class Interruption:
    """Records SIGTERM and Ctrl-C, so that training stops at the next update; a later signal acts as usual."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The first signal received, or None."""
        self._received = 0.0
        self._handlers: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> Self:
        # only the main thread can handle signals in Python
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._received = number, monotonic()
        elif monotonic() - self._received >= SAME_SECONDS:
            self.__exit__()
            signal.raise_signal(number)
