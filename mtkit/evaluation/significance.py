"""Whether one system is better than another: paired bootstrap and approximate randomisation.

Paired bootstrap resampling after Koehn (2004), approximate randomisation after Riezler and Maxwell (2005), both
two-sided, from the same draws and by the same formulas as sacrebleu's, but for ties (`p_value`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtkit.data.progress import ProgressBar, silent
from mtkit.errors import MtkitError, did_you_mean, shown
from mtkit.evaluation.scores import RESAMPLES, Score, with_intervals
from mtkit.evaluation.statistics import Numbers, Statistics, seed, shuffle

TESTS = ("bootstrap", "randomisation")
TRIALS = 10_000


TIE = 1e-5
"""Differences of scores that are as near as this are equal: some metrics compute in single precision."""


@dataclass(frozen=True)
class Difference:
    """How far one system is from the baseline in one metric, and how likely chance alone gives as much.

    A p-value is None where its test was not asked for, and 1 where the two scores are equal.
    """

    metric: str
    value: float
    """The system's score less the baseline's."""
    bootstrap_p: float | None
    randomisation_p: float | None
    signature: str
    """The metric's, with the numbers of resamples (bs) and trials (ar)."""


@dataclass(frozen=True)
class Comparison:
    """Scores of several systems on the same segments; the first is the baseline."""

    scores: list[list[Score]]
    """Of every system, the baseline among them."""
    differences: list[list[Difference]]
    """Of every system but the baseline."""


def compare_systems(
    systems: Sequence[Sequence[Statistics]],
    *,
    tests: Sequence[str] = TESTS,
    resamples: int = RESAMPLES,
    trials: int = TRIALS,
    progress: ProgressBar = silent,
) -> Comparison:
    """Scores with intervals, and every system but the first tested against it in every metric.

    All systems have translated the same segments, and come with the same metrics in the same order.

    Raises: MtkitError for an unknown test.
    """
    for test in tests:
        if test not in TESTS:
            raise MtkitError(f"no test {shown(test)}{did_you_mean(test, list(TESTS))}; there are: {', '.join(TESTS)}")
    scores, resampled = with_intervals(systems, resamples, progress=progress)
    baseline, *others = systems
    paired = "bootstrap" in tests and bool(resampled)
    distances = shuffle(baseline, others, trials, progress=progress) if others and "randomisation" in tests else None
    differences = []
    for system in range(1, len(systems)):
        found = []
        for number, statistics in enumerate(baseline):
            first, second = scores[0][number], scores[system][number]
            distance = abs(first.value - second.value)
            found.append(
                Difference(
                    first.name,
                    second.value - first.value,
                    _bootstrap_p(resampled[0][number], resampled[system][number], distance) if paired else None,
                    p_value(distances[system - 1][number], distance) if distances else None,
                    statistics.signature(
                        bs=resamples if paired else None,
                        ar=trials if distances else None,
                        seed=str(seed()).lower(),
                    ),
                )
            )
        differences.append(found)
    return Comparison(scores, differences)


def p_value(chances: Numbers, distance: float) -> float:
    """The share of chance's differences that are no smaller than the one found, that one among them; 1 where it is 0.

    sacrebleu counts larger ones alone. It then gives two equal systems, and two that differ in a single segment, the
    smallest p-value there is, which would read as a sure difference.
    """
    if distance == 0:
        return 1.0
    return (int(np.sum(chances >= distance - TIE)) + 1) / (len(chances) + 1)


def _bootstrap_p(baseline: Sequence[Any], system: Sequence[Any], distance: float) -> float:
    """How often resamples move the two systems this much further apart than they are on average."""
    apart = np.abs(np.array([each.score for each in system]) - np.array([each.score for each in baseline]))
    return p_value(apart - apart.mean(), distance)
