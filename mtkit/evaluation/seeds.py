"""Scores of entries with several seeds: intervals over seeds and test segments together, and tests against the first.

An entry is a model trained with n seeds; all seeds of all entries translated the same test segments. The score of
seed i is y_i = entry + seed_i + segments + interaction_i: new seeds and new segments would give another mean. The
squared standard error of the mean over seeds is the sum of two parts:

- seeds: s² / n, with the standard deviation s of the y_i, which includes the interaction;
- segments: the variance that all seeds share, since they translated the same segments. It is the mean covariance
  between the scores of two seeds on the same bootstrap resamples (Koehn, 2004) of the segments.

The error relative to the standard error follows Student's t with few degrees of freedom as far as the seeds cause it,
and almost the normal distribution as far as the segments do. The tail probability used here is the mean of the two,
weighted with the parts' shares of the variance; Cochran and Cox (Experimental Designs, 1950) weight quantiles so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mtkit.errors import MtkitError
from mtkit.evaluation.distributions import solve, t_tail
from mtkit.evaluation.scores import RESAMPLES, percentiles, wilson
from mtkit.evaluation.significance import TIE
from mtkit.evaluation.statistics import Numbers, Statistics, resampled_values

INTERVALS = (
    "Intervals are 95% confidence intervals over seeds and test segments together: "
    "Student's t over seeds, bootstrap over segments."
)
"""Caption of a table in which entries have several seeds."""

ONE_SEED = (
    "Intervals are 95% confidence intervals over test segments: bootstrap, and Wilson's interval for exact match. "
    "They do not cover the variation between trainings, which needs several seeds."
)
"""Caption of a table in which entries have one seed."""

TESTS = (
    "p is the probability of a difference to the first entry at least as large by chance (two-sided), over independent "
    "seeds and paired test segments, adjusted by Holm's method for the number of entries."
)
"""Caption of p-values if all entries have several seeds."""

ONE_SEED_TESTS = (
    "p is the probability of a difference to the first entry at least as large by chance (two-sided), over paired test "
    "segments only, adjusted by Holm's method for the number of entries."
)
"""Caption of p-values if an entry has one seed."""


@dataclass(frozen=True)
class SeedScores:
    """Scores of one entry in one metric."""

    metric: str
    values: Numbers
    """Corpus score of each seed (seeds,)."""
    samples: Numbers
    """Scores of the seeds on resampled segments (seeds, resamples); all entries have the same resamples."""
    segments: int


@dataclass(frozen=True)
class Summary:
    """Mean over seeds with a 95% interval."""

    mean: float
    sd: float | None
    """Standard deviation over seeds (divisor seeds - 1); None with one seed."""
    low: float | None
    """Lower end of the interval; None if the data has no variance to estimate it from."""
    high: float | None
    seeds: int


@dataclass(frozen=True)
class Tested:
    """Difference of an entry from the first, with a 95% interval and two-sided p-values."""

    value: float
    """The entry's mean minus the first entry's mean."""
    low: float | None
    high: float | None
    p: float
    p_holm: float
    """p adjusted by `holm` for all entries that are tested."""


def score_seeds(entries: Sequence[Sequence[Statistics]], resamples: int = RESAMPLES) -> list[SeedScores]:
    """Score each seed of each entry in one metric, on the whole test side and on resamples of its segments.

    `entries` holds the seeds' statistics by entry; entries may have different numbers of seeds, at least one.

    Raises: MtkitError if an entry has no seed, seeds have different numbers of segments, or there are fewer than 2
    resamples.
    """
    if resamples < 2:
        raise MtkitError(f"{resamples} resamples give no interval; set {RESAMPLES}")
    for number, entry in enumerate(entries):
        if not entry:
            raise MtkitError(f"entry {number + 1} has no seed with scores; leave it out")
    if not entries:
        return []
    flat = [statistics for entry in entries for statistics in entry]
    segments = len(flat[0].rows)
    for number, entry in enumerate(entries):
        for seed, statistics in enumerate(entry):
            if len(statistics.rows) != segments:
                raise MtkitError(
                    f"seed {seed + 1} of entry {number + 1} has scores of {len(statistics.rows):,} segments and the "
                    f"first entry of {segments:,}; compare entries on the same test segments"
                )
    samples = resampled_values(flat, resamples)
    values = np.array([float(statistics.result().score) for statistics in flat])
    ends = np.cumsum([len(entry) for entry in entries])[:-1]
    return [
        SeedScores(flat[0].name, of_entry, drawn, segments)
        for of_entry, drawn in zip(np.split(values, ends), np.split(samples, ends), strict=True)
    ]


def summarise(entries: Sequence[SeedScores]) -> list[Summary]:
    """Return each entry's mean and interval over seeds and segments.

    With one seed, the interval is computed over segments (`with_intervals`). Exact match has Wilson's interval in both
    cases; with several seeds, for the number of independent segments that would have the same standard error. Intervals
    are cut at 0, and at 100 except for TER.

    In simulations with 2, 3 and 5 seeds they contain the true mean in 93 to 99%, 94 to 99% and 94 to 98% of studies; in
    90 to 92% if seeds are far from normal. A bootstrap of seeds and segments covers down to 77, 85 and 92%, and less
    than half near 100% exact match (docs/compare-statistics.md).
    """
    return [_summary(entry) for entry in entries]


def summary_of(values: Sequence[float]) -> Summary:
    """Return the mean of one value per seed, with Student's interval over seeds; one seed or infinity has none."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2 or not math.isfinite(mean):
        return Summary(mean, None, None, None, count)
    sd = float(np.std(values, ddof=1))
    # without TIE: these values have any scale
    margin = sd / math.sqrt(count) * solve(partial(t_tail, freedom=count - 1), 0.05)
    return Summary(mean, sd, mean - margin, mean + margin, count)


def differences(entries: Sequence[SeedScores]) -> list[Tested]:
    """Test each entry except the first against the first, over seeds and segments together.

    Segments are paired. Seeds are independent samples of the two entries (Welch, 1947), even if both entries have the
    same list of seeds: a seed shares little between two mechanisms, and pairing would halve the degrees of freedom.
    If equal seeds raise or lower both scores, the test is conservative.

    In simulations, 0 to 4% of tests between equal entries have p < 5%, and up to 6% with 3 against 5 seeds
    (docs/compare-statistics.md); more if 2 seeds vary much and 5 vary little. The test assumes normal scores of seeds.
    No test without this assumption has a p-value below 10% with 3 seeds per entry: 2 of the 20 permutations are as
    extreme as the order.
    """
    if not entries:
        return []
    first = entries[0]
    tests = [_tested(first, entry) for entry in entries[1:]]
    adjusted = holm([test.p for test in tests])
    return [replace(test, p_holm=p) for test, p in zip(tests, adjusted, strict=True)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down method (1979), which bounds the chance of any false positive."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for position, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(p_values[index] * (len(p_values) - position), 1.0))
        adjusted[index] = highest
    return adjusted


@dataclass(frozen=True)
class _Error:
    """Parts of the variance of a mean, or of the difference between means."""

    seeds: float
    freedom: float
    """Degrees of freedom of `seeds`."""
    segments: float
    count: int
    """Number of segments."""

    @property
    def variance(self) -> float:
        total = self.seeds + self.segments
        return total if total > TIE**2 else 0.0  # some metrics compute in single precision

    def tail(self, distance: float) -> float:
        """Return the two-sided probability of a larger distance, in standard errors."""
        share = self.seeds / self.variance
        of_segments = (1 - share) * t_tail(distance, self.count - 1) if share < 1 else 0.0
        return (share * t_tail(distance, self.freedom) if share > 0 else 0.0) + of_segments

    def quantile(self) -> float:
        """Return the half width of the 95% interval in standard errors."""
        return solve(self.tail, 0.05)

    def margin(self) -> float:
        """Return the half width of the 95% interval."""
        return math.sqrt(self.variance) * self.quantile() if self.variance else 0.0

    def p_value(self, difference: float) -> float:
        """Return the two-sided p-value of a difference.

        Without any variance, all segments differ by the same amount, and p is the sign test's.
        """
        if abs(difference) < TIE:
            return 1.0
        if not self.variance:
            return 2.0 ** (1 - self.count)
        return self.tail(abs(difference) / math.sqrt(self.variance))


def _summary(entry: SeedScores) -> Summary:
    mean, seeds = float(entry.values.mean()), len(entry.values)
    if seeds == 1:
        low, high = (
            wilson(mean * entry.segments / 100, entry.segments)
            if entry.metric == "exact"
            else percentiles(entry.samples[0].tolist())
        )
        return Summary(mean, None, low, high, 1)
    sd = float(entry.values.std(ddof=1))
    if entry.segments == 1:  # one segment shows no variation between segments
        return Summary(mean, sd, None, None, seeds)
    error = _error([entry])
    if entry.metric == "exact":
        low, high = _exact_interval(mean, error, seeds)
    else:
        margin = error.margin()
        low, high = max(mean - margin, 0.0), mean + margin
        high = high if entry.metric == "TER" else min(high, 100.0)
    return Summary(mean, sd, low, high, seeds)


def _exact_interval(mean: float, error: _Error, seeds: int) -> tuple[float, float]:
    """Return Wilson's interval for as many independent segments as have the standard error, at most all seeds'.

    If all segments match, or none, the variance is 0, and the interval is one seed's.
    """
    if not error.variance:
        return wilson(mean * error.count / 100, error.count)
    segments = min(mean * (100 - mean) / error.variance, seeds * error.count)
    return wilson(mean * segments / 100, segments, error.quantile())


def _tested(first: SeedScores, entry: SeedScores) -> Tested:
    value = float(entry.values.mean() - first.values.mean())
    if first.segments == 1:
        return Tested(value, None, None, 1.0, 1.0)
    error = _error([entry, first])
    margin, p = error.margin(), error.p_value(value)
    return Tested(value, value - margin, value + margin, p, p)


def _error(entries: Sequence[SeedScores]) -> _Error:
    """Return the error of an entry's mean, or of the difference between two entries' means.

    If an entry has one seed, the error is the error over segments, for these seeds.
    """
    count = entries[0].segments
    means = [entry.samples.mean(axis=0) for entry in entries]
    gap = means[0] - means[1] if len(means) > 1 else means[0]
    fixed = _covariance(gap, gap, count)
    if min(len(entry.values) for entry in entries) == 1:
        return _Error(0.0, 1.0, fixed, count)
    parts = [float(entry.values.var(ddof=1)) / len(entry.values) for entry in entries]
    squares = sum(part**2 / (len(entry.values) - 1) for part, entry in zip(parts, entries, strict=True))
    shared = sum(_shared_variance(entry) for entry in entries)
    if len(means) > 1:
        shared -= 2 * _covariance(means[0], means[1], count)
    error = _Error(sum(parts), sum(parts) ** 2 / squares if squares else 1.0, max(shared, 0.0), count)
    # scores of few seeds on few segments may be equal by chance
    return error if error.variance else _Error(0.0, 1.0, fixed, count)


def _shared_variance(entry: SeedScores) -> float:
    """Return the mean covariance over segments between two seeds of an entry; it may be below 0 by chance."""
    seeds, mean = len(entry.samples), entry.samples.mean(axis=0)
    of_mean = seeds**2 * _covariance(mean, mean, entry.segments)
    return (of_mean - sum(_covariance(sample, sample, entry.segments) for sample in entry.samples)) / (
        seeds * (seeds - 1)
    )


def _covariance(one: Numbers, other: Numbers, segments: int) -> float:
    """Return the covariance of two scores over segments, from their resamples (resamples,).

    Resamples of n segments vary less than samples of n new segments, by (n - 1) / n.
    """
    return float(np.mean((one - one.mean()) * (other - other.mean()))) * segments / (segments - 1)
