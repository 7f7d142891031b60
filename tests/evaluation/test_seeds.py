"""Intervals and tests over seeds and segments: equations written naively, scipy, and values computed by hand."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from mtkit.errors import MtkitError
from mtkit.evaluation.metrics import ALL_METRICS
from mtkit.evaluation.scores import named_metrics, wilson, with_intervals
from mtkit.evaluation.seeds import differences, holm, score_seeds, summarise, summary_of
from mtkit.evaluation.statistics import Statistics, gather
from tests.evaluation.test_statistics import corpus

SEGMENTS = 60
REFERENCES = [corpus(SEGMENTS, 0)]


class Mean:
    """A metric whose score is the mean over segments, so that all variances are known exactly."""

    def _compute_score_from_stats(self, row: Any) -> Any:
        return SimpleNamespace(score=row[0] / row[1])


def means(values: ArrayLike) -> list[Statistics]:
    """The statistics of an entry whose segments have these scores (seeds, segments)."""
    rows = [np.stack([row, np.ones_like(row)], axis=1) for row in np.asarray(values, dtype=np.float64)]
    return [Statistics("mean", [Mean()], row, np.zeros(len(row), dtype=np.intp)) for row in rows]


def crossed(seeds: int, segments: int, seed: int, level: float = 50) -> NDArray[np.float64]:
    """Scores (seeds, segments) with effects of seeds, of segments, and of both; the same segments for each `seed`."""
    of_segments = np.random.default_rng(0).normal(0, 8, segments)
    draw = np.random.default_rng(seed)
    return level + draw.normal(0, 2, (seeds, 1)) + of_segments + draw.normal(0, 6, (seeds, segments))


def entry(name: str, noises: list[float]) -> list[Statistics]:
    return [
        gather(named_metrics([name]), corpus(SEGMENTS, noise, seed), REFERENCES)[0]
        for seed, noise in enumerate(noises, start=1)
    ]


@pytest.mark.parametrize("name", ALL_METRICS)
def test_one_seed_has_the_interval_over_segments(name: str) -> None:
    entries = [entry(name, [0.02]), entry(name, [0.1])]
    expected, _ = with_intervals(entries, 100)
    for summary, (score,) in zip(summarise(score_seeds(entries, 100)), expected, strict=True):
        assert (summary.mean, summary.sd, summary.seeds) == (score.value, None, 1)
        assert (summary.low, summary.high) == pytest.approx((score.low, score.high), abs=1e-9)


@pytest.mark.parametrize("name", ALL_METRICS)
def test_mean_and_deviation_are_those_of_the_seeds_scores(name: str) -> None:
    noises = [0.05, 0.1, 0.08]
    scores = [statistics.result().score for statistics in entry(name, noises)]
    (summary,) = summarise(score_seeds([entry(name, noises)], 100))
    assert summary.mean == pytest.approx(sum(scores) / 3)
    assert summary.sd == pytest.approx((sum((score - summary.mean) ** 2 for score in scores) / 2) ** 0.5)
    assert summary.seeds == 3
    assert summary.low is not None
    assert summary.high is not None
    assert 0 <= summary.low < summary.mean < summary.high


def parts_of(*entries: NDArray[np.float64]) -> tuple[float, float]:
    """Variances that seeds and segments cause in a mean, or a difference of two means, by sums over pairs of seeds."""
    segments = entries[0].shape[1]
    of_seeds = sum(entry.mean(1).var(ddof=1) / len(entry) for entry in entries)
    shared = 0.0
    for entry in entries:
        pairs = [np.cov(one, other)[0, 1] for one, other in itertools.permutations(entry, 2)]
        shared += sum(pairs) / len(pairs) / segments
    if len(entries) > 1:
        pairs = [np.cov(one, other)[0, 1] for one, other in itertools.product(*entries)]
        shared -= 2 * sum(pairs) / len(pairs) / segments
    return of_seeds, shared


def test_variances_are_those_of_crossed_seeds_and_segments() -> None:
    one, two = crossed(3, 80, 1), crossed(4, 80, 2, 53)
    scored = score_seeds([means(one), means(two)], 20_000)
    of_seeds, of_segments = parts_of(one)
    half = (summarise(scored)[0].high or 0) - one.mean()
    # between the half widths of the normal distribution and of Student's with 2 degrees of freedom
    deviation = (of_seeds + of_segments) ** 0.5
    assert 1.96 * deviation < half < 4.31 * deviation
    assert tail(half / deviation, of_seeds / deviation**2, 2, 79) == pytest.approx(0.05, rel=0.03)
    of_seeds, of_segments = parts_of(one, two)
    (tested,) = differences(scored)
    assert tested.value == pytest.approx(two.mean() - one.mean())
    squares = [(each.mean(1).var(ddof=1) / len(each)) ** 2 / (len(each) - 1) for each in (one, two)]
    total = of_seeds + of_segments
    expected = tail(abs(tested.value) / total**0.5, of_seeds / total, of_seeds**2 / sum(squares), 79)
    assert tested.p == pytest.approx(expected, rel=0.03)


def tail(distance: float, share: float, freedom: float, of_segments: float) -> float:
    """The mean of two tails of Student's t, by sums over the density."""

    def student(degrees: float) -> float:
        # with t = tan(angle) sqrt(degrees), the density is cos(angle) ** (degrees - 1)
        angles = np.linspace(0, np.pi / 2, 400_001)
        heights = np.cos(angles) ** (degrees - 1)
        return float(heights[angles >= np.arctan(distance / degrees**0.5)].sum() / heights.sum())

    return share * student(freedom) + (1 - share) * student(of_segments)


def test_without_variation_between_segments_the_test_is_welchs() -> None:
    tested = differences(score_seeds([constant(ONE), constant(TWO)], 50))[0]
    parts = [np.var(values, ddof=1) / len(values) for values in (ONE, TWO)]
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 3)
    assert tested.p == pytest.approx(tail(tested.value / sum(parts) ** 0.5, 1, freedom, 19), rel=1e-4)


ONE, TWO = [50.0, 52.0, 54.0], [56.0, 57.0, 58.0, 61.0]


def constant(values: list[float]) -> list[Statistics]:
    """The statistics of seeds whose segments all have the seed's score."""
    return means(np.repeat(np.array(values)[:, None], 20, axis=1))


@pytest.mark.peer
def test_without_variation_between_segments_the_test_is_that_of_scipy() -> None:
    (tested,) = differences(score_seeds([constant(ONE), constant(TWO)], 50))
    theirs = stats.ttest_ind(TWO, ONE, equal_var=False)
    assert tested.p == pytest.approx(theirs.pvalue, rel=1e-6)
    assert (tested.low, tested.high) == pytest.approx(tuple(theirs.confidence_interval()), rel=1e-6)


def test_without_variation_between_seeds_the_test_is_the_paired_t_test() -> None:
    draw = np.random.default_rng(5)
    one = draw.normal(50, 10, 40)
    two = one + draw.normal(1, 3, 40)
    (tested,) = differences(score_seeds([means([one] * 3), means([two] * 2)], 20_000))
    gaps = two - one
    deviation = gaps.std(ddof=1) / 40**0.5
    assert tested.p == pytest.approx(tail(gaps.mean() / deviation, 0, 1, 39), rel=0.06)
    # one seed: the same test
    (single,) = differences(score_seeds([means([one]), means([two])], 20_000))
    assert single.p == pytest.approx(tested.p, rel=1e-6)
    # one seed against several: the test of these seeds over segments
    several = one + np.array([[0.0], [4.0], [9.0]])
    (mixed,) = differences(score_seeds([means(several), means([two])], 20_000))
    gaps = two - several.mean(axis=0)
    assert mixed.p == pytest.approx(tail(abs(gaps.mean()) / gaps.std(ddof=1) * 40**0.5, 0, 1, 39), rel=0.2)
    assert mixed.p < 1e-6


def test_a_difference_is_significant_if_its_interval_excludes_0() -> None:
    first, seen = crossed(3, 50, 1), set()
    for gap in np.linspace(0, 12, 25):
        (tested,) = differences(score_seeds([means(first), means(crossed(3, 50, 2) + gap)], 100))
        assert tested.low is not None
        assert (tested.low > 0) == (tested.p < 0.05)
        seen.add(tested.p < 0.05)
    assert seen == {True, False}


def test_entries_without_any_variation() -> None:
    same, best = [[70.0] * 10] * 3, [[100.0] * 10] * 3
    scored = score_seeds([means(same), means(same), means(best)], 20)
    equal, better = differences(scored)
    assert (equal.value, equal.p) == (0, 1)
    assert (better.value, better.p, better.low) == (30, 2**-9, 30)  # the sign test of 10 segments
    assert better.p_holm == 2**-8
    assert [(summary.low, summary.high) for summary in summarise(scored)] == [(70, 70)] * 2 + [(100, 100)]


def test_exact_match_of_all_segments_is_not_certain() -> None:
    right, wrong = (
        gather(named_metrics(["exact"]), text, REFERENCES)[0] for text in (REFERENCES[0], ["no"] * SEGMENTS)
    )
    for seeds in (1, 3):
        best, worst = summarise(score_seeds([[right] * seeds, [wrong] * seeds], 20))
        assert (best.mean, best.high, worst.low, worst.mean) == (100, 100, 0, 0)
        assert best.low == pytest.approx(94.0, abs=0.1)  # Wilson's interval of 60 of 60
        assert worst.high == pytest.approx(6.0, abs=0.1)


def test_equal_scores_of_few_seeds_are_not_certain() -> None:
    right, wrong = np.full((2, 100), 100.0), np.full((2, 100), 100.0)
    wrong[0, 3] = wrong[1, 7] = 0
    (tested,) = differences(score_seeds([means(right), means(wrong)], 20_000))
    assert tested.value == -1
    # both seeds have 99: only the segments show the variation, with the standard error of two of 200
    gaps = wrong.mean(axis=0) - 100
    assert tested.p == pytest.approx(tail(1 / (gaps.std(ddof=1) / 10), 0, 1, 99), rel=0.03)
    assert tested.p > 0.1


def exact(matches: NDArray[np.bool_]) -> list[Statistics]:
    """The statistics of exact match (seeds, segments)."""
    ((name, ways),) = named_metrics(["exact"])
    rows = np.stack([matches, np.ones_like(matches)], axis=-1).astype(float)
    return [Statistics(name, ways, row, np.zeros(len(row), dtype=np.intp)) for row in rows]


def test_exact_match_of_several_seeds_has_wilsons_interval() -> None:
    matches = crossed(3, 300, 1, 12) > 0
    (summary,) = summarise(score_seeds([exact(matches)], 20_000))
    of_seeds, of_segments = parts_of(matches * 100.0)
    total = of_seeds + of_segments
    # at both ends, the distance to the mean is the quantile times the standard error of that share
    quantiles = []
    for end in (summary.low, summary.high):
        assert end is not None
        error = (total * end * (100 - end) / summary.mean / (100 - summary.mean)) ** 0.5
        quantiles.append(abs(end - summary.mean) / error)
    assert quantiles[0] == pytest.approx(quantiles[1])
    assert tail(quantiles[0], of_seeds / total, 2, 299) == pytest.approx(0.05, rel=0.03)


def test_segments_add_no_variance_if_seeds_fail_on_different_ones() -> None:
    matches = np.ones((3, 100), dtype=bool)
    matches[0, :10] = matches[1, 10:21] = matches[2, 21:31] = False
    (scores, shares) = (score_seeds([entry], 1000) for entry in (means(matches * 100.0), exact(matches)))
    (summary,) = summarise(scores)
    assert (summary.low, summary.high) == pytest.approx((89.667 - 4.3027 / 3, 89.667 + 4.3027 / 3), abs=1e-3)
    # no more certain than 300 independent segments
    (summary,) = summarise(shares)
    assert (summary.low, summary.high) == pytest.approx(wilson(269, 300, 4.30265), abs=1e-3)


def test_intervals_stay_in_the_range_of_the_metric() -> None:
    (bleu,) = summarise(score_seeds([entry("BLEU", [0.0, 0.2])], 100))
    assert bleu.high == 100
    (ter,) = summarise(score_seeds([entry("TER", [0.0, 1.0])], 100))
    assert ter.low == 0
    assert ter.high is not None
    assert ter.high > 100


def test_one_segment_gives_neither_interval_nor_test() -> None:
    scored = score_seeds([means([[1.0], [2.0]]), means([[4.0], [6.0]])], 20)
    assert [(summary.mean, summary.low, summary.high) for summary in summarise(scored)] == [
        (1.5, None, None),
        (5.0, None, None),
    ]
    (tested,) = differences(scored)
    assert (tested.value, tested.low, tested.high, tested.p) == (3.5, None, None, 1)


def test_entries_on_other_segments_are_refused() -> None:
    with pytest.raises(MtkitError, match="seed 2 of entry 2 has scores of 9 segments and the first entry of 10"):
        score_seeds([means(crossed(1, 10, 1)), [*means(crossed(1, 10, 2)), *means(crossed(1, 9, 3))]])
    with pytest.raises(MtkitError, match="entry 2 has no seed"):
        score_seeds([means(crossed(1, 10, 1)), []])
    assert score_seeds([]) == differences([]) == []
    with pytest.raises(MtkitError, match="1 resamples"):
        score_seeds([means(crossed(1, 10, 1))], 1)


def test_an_interval_of_numbers_is_students() -> None:
    summary = summary_of([1, 2, 3, 4])
    assert (summary.mean, summary.seeds) == (2.5, 4)
    assert summary.sd == pytest.approx((5 / 3) ** 0.5)
    half = 3.182446 * (5 / 3 / 4) ** 0.5  # Student's quantile with 3 degrees of freedom, from its table
    assert (summary.low, summary.high) == pytest.approx((2.5 - half, 2.5 + half), rel=1e-6)
    assert summary_of([3.5]).low is None
    assert summary_of([2, 2, 2]).high == 2
    tiny = summary_of([1e-6, 2e-6, 3e-6, 4e-6])
    assert (tiny.low, tiny.high) == pytest.approx((1e-6 * summary.low, 1e-6 * summary.high))
    diverged = summary_of([1.0, float("inf"), 2.0])
    assert (diverged.mean, diverged.sd, diverged.low, diverged.seeds) == (float("inf"), None, None, 3)


def test_holms_correction_by_hand() -> None:
    # sorted: 4 x 0.005, 3 x 0.01, 2 x 0.03, and 0.04 is raised to 0.06
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7, 0.02]) == pytest.approx([1, 1, 0.06])
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


@pytest.mark.peer
def test_holms_correction_is_that_of_statsmodels() -> None:
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    p_values = np.random.default_rng(3).random(40) ** 3
    p_values[7] = p_values[9]
    assert holm(p_values.tolist()) == pytest.approx(multitest.multipletests(p_values, method="holm")[1].tolist())
