"""Mean ranks, Friedman's test and critical differences: Demšar's example and table, scipy, and brute force."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from mtkit.errors import MtkitError
from mtkit.evaluation.ranks import rank

DEMSAR = np.array(
    [
        [4, 3, 2, 1],
        [1, 2, 3, 4],
        [4, 1, 2, 3],
        [4, 1, 3, 2],
        [4, 2, 3, 1],
        [1, 2.5, 4, 2.5],
        [3, 2, 4, 1],
        [2.5, 2.5, 4, 1],
        [4, 3, 2, 1],
        [2.5, 2.5, 2.5, 2.5],
        [4, 2.5, 1, 2.5],
        [3, 2, 4, 1],
        [4, 1, 2, 3],
        [3, 1, 4, 2],
    ]
)
"""Ranks of four classifiers on 14 data sets in table 6 of Demšar (2006)."""

TABLE_5 = [1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164]
"""Demšar's table 5: critical values of Nemenyi's test at 5% for 2 to 10 classifiers."""


def test_demsars_example() -> None:
    ranks = rank(DEMSAR, lower_is_better=True)
    assert ranks.means == pytest.approx([3.143, 2.000, 2.893, 1.964], abs=5e-4)
    assert ranks.blocks == 14
    # 9.28 and 3.69 in the paper are not corrected for ties: of 2 entries in 3 blocks, and of 4 entries in one
    assert ranks.friedman == pytest.approx(9.28 / (1 - (3 * 6 + 60) / (14 * 60)), rel=1e-3)
    assert ranks.iman_davenport == pytest.approx(13 * ranks.friedman / (14 * 3 - ranks.friedman))
    assert ranks.critical == pytest.approx(1.25, abs=5e-3)
    assert ranks.groups == [[3, 1, 2, 0]]


def test_critical_values_are_demsars() -> None:
    for entries, critical in enumerate(TABLE_5, start=2):
        scale = (entries * (entries + 1) / 6 / 7) ** 0.5
        assert rank(np.ones((7, entries))).critical / scale == pytest.approx(critical, abs=1.1e-3)


def test_scores_become_ranks() -> None:
    scores = [[0.5, 0.9, 0.7, 0.9], [0.1, 0.3, 0.2, 0.4]]
    assert rank(scores).means == [4, 1.75, 3, 1.25]
    assert rank(scores, lower_is_better=True).means == [1, 3.25, 2, 3.75]
    assert rank([[float("inf"), 1.0, 2.0]], lower_is_better=True).means == [3, 1, 2]


def test_groups_are_the_maximal_ones() -> None:
    draw = np.random.default_rng(0)
    sizes = set()
    for blocks in (3, 8, 20, 60):
        ranks = rank(draw.normal(size=(blocks, 9)) + np.arange(9) / 2)
        means = ranks.means
        alike = [
            set(group)
            for size in range(2, 10)
            for group in itertools.combinations(range(9), size)
            if max(means[entry] for entry in group) - min(means[entry] for entry in group) < ranks.critical
        ]
        maximal = [group for group in alike if not any(group < other for other in alike)]
        assert sorted(map(sorted, maximal)) == sorted(map(sorted, ranks.groups))
        assert all(means[one] <= means[other] for group in ranks.groups for one, other in itertools.pairwise(group))
        sizes.add(len(maximal))
    assert len(sizes) > 1


def test_blocks_that_agree_do_so_by_chance_with_the_exact_probability() -> None:
    ranks = rank(np.tile(np.arange(4.0), (3, 1)))
    assert ranks.iman_davenport == math.inf
    assert ranks.p == pytest.approx(1 / math.factorial(4) ** 2)
    # two of four entries are tied: 12 orders
    assert rank(np.tile([1.0, 1.0, 2.0, 3.0], (3, 1))).p == pytest.approx(1 / 12**2)
    assert rank(np.tile(np.arange(200.0), (3, 1))).p == 0


def test_ties_and_a_single_block_show_no_difference() -> None:
    for scores in (np.ones((5, 3)), np.ones((1, 3)), np.arange(3.0)[None]):
        ranks = rank(scores)
        assert ranks.p == 1
        assert len(ranks.groups) == 1
    assert rank(np.ones((5, 3))).friedman == 0


@pytest.mark.parametrize("shape", [(0, 3), (3, 1), (4,)])
def test_too_few_scores_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(MtkitError, match="at least 1 block of 2 entries"):
        rank(np.ones(shape))


def test_a_missing_score_is_named() -> None:
    with pytest.raises(MtkitError, match="block 2 has no score of entry 3"):
        rank([[1, 2, 3], [1, 2, float("nan")]])


def test_false_positives_are_5_per_cent() -> None:
    draw = np.random.default_rng(1)
    positives = [rank(draw.normal(size=(12, 5))).p < 0.05 for _ in range(2000)]
    assert 0.04 < np.mean(positives) < 0.06


@pytest.mark.peer
def test_ranks_are_those_of_scipy() -> None:
    scores = np.random.default_rng(2).integers(0, 6, (12, 7)).astype(float)
    ranks = rank(scores)
    assert ranks.means == pytest.approx(stats.rankdata(-scores, axis=1).mean(axis=0).tolist())
    assert ranks.friedman == pytest.approx(stats.friedmanchisquare(*scores.T).statistic)
    assert ranks.p == pytest.approx(stats.f.sf(ranks.iman_davenport, 6, 6 * 11), rel=1e-9)
