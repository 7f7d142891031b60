"""Coverage of intervals and false positives of tests, by simulation: new seeds and new segments in each trial.

The slow test prints the table of docs/compare-statistics.md:
`pytest -n 0 -m slow -s tests/evaluation/test_seeds_coverage.py`.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mtkit.evaluation.scores import named_metrics
from mtkit.evaluation.seeds import SeedScores, differences, score_seeds, summarise
from mtkit.evaluation.statistics import Statistics, gather
from tests.evaluation.test_seeds import Mean
from tests.evaluation.test_statistics import corpus

Numbers = NDArray[np.float64]
Generator = np.random.Generator
POOL, VERSIONS = 2000, 8


class Population:
    """Entries of which any number of seeds can be drawn, on any number of segments."""

    def __init__(self, metric: str, of_seeds: float, of_segments: float, of_both: float, level: float) -> None:
        """The quality of a translation is normal, with these standard deviations of its three parts."""
        self.metric = metric
        self.parts = of_seeds, of_segments, of_both
        self.level = level

    def segments(self, draw: Generator, count: int) -> tuple[Any, Numbers]:
        """Segments of the test side, with the difficulty of each (segments,)."""
        return draw.integers(0, POOL, count), draw.normal(0, self.parts[1], count)

    def seeds(self, draw: Generator, count: int, segments: tuple[Any, Numbers]) -> list[Statistics]:
        """The statistics of the seeds' translations of the segments."""
        lines, difficulty = segments
        seeds = self.level + draw.normal(0, self.parts[0], (count, 1))
        quality = seeds + difficulty + draw.normal(0, self.parts[2], (count, len(lines)))
        metric, rows = self.rows(lines, quality)
        return [Statistics(self.metric, [metric], row, np.zeros(len(lines), dtype=np.intp)) for row in rows]

    def rows(self, lines: Any, quality: Numbers) -> tuple[Any, Numbers]:
        """Sufficient statistics (seeds, segments, numbers) of translations of this quality (seeds, segments)."""
        if self.metric == "mean":
            return Mean(), np.stack([quality, np.ones_like(quality)], axis=-1)
        if self.metric == "exact":
            ((_, (metric,)),) = named_metrics(["exact"])
            return metric, np.stack([quality > 0, np.ones_like(quality)], axis=-1)
        metric, versions = translations(self.metric)
        return metric, versions[lines, np.clip(np.rint(quality), 0, VERSIONS - 1).astype(int)]

    @cached_property
    def truth(self) -> float:
        """The mean score of all seeds on all segments."""
        if self.metric == "mean":
            return self.level
        draw = np.random.default_rng(99)
        scores = []
        for _ in range(300):
            (statistics,) = self.seeds(draw, 1, self.segments(draw, 20_000))
            scores.append(statistics.result().score)
        return float(np.mean(scores))


@cache
def translations(name: str) -> tuple[Any, Numbers]:
    """A metric, and its rows (segments, versions, numbers) for translations that become better with the version."""
    ((_, (metric,)),) = metrics = named_metrics([name])
    references = [corpus(POOL, 0)]
    texts = [corpus(POOL, 0.7 - 0.1 * version, version + 2) for version in range(VERSIONS)]
    return metric, np.stack([gather(metrics, text, references)[0].rows for text in texts], axis=1)


def bootstrap(scored: SeedScores) -> tuple[float, float]:
    """The interval of the bootstrap that resamples seeds and segments, for comparison."""
    seeds, resamples = scored.samples.shape
    chosen = np.random.default_rng(3).integers(0, seeds, (seeds, resamples))
    low, high = np.percentile(np.take_along_axis(scored.samples, chosen, axis=0).mean(axis=0), [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Rates:
    """Shares of trials, in per cent."""

    covered: float
    bootstrap_covered: float
    positives: float
    """Two entries of one population with p < 5%."""


def simulate(population: Population, seeds: int, others: int, trials: int, segments: int, resamples: int) -> Rates:
    """Compare two entries of the population in each trial, with `seeds` and `others` seeds."""
    truth, draw = population.truth, np.random.default_rng(seeds)
    covered = bootstrap_covered = positives = 0
    for _ in range(trials):
        side = population.segments(draw, segments)
        scored = score_seeds([population.seeds(draw, count, side) for count in (seeds, others)], resamples)
        interval = summarise(scored[:1])[0]
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= truth <= interval.high
        low, high = bootstrap(scored[0])
        bootstrap_covered += low <= truth <= high
        positives += differences(scored)[0].p < 0.05
    return Rates(*(100 * count / trials for count in (covered, bootstrap_covered, positives)))


NORMAL = Population("mean", 2, 3, 2, 50)


@pytest.mark.parametrize("seeds", [3, 5])
def test_intervals_cover_and_tests_keep_their_level(seeds: int) -> None:
    rates = simulate(NORMAL, seeds, seeds, trials=250, segments=60, resamples=100)
    assert 92 < rates.covered < 99
    assert rates.bootstrap_covered < rates.covered - 3
    assert 1.5 < rates.positives < 8


CASES = {
    "BLEU, seeds differ most": Population("BLEU", 0.5, 1, 1, 4),
    "BLEU": Population("BLEU", 0.12, 1.5, 1, 4),
    "BLEU, segments differ most": Population("BLEU", 0.02, 2, 1, 4),
    "TER": Population("TER", 0.12, 1.5, 1, 4),
    "exact, 50%": Population("exact", 0.15, 1, 1, 0),
    "exact, 99%": Population("exact", 0.3, 1, 1, 3.4),
    "exact, 99.9%": Population("exact", 0.3, 1, 1, 4.6),
    "exact, 96%, skewed seeds": Population("exact", 1, 1, 1, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_coverage_and_false_positives_of_metrics(case: str) -> None:
    cells = []
    for seeds, others in ((2, 2), (3, 3), (5, 5), (3, 5)):
        rates = simulate(CASES[case], seeds, others, trials=500, segments=200, resamples=200)
        cells.append(f"{rates.covered:.1f} ({rates.bootstrap_covered:.1f}) {rates.positives:.1f}")
        skewed = "skewed" in case
        assert rates.covered > (85 if skewed else 88 if seeds == 2 else 92)
        assert rates.positives < (9 if seeds == 2 else 7)
    print(f"\n{case} | " + " | ".join(cells))
