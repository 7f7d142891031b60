"""Where a training stands, and which of two validations is better.

Divergence: a loss that is finite, but stays far above the loss of a model that knows nothing.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from mtkit.recipe.training import BestBy
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
