"""Mean ranks of entries over blocks, with critical differences, for a rank plot (Demšar, JMLR 2006)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from mtkit.errors import MtkitError
from mtkit.evaluation.distributions import f_tail, range_quantile
from mtkit.evaluation.statistics import Numbers


@dataclass(frozen=True)
class Ranks:
    """Mean ranks of entries, and which of them may be equal."""

    means: list[float]
    """Mean rank of each entry; 1 is the best possible."""
    blocks: int
    friedman: float
    """Friedman's chi-square statistic, corrected for ties."""
    iman_davenport: float
    """Iman and Davenport's F statistic; infinite if all blocks have the same ranks."""
    p: float
    """Probability of an F at least as large if the entries do not differ."""
    critical: float
    """Nemenyi's critical difference: mean ranks that are at least so far apart differ at 5%, for all pairs together."""
    groups: list[list[int]]
    """Indices of entries that do not differ from each other, by rank: the largest such groups, of 2 entries or more."""


def rank(scores: ArrayLike, *, lower_is_better: bool = False) -> Ranks:
    """Rank entries within each block, and test whether they differ; `scores` is (blocks, entries).

    Tied entries share the mean of their ranks. A block is a task with a seed. Friedman's test takes blocks as
    independent, but blocks of one task share its test segments: with few tasks, p and the critical difference describe
    new seeds on these tasks, not new tasks or new test segments.

    Raises: MtkitError for less than 2 entries, no block, or a score that is missing (NaN).
    """
    table = np.asarray(scores, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] < 2 or not len(table):
        raise MtkitError(f"ranks need at least 1 block of 2 entries; the scores have the shape {table.shape}")
    if np.isnan(table).any():
        block, entry = np.argwhere(np.isnan(table))[0]
        raise MtkitError(f"block {block + 1} has no score of entry {entry + 1}; leave the block or the entry out")
    ranks = _ranks(table if lower_is_better else -table)
    blocks, entries = ranks.shape
    means = ranks.mean(axis=0)
    spread = float(np.sum((ranks - (entries + 1) / 2) ** 2))
    between = blocks**2 * float(np.sum((means - (entries + 1) / 2) ** 2))
    friedman = (entries - 1) * between / spread if spread else 0.0
    statistic, p = _iman_davenport(friedman, ranks)
    critical = range_quantile(entries) / math.sqrt(2) * math.sqrt(entries * (entries + 1) / (6 * blocks))
    return Ranks(means.tolist(), blocks, friedman, statistic, p, critical, _groups(means.tolist(), critical))


def _ranks(table: Numbers) -> Numbers:
    """Return ranks from 1 within each row, smallest value first."""
    smaller = (table[:, None, :] < table[:, :, None]).sum(axis=2)
    equal = (table[:, None, :] == table[:, :, None]).sum(axis=2)
    return smaller + (equal + 1) / 2


def _iman_davenport(friedman: float, ranks: Numbers) -> tuple[float, float]:
    """Return Iman and Davenport's F (1980) and its p-value.

    If all blocks have the same ranks, F is infinite, and p is the exact probability that they agree by chance.
    """
    blocks, entries = ranks.shape
    rest = blocks * (entries - 1) - friedman
    if not friedman:
        return 0.0, 1.0
    if rest < 1e-9 * friedman:
        ties = np.unique(ranks[0], return_counts=True)[1].tolist()
        orders = math.factorial(entries) // math.prod(math.factorial(tie) for tie in ties)
        return math.inf, math.exp((1 - blocks) * math.log(orders))
    statistic = (blocks - 1) * friedman / rest
    return statistic, f_tail(statistic, entries - 1, (entries - 1) * (blocks - 1))


def _groups(means: Sequence[float], critical: float) -> list[list[int]]:
    """Return the maximal groups of entries whose mean ranks lie less than `critical` apart."""
    order = sorted(range(len(means)), key=means.__getitem__)
    groups, covered = [], 0
    for start, best in enumerate(order):
        end = max(stop for stop in range(start + 1, len(order) + 1) if means[order[stop - 1]] - means[best] < critical)
        if end > covered and end - start > 1:
            groups.append(order[start:end])
        covered = max(covered, end)
    return groups
