"""How long the pairs of a training side are: what a model has learned to expect of a source and of its translation."""

import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt, model_validator

from mtkit.storage.records import Count

if TYPE_CHECKING:
    from mtkit.data.prepared import Prepared, Side

TOGETHER = 1 << 20
"""Rows that are looked at together."""

LEAST = 100
"""Pairs that a bin has at least: the ratios of fewer say little."""

SPREADS = 4.0
"""Standard deviations above the mean ratio that a translation may reach, where no training pair did."""

ROOM = 10
"""Pieces that a translation may have beyond its ratio: one piece more makes a large ratio of a short segment."""

PERCENTILES = (50, 90, 95, 99, 100)

USUAL = 0.05
"""Share of the training lines with so many sentences, or more, from which on a model has learned to translate them."""

MOST_SENTENCES = 20
"""Sentences of a line from which on they are not told apart."""

_EDGES = np.unique([round(2 ** (half / 2)) for half in range(2, 60)])
"""The longest source of each bin before small ones are joined: 2, 3, 4, 6, 8, 11, 16, ..."""


class Bin(BaseModel):
    """Pairs whose sources are about equally long. Lengths count tags and ends of segments, here and below."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)
    longest: PositiveInt
    """Maximum source pieces. The first bin includes shorter sources, the last one longer sources."""
    pairs: PositiveInt
    mean: NonNegativeFloat
    """Mean ratio of target to source pieces."""
    spread: NonNegativeFloat
    """Standard deviation of the ratio."""
    most: NonNegativeFloat
    """Maximum ratio."""

    @property
    def highest(self) -> float:
        """The ratio that a translation may reach: the maximum, or `SPREADS` deviations above the mean if larger."""
        return max(self.most, self.mean + SPREADS * self.spread)


class Lengths(BaseModel):
    """The lengths of the training pairs of one direction."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)
    bins: tuple[Bin, ...]
    """By rising length; none where there is no pair."""
    percentiles: dict[int, Count]
    """Percentiles of the source length, in pieces."""
    sentences: dict[int, Count] | None = None
    """How many sources have how many sentences; None where `prepare` did not count them yet."""

    @model_validator(mode="after")
    def _percentiles_go_with_pairs(self) -> Self:
        if self.bins and not set(PERCENTILES) <= set(self.percentiles):
            raise ValueError(f"lengths have the percentiles {', '.join(map(str, PERCENTILES))}")
        return self

    @property
    def pieces_at_once(self) -> int:
        """Source pieces that only one training line in a hundred goes beyond."""
        return self.percentiles[99]

    @property
    def sentences_at_once(self) -> int | None:
        """The most sentences that one training line in twenty has, or still more.

        None where they are not known, or so many that they were not told apart (`MOST_SENTENCES`): no limit.
        """
        known = self.sentences
        if known is None:
            return None
        enough = USUAL * sum(known.values())

        def with_so_many(number: int) -> int:
            return sum(count for each, count in known.items() if each >= number)

        most = max((number for number in known if with_so_many(number) >= enough), default=1)
        return None if most >= MOST_SENTENCES else most

    def limit(self, source_pieces: int) -> int | None:
        """The pieces that a translation of so many source pieces may have at most; None where no pair is known.

        It is the greatest ratio of the training pairs with about as long a source, or where that is more, the mean
        ratio and `SPREADS` standard deviations; and `ROOM`. Mean and deviation are what Sockeye goes by (Hieber et al.,
        arXiv 1712.05690); they say little where a task has ratios of several kinds, as "jump" and "jump thrice".
        """
        if not self.bins:
            return None
        bin_ = next((each for each in self.bins if source_pieces <= each.longest), self.bins[-1])
        return math.ceil(bin_.highest * source_pieces - 1e-6) + ROOM


def lengths_of(prepared: "Prepared", longest: int) -> dict[str, Lengths]:
    """The lengths of each direction of prepared data, without the pairs that have over `longest` pieces on a side."""
    found = dict(
        zip(prepared.directions, measure_lengths(prepared.train, len(prepared.directions), longest), strict=True)
    )
    corpora = prepared.record["sides"]["train"]["corpora"]
    if any("sentences" not in each for each in corpora):
        return found
    counted = {direction: Counter[int]() for direction in found}
    for each in corpora:
        counted[each["direction"]].update({int(number): count for number, count in each["sentences"].items() if count})
    return {name: each.model_copy(update={"sentences": dict(counted[name])}) for name, each in found.items()}


def measure_lengths(side: "Side", directions: int, longest: int) -> list[Lengths]:
    """The lengths of each direction of a training side, without the pairs that have over `longest` pieces on a side."""
    counted = [_Counted() for _ in range(directions)]
    for first in range(0, len(side), TOGETHER):
        rows = slice(first, first + TOGETHER)
        source, target = (each.lengths[rows].astype(np.int64) + 1 for each in (side.source, side.target))
        fits = np.maximum(source, target) <= longest
        for task, counts in enumerate(counted):
            mine = fits if side.tasks is None else fits & (side.tasks[rows] == task)
            counts.add(source[mine], target[mine])
    return [counts.lengths() for counts in counted]


class _Counted:
    """Sums over pairs, by bin."""

    def __init__(self) -> None:
        self._sources = np.zeros(1, dtype=np.int64)
        """(longest + 1,) pairs by source pieces."""
        self._pairs, self._sum, self._squares, self._most = (np.zeros(len(_EDGES)) for _ in range(4))

    def add(self, source: np.ndarray, target: np.ndarray) -> None:
        """Take in pairs of so many pieces, (n,) each."""
        place, ratio = np.searchsorted(_EDGES, source), target / source
        self._pairs += np.bincount(place, minlength=len(_EDGES))
        self._sum += np.bincount(place, ratio, len(_EDGES))
        self._squares += np.bincount(place, ratio**2, len(_EDGES))
        np.maximum.at(self._most, place, ratio)
        sources = np.bincount(source, minlength=len(self._sources))
        sources[: len(self._sources)] += self._sources
        self._sources = sources

    def lengths(self) -> Lengths:
        """The lengths of all pairs added so far."""
        total = int(self._sources.sum())
        if not total:
            return Lengths(bins=(), percentiles={})
        reached = np.searchsorted(np.cumsum(self._sources), [-(-total * each // 100) for each in PERCENTILES])
        percentiles = dict(zip(PERCENTILES, reached.tolist(), strict=True))
        return Lengths(bins=tuple(map(self._bin, self._stretches())), percentiles=percentiles)

    def _stretches(self) -> list[slice]:
        """Neighbouring bins to join, so that each has `LEAST` pairs; all in one where there are fewer."""
        ends, pairs = [0], 0.0
        for number, count in enumerate(self._pairs, start=1):
            pairs += count
            if pairs >= LEAST:
                ends.append(number)
                pairs = 0.0
        last = int(self._pairs.nonzero()[0][-1]) + 1
        ends = [*ends[: max(len(ends) - 1, 1)], last] if pairs or len(ends) == 1 else ends
        return [slice(first, end) for first, end in pairwise(ends)]

    def _bin(self, which: slice) -> Bin:
        pairs = self._pairs[which].sum()
        mean = self._sum[which].sum() / pairs
        variance = max(0.0, self._squares[which].sum() / pairs - mean**2)
        return Bin(
            longest=int(_EDGES[which.stop - 1]),
            pairs=int(pairs),
            mean=float(mean),
            spread=math.sqrt(variance),
            most=float(self._most[which].max()),
        )
