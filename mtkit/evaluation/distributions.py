"""Tail probabilities and quantiles for tests: Student's t, Fisher's F, a fair coin and the studentised range.

mtkit does without scipy for these functions; its tests compare them with scipy.
"""

import math
from collections.abc import Callable
from functools import cache
from statistics import NormalDist

import numpy as np

TINY = 1e-300
"""Replaces 0 in the continued fraction."""

STEPS = 100_000
"""Maximum steps of the continued fraction; it takes about as many as the square root of the degrees of freedom."""


def t_tail(distance: float, freedom: float) -> float:
    """Return the probability that the absolute value of Student's t exceeds `distance` (two-sided)."""
    return f_tail(distance * distance, 1, freedom)


def f_tail(value: float, numerator: float, denominator: float) -> float:
    """Return the probability that F exceeds `value`, with the degrees of freedom of numerator and denominator."""
    return _incomplete_beta(denominator / 2, numerator / 2, denominator / (denominator + numerator * value))


def coin_tail(heads: int, tosses: int) -> float:
    """Return the probability that a fair coin shows at most so many heads, fewer than `tosses`."""
    return _incomplete_beta(tosses - heads, heads + 1, 0.5)


def solve(tail: Callable[[float], float], probability: float) -> float:
    """Return the value x > 0 at which the decreasing function `tail` equals `probability`, to 10 digits."""
    low, high = 0.0, 1.0
    while tail(high) > probability:
        low, high = high, 2 * high
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) > probability else (low, middle)
    return (low + high) / 2


@cache
def range_quantile(groups: int) -> float:
    """Return the 95% quantile of the range of `groups` (at least 2) independent standard normal variables.

    This is the studentised range with infinite degrees of freedom: the probability of a range below q is the integral
    over z of groups φ(z) [Φ(z) - Φ(z - q)]^(groups - 1).
    """
    normal = NormalDist()
    grid = np.linspace(-9.0, 9.0, 901)
    density = np.array([normal.pdf(point) for point in grid])
    cumulative = np.array([normal.cdf(point) for point in grid])

    def tail(distance: float) -> float:
        inside = cumulative - np.array([normal.cdf(point - distance) for point in grid])
        return float(1 - groups * np.sum(density * inside ** (groups - 1)) * (grid[1] - grid[0]))

    return solve(tail, 0.05)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b) (Press et al., Numerical Recipes, section 6.4)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only below
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) * _continued_fraction(a, b, x) / a


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of the incomplete beta function, by Lentz's method."""
    upper, lower = 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1))
    product = lower
    for step in range(1, STEPS):
        for factor in (
            step * (b - step) * x / ((a + 2 * step - 1) * (a + 2 * step)),
            -(a + step) * (a + b + step) * x / ((a + 2 * step) * (a + 2 * step + 1)),
        ):
            lower = 1 / _nonzero(1 + factor * lower)
            upper = _nonzero(1 + factor / upper)
            product *= lower * upper
        if abs(lower * upper - 1) < 1e-14:
            break
    return product


def _nonzero(value: float) -> float:
    return value if abs(value) > TINY else TINY
