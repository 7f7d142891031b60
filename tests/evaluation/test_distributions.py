"""Tails and quantiles: printed tables, and scipy."""

import math

import pytest
from scipy import stats

from mtkit.evaluation.distributions import coin_tail, f_tail, range_quantile, solve, t_tail


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (10, 2.22814), (120, 1.97993), (1e6, 1.95997)]
)
def test_quantiles_of_student(freedom: float, quantile: float) -> None:
    assert solve(lambda distance: t_tail(distance, freedom), 0.05) == pytest.approx(quantile, rel=3e-6)


def test_tails_of_student_in_closed_form() -> None:
    for distance in (0.01, 1, 3, 50, 1e4):
        assert t_tail(distance, 1) == pytest.approx(1 - 2 / math.pi * math.atan(distance), rel=1e-9)
        assert t_tail(distance, 2) == pytest.approx(1 - distance / math.sqrt(2 + distance**2), rel=1e-7)
    assert t_tail(0, 5) == 1
    assert t_tail(math.inf, 5) == 0


def test_tails_of_f_from_its_table() -> None:
    for numerator, denominator, value in ((4, 10, 3.4780), (1, 5, 6.6079), (20, 30, 1.9317), (3, 39, 2.8451)):
        assert f_tail(value, numerator, denominator) == pytest.approx(0.05, abs=1e-5)


def test_quantiles_of_the_studentised_range_from_its_table() -> None:
    for groups, quantile in ((2, 2.77), (3, 3.31), (5, 3.86), (10, 4.47), (20, 5.01), (40, 5.50), (80, 5.95)):
        assert range_quantile(groups) == pytest.approx(quantile, abs=5e-3)


def test_a_missing_number_ends() -> None:
    assert math.isnan(t_tail(math.nan, 3))


@pytest.mark.peer
def test_distributions_are_those_of_scipy() -> None:
    for freedom in (1, 1.3, 2, 3.7, 99, 1e4):
        for distance in (1e-3, 0.5, 1.96, 5, 30):
            assert t_tail(distance, freedom) == pytest.approx(2 * stats.t.sf(distance, freedom), rel=1e-8)
            assert f_tail(distance, 78, freedom) == pytest.approx(stats.f.sf(distance, 78, freedom), rel=1e-8)
    for heads, tosses in ((0, 1), (3, 10), (400, 1000), (49_000, 100_000)):
        assert coin_tail(heads, tosses) == pytest.approx(stats.binom.cdf(heads, tosses, 0.5), rel=1e-8)
    for groups in (2, 7, 80):
        theirs = stats.studentized_range.ppf(0.95, groups, math.inf)
        assert range_quantile(groups) == pytest.approx(theirs, rel=1e-8)
