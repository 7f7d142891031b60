"""Schedules of the learning rate.

noam is Vaswani et al. (2017), section 5.3: f d^-1/2 min(s^-1/2, s w^-3/2) for update s = 1, 2, ... and w warm-up
updates; with its peak f (d w)^-1/2 it is the same curve as inverse-sqrt. The cosine is Loshchilov and Hutter's (2017),
one half period down to 0. The cooldown is the linear one of Zhai et al. (2022).
"""

import math
from collections.abc import Callable

from mtkit.errors import RecipeError
from mtkit.recipe import TrainingSettings
from mtkit.recipe.settings import LIMITS

Schedule = Callable[[int, float], float]
"""The rate of update 1, 2, ..., given the share of training done before it, 0 to 1 (`Limits.done`)."""


def build_schedule(settings: TrainingSettings, d_model: int) -> Schedule:
    """Build the schedule of a recipe. Raises: RecipeError if it depends on the end of training and no limit is set."""
    if not settings.limits and (settings.schedule == "cosine" or settings.cooldown > 0):
        what = "schedule = cosine" if settings.schedule == "cosine" else f"cooldown = {settings.cooldown}"
        *names, last = LIMITS
        raise RecipeError(f"training.{what} needs a limit of training: set {', '.join(names)} or {last}")
    warmup, peak = settings.warmup_updates, peak_rate(settings, d_model)
    begin = 1.0 - settings.cooldown

    def rate(update: int, done: float) -> float:
        value = peak * min(1.0, update / max(warmup, 1))
        if settings.schedule == "cosine":
            value *= _half_cosine(update, done, warmup)
        else:
            value *= math.sqrt(max(warmup, 1) / max(update, warmup, 1))
        if settings.cooldown > 0:
            value *= min(1.0, (1.0 - done) / settings.cooldown) if done > begin else 1.0
        return max(value, 0.0)

    return rate


def peak_rate(settings: TrainingSettings, d_model: int) -> float:
    """Return the rate at the end of the warm-up; of noam, `settings.peak_rate` is only a factor."""
    factor = (d_model * max(settings.warmup_updates, 1)) ** -0.5 if settings.schedule == "noam" else 1.0
    return settings.peak_rate * factor


def _half_cosine(update: int, done: float, warmup: int) -> float:
    """Return a factor that is 1 at the end of the warm-up and 0 at the end of training."""
    if update <= warmup:
        return 1.0
    # the warm-up's share of training, estimated from the pace so far; exact if training is limited by updates
    start = min(done * warmup / max(update - 1, 1), 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * min((done - start) / max(1.0 - start, 1e-9), 1.0)))
