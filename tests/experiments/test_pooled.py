import math

import numpy as np
import pytest
from scipy.stats import t, ttest_ind

from mtkit.evaluation.seeds import holm
from mtkit.experiments.pooled import pool


def angles(scores: list[float]) -> list[float]:
    return [math.asin(math.sqrt(score / 100)) for score in scores]


def test_two_entries_are_students_t_test() -> None:
    first, other = [90.0, 92.0, 91.0], [95.0, 93.0]
    found = pool([first, other])
    assert found[1].p == pytest.approx(ttest_ind(angles(first), angles(other)).pvalue)
    assert found[0].p is None
    assert (found[0].mean, found[1].mean, found[1].difference) == (91.0, 94.0, 3.0)


def test_all_entries_share_the_variance() -> None:
    entries = [[40.0, 44.0], [41.0, 42.0], [80.0, 79.0], [60.0]]
    values = [angles(scores) for scores in entries]
    variance = sum(float(np.var(of) * len(of)) for of in values) / 3  # 7 trainings less 4 entries
    found = pool(entries)
    bound = t.ppf(0.975, 3)
    centre = np.mean(values[2])
    for end, sign in ((found[2].low, -1), (found[2].high, 1)):
        assert end == pytest.approx(100 * math.sin(centre + sign * bound * math.sqrt(variance / 2)) ** 2)
    error = math.sqrt(variance * (1 / 2 + 1 / 2))
    low = 100 * math.sin(centre - bound * error) ** 2 - 100 * math.sin(np.mean(values[0])) ** 2
    assert found[2].difference_low == pytest.approx(low)
    errors = [error, error, math.sqrt(variance * 1.5)]
    raw = [2 * t.sf(abs(np.mean(of) - np.mean(values[0])) / one, 3) for of, one in zip(values[1:], errors, strict=True)]
    assert [each.p for each in found[1:]] == pytest.approx(holm(raw))


def test_one_seed_each_has_no_test() -> None:
    assert [each.p for each in pool([[50.0], [60.0]])] == [None, None]
    assert pool([[50.0], [60.0]])[1].difference == 10.0
    assert pool([[100.0, 100.0], [100.0, 100.0]])[1].low is None


def test_the_ends_stay_within_0_and_100() -> None:
    found = pool([[100.0, 100.0], [0.0, 0.0], [50.0, 90.0]])
    assert found[0].high == 100.0
    assert found[1].low == 0.0
    assert all(each.low <= each.mean <= each.high for each in found if each.low is not None and each.high is not None)


@pytest.mark.parametrize("uneven", [[100.0, 80.0], [0.0, 20.0]])
def test_intervals_hold_the_mean_of_scores_that_vary_more_than_the_others(uneven: list[float]) -> None:
    found = pool([[50.0, 50.0], uneven, *[[50.0, 50.0]] * 50])[1]
    assert found.low is not None
    assert found.high is not None
    assert found.difference_low is not None
    assert found.low <= found.mean <= found.high
    assert found.difference_low <= found.difference


def test_few_tests_between_equal_entries_are_significant() -> None:
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        scores = 100 * np.sin(1.2 + 0.03 * random.standard_normal((20, 2))) ** 2
        hits += any(each.p is not None and each.p < 0.05 for each in pool(scores.tolist()))
    assert 0.01 < hits / 300 < 0.08
