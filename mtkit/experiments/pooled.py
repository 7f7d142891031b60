"""Tests of many entries with few seeds: all entries share one estimate of the variance between seeds.

Two seeds of one entry say little about its variance, and two seeds of 79 entries say much about the variance of all.
Scores p in per cent are transformed to asin(sqrt(p / 100)), whose variance depends little on the mean (Bartlett, 1947).
Student's t then has as many degrees of freedom as there are trainings less entries, as in an analysis of variance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from mtkit.evaluation.distributions import solve, t_tail
from mtkit.evaluation.seeds import holm
from mtkit.evaluation.significance import TIE


@dataclass(frozen=True)
class Pooled:
    """Mean score of an entry, and its difference to the first entry; None if no entry has two seeds."""

    mean: float
    low: float | None
    """Lower end of the 95% interval of the mean."""
    high: float | None
    difference: float
    """Mean minus the first entry's mean."""
    difference_low: float | None
    """Lower end of the 95% interval of the difference, if the first entry's mean is exact on the transformed scale."""
    p: float | None
    """Two-sided p-value of the difference, adjusted by Holm's method; None of the first entry."""


def pool(entries: Sequence[Sequence[float]]) -> list[Pooled]:
    """Return means, intervals and tests against the first entry, of scores from 0 to 100 by entry and seed.

    Each entry has at least one score.
    """
    angles = [[math.asin(math.sqrt(min(max(score, 0.0), 100.0) / 100)) for score in scores] for scores in entries]
    means, centres = [fmean(scores) for scores in entries], [fmean(scores) for scores in angles]
    freedom = sum(map(len, entries)) - len(entries)
    squares = sum((angle - centre) ** 2 for of, centre in zip(angles, centres, strict=True) for angle in of)
    if freedom == 0 or squares < TIE**2:
        return [Pooled(mean, None, None, mean - means[0], None, None) for mean in means]
    deviation = math.sqrt(squares / freedom)
    quantile = solve(lambda distance: t_tail(distance, freedom), 0.05)
    p_values, result = [], []
    for scores, mean, centre in zip(entries, means, centres, strict=True):
        margin = quantile * deviation / math.sqrt(len(scores))
        error = deviation * math.sqrt(1 / len(scores) + 1 / len(entries[0]))
        p_values.append(t_tail(abs(centre - centres[0]) / error, freedom))
        # the transformed mean is not the mean of the scores, but lies within their range
        low, high = min(_score(centre - margin), mean), max(_score(centre + margin), mean)
        gap = min(_score(centre - quantile * error) - _score(centres[0]), mean - means[0])
        result.append((mean, low, high, mean - means[0], gap))
    adjusted = [None, *holm(p_values[1:])]
    return [Pooled(*numbers, p) for numbers, p in zip(result, adjusted, strict=True)]


def _score(angle: float) -> float:
    """Return the score of a transformed score, cut at 0 and 100."""
    return 100 * math.sin(min(max(angle, 0.0), math.pi / 2)) ** 2
