"""The limits of a training: which one ends it, and how much is left."""

import math
from collections.abc import Mapping, Set

from mtkit.recipe import TrainingSettings
from mtkit.recipe.settings import LIMITS, BestBy
from mtkit.training.progress import Progress

MEASURES: Mapping[BestBy, str] = {
    "bleu": "BLEU",
    "chrf": "chrF",
    "loss": "loss",
    "exact": "exact match",
    "token": "token match",
    "ter": "TER",
}
"""Names of the validation scores of `training.best_by` in messages."""

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
        """Return the limit that ends training here, as "max_updates = 500", or None."""
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
        """Return the share of training that is done, 0 to 1, by the nearest limit; 0 without one."""
        return min(max(self._shares(progress).values(), default=0.0), 1.0)

    def total_updates(self, progress: Progress) -> int:
        """Return the training's number of updates; `ENDLESS` without a limit.

        For limits of tokens, FLOPs and minutes it is estimated from the pace until now.
        """
        return max(self._total(progress, self._limits.keys()), progress.update)

    def is_estimate(self, total: int) -> bool:
        """Return whether this result of `total_updates` is estimated."""
        return total not in self._totals.values()

    def seconds_left(self, progress: Progress, seconds_per_update: float) -> float | None:
        """Estimate the seconds until the first limit; None without one."""
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
        """Return the share of each limit that is done; above 1 after the last update."""
        measured = {name: done for name, done in self._measured(progress).items() if name in self._limits}
        shares = {name: progress.update / total for name, total in self._totals.items()}
        return shares | {name: done / self._limits[name] for name, done in measured.items()}

    def _total(self, progress: Progress, names: Set[str]) -> int:
        """Return the updates until the first of these limits; `ENDLESS` without one, and if none is known yet."""
        totals = [total for name, total in self._totals.items() if name in names]
        if progress.update:
            shares = self._shares(progress)
            others = names - self._totals.keys()
            totals += [round(progress.update / shares[name]) for name in others if shares[name]]
        return min(totals, default=ENDLESS)


def _number(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:,.10g}"
