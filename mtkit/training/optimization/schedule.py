"""The learning rate of each update: warm-up, then a decay, then a cooldown where one is wanted.

noam is Vaswani et al. (2017), section 5.3: f d^-1/2 min(s^-1/2, s w^-3/2) for update s = 1, 2, ... and w warm-up
updates; with its peak f (d w)^-1/2 it is the same curve as inverse-sqrt. The cosine is Loshchilov and Hutter's (2017),
one half period down to 0. The cooldown is the linear one of Zhai et al. (2022).
"""

import math
from collections.abc import Callable

from mtkit.errors import RecipeError
from mtkit.recipe import TrainingSettings

Schedule = Callable[[int, float], float]
"""The rate of update 1, 2, ..., given the share of training done before it, 0 to 1 (by updates, or by time)."""


def build_schedule(settings: TrainingSettings, d_model: int) -> Schedule:
    """The schedule of a recipe. Raises: RecipeError where it needs to know when training ends and nothing says so."""
    ends = any(limit is not None for limit in (settings.max_updates, settings.max_epochs, settings.max_minutes))
    if not ends and (settings.schedule == "cosine" or settings.cooldown > 0):
        what = "schedule = cosine" if settings.schedule == "cosine" else f"cooldown = {settings.cooldown}"
        raise RecipeError(f"training.{what} needs a limit of training: set max_updates, max_epochs or max_minutes")
    warmup, peak = settings.warmup_updates, settings.peak_rate
    if settings.schedule == "noam":
        peak *= (d_model * max(warmup, 1)) ** -0.5
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


def _half_cosine(update: int, done: float, warmup: int) -> float:
    """1 at the end of the warm-up, 0 at the end of training."""
    if update <= warmup:
        return 1.0
    # the share that the warm-up took, from the pace so far: exact when training is counted in updates
    start = min(done * warmup / max(update - 1, 1), 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * min((done - start) / max(1.0 - start, 1e-9), 1.0)))
