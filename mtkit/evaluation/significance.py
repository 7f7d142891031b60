"""Significance tests between systems: paired bootstrap and approximate randomisation.

Paired bootstrap resampling after Koehn (2004), approximate randomisation after Riezler and Maxwell (2005), both
two-sided, with sacrebleu's draws. The p-values of randomisation are sacrebleu's, except for ties (`p_value`). sacrebleu
2.6's bootstrap p-value of a clear difference is about half of mtkit's: it centres absolute differences, which counts
one tail only, and so rejects about 10% of equal systems at a level of 5%.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtkit.errors import MtkitError, did_you_mean, shown
from mtkit.evaluation.scores import RESAMPLES, Score, digits_of, with_intervals
from mtkit.evaluation.statistics import Numbers, Statistics, seed, shuffle
from mtkit.terminal import ProgressBar, silent

TESTS = ("bootstrap", "randomisation")
TRIALS = 10_000


TIE = 1e-5
"""Tolerance within which score differences are equal: some metrics compute in single precision."""

RELATIVE_TIE = 1e-6
"""Tolerance for small scores, as a share of the larger one: the means of given segment scores have any scale."""


@dataclass(frozen=True)
class Difference:
    """Difference between a system and the baseline in one metric, with two-sided p-values.

    A p-value is None if its test was not requested, and 1 if the two scores are equal.
    """

    metric: str
    value: float
    """The system's score minus the baseline's score."""
    bootstrap_p: float | None
    randomisation_p: float | None
    signature: str
    """The metric's signature, with the numbers of resamples (bs) and trials (ar)."""

    @property
    def text(self) -> str:
        """The difference, rounded for tables."""
        return f"{self.value:+.{digits_of(self.signature)}f}"


@dataclass(frozen=True)
class Comparison:
    """Scores of several systems on the same segments; the first is the baseline."""

    scores: list[list[Score]]
    """Scores of each system, including the baseline, by metric."""
    differences: list[list[Difference]]
    """Differences of each system except the baseline, by metric."""


def compare_systems(
    systems: Sequence[Sequence[Statistics]],
    *,
    tests: Sequence[str] = TESTS,
    resamples: int = RESAMPLES,
    trials: int = TRIALS,
    progress: ProgressBar = silent,
) -> Comparison:
    """Score systems with intervals, and test each system against the first in every metric.

    All systems have translated the same segments, and have the same metrics in the same order.

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
        system_differences = []
        for number, statistics in enumerate(baseline):
            first, second = scores[0][number], scores[system][number]
            distance = abs(first.value - second.value)
            tie = min(TIE, RELATIVE_TIE * max(abs(first.value), abs(second.value)))
            system_differences.append(
                Difference(
                    first.name,
                    second.value - first.value,
                    _bootstrap_p(resampled[0][number], resampled[system][number], distance, tie) if paired else None,
                    p_value(distances[system - 1][number], distance, tie) if distances else None,
                    statistics.signature(
                        bs=resamples if paired else None, ar=trials if distances else None, seed=str(seed()).lower()
                    ),
                )
            )
        differences.append(system_differences)
    return Comparison(scores, differences)


def p_value(chances: Numbers, distance: float, tie: float = TIE) -> float:
    """Return (n + 1) / (trials + 1), with n the number of chance differences >= `distance`; 1 if `distance` is 0.

    Differences that are less than `tie` apart are equal.

    sacrebleu counts only larger differences. Its p-value is then the smallest possible, as for a significant
    difference, for two equal systems and for two systems that differ in a single segment.
    """
    if distance == 0:
        return 1.0
    return (int(np.sum(chances >= distance - tie)) + 1) / (len(chances) + 1)


def _bootstrap_p(baseline: Sequence[Any], system: Sequence[Any], distance: float, tie: float) -> float:
    """Return the two-sided p-value of `distance` under the resamples' score differences, centred at their mean."""
    gaps = np.array([score.score for score in system]) - np.array([score.score for score in baseline])
    return p_value(np.abs(gaps - gaps.mean()), distance, tie)
