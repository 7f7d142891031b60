"""The place of a training, which resumes with it, and its result."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from mtkit.recipe.settings import BestBy
from mtkit.storage.records import Count

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

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
        """Return whether a validation with these is better than the best so far."""
        if self.best_score is None or self.best_nll is None:
            return True
        return sort_key(self.best_by, score, nll) > sort_key(self.best_by, self.best_score, self.best_nll)

    def after_update(self, epoch: int, batch: int, tokens: int) -> "Progress":
        """Return the progress after an update with so many target tokens, at this place in the data."""
        progress = replace(self, update=self.update + 1, epoch=epoch, batch=batch, tokens=self.tokens + tokens)
        return replace(progress, bleu=None, nll=None, score=None)

    def after_validation(self, bleu: float, nll: float, score: float, least_improvement: float) -> "Progress":
        """Return the progress after a validation.

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
        """Return the progress as if nothing had been validated yet."""
        progress = replace(self, validated=-1, bleu=None, nll=None, score=None, stale=0)
        return replace(progress, best_score=None, best_nll=None, patience_score=None)


def sort_key(best_by: BestBy, score: float, nll: float) -> tuple[float, float]:
    """Sort key of validations, larger for the better one: the score, then the loss."""
    return -score if best_by in LOWER_IS_BETTER else score, -nll


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
