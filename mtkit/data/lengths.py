"""Lengths of training pairs, from which translation derives the lengths of inputs and outputs that a model learned."""

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
"""Rows that are measured together."""

LEAST = 100
"""Minimum pairs of a bin: the ratios of fewer are unreliable."""

SPREADS = 4.0
"""Standard deviations above the mean ratio that a translation may reach even if no training pair did."""

ROOM = 10
"""Pieces that a translation may have beyond its ratio, which one more piece changes much in a short segment."""

PERCENTILES = (50, 90, 95, 99, 100)

USUAL = 0.05
"""Minimum share of training lines with that many sentences, or more, for a model to have learned to translate them."""

MOST_SENTENCES = 20
"""Lines with this many sentences or more are counted together."""

_EDGES = np.unique([round(2 ** (half / 2)) for half in range(2, 60)])
"""The longest source of each bin, before small bins are joined: 2, 3, 4, 6, 8, 11, 16, ..."""


class Bin(BaseModel):
    """Pairs with sources of similar length. Lengths count tags and end marks, here and below."""

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
    """In order of length; empty if there is no pair."""
    percentiles: dict[int, Count]
    """Percentiles of the source length, in pieces."""
    sentences: dict[int, Count] = {}
    """Number of sampled sources by their number of sentences."""

    @model_validator(mode="after")
    def _percentiles_go_with_pairs(self) -> Self:
        if self.bins and not set(PERCENTILES) <= set(self.percentiles):
            raise ValueError(f"lengths have the percentiles {', '.join(map(str, PERCENTILES))}")
        return self

    @property
    def pieces_at_once(self) -> int:
        """Source pieces that only one training line in a hundred exceeds."""
        return self.percentiles[99]

    @property
    def sentences_at_once(self) -> int | None:
        """The largest number of sentences that one training line in twenty has or exceeds.

        None, for no limit, if it is at least `MOST_SENTENCES`.
        """
        lines, most = 0, 1
        for number, count in sorted(self.sentences.items(), reverse=True):
            lines += count
            if lines >= USUAL * sum(self.sentences.values()):
                most = number
                break
        return None if most >= MOST_SENTENCES else most

    def limit(self, source_pieces: int) -> int | None:
        """Return the maximum target pieces for so many source pieces; None if no pair is known.

        It is the bin's highest ratio (`Bin.highest`) times the source, plus `ROOM`. Sockeye (Hieber et al., arXiv
        1712.05690) uses the mean and deviation only, which are unreliable if a task has ratios of several kinds, as
        "jump" and "jump thrice".
        """
        if not self.bins:
            return None
        bin_ = next((bin_ for bin_ in self.bins if source_pieces <= bin_.longest), self.bins[-1])
        return math.ceil(bin_.highest * source_pieces - 1e-6) + ROOM


def lengths_of(prepared: "Prepared", longest: int) -> dict[str, Lengths]:
    """Return the lengths in each direction of prepared data, without pairs of over `longest` pieces on a side."""
    measured = measure_lengths(prepared.train, len(prepared.directions), longest)
    lengths = dict(zip(prepared.directions, measured, strict=True))
    corpora = prepared.record["sides"]["train"]["corpora"]
    sentences = {direction: Counter[int]() for direction in lengths}
    for corpus in corpora:
        counts = {int(number): count for number, count in corpus["sentences"].items() if count}
        sentences[corpus["direction"]].update(counts)
    return {name: known.model_copy(update={"sentences": dict(sentences[name])}) for name, known in lengths.items()}


def measure_lengths(side: "Side", directions: int, longest: int) -> list[Lengths]:
    """Return the lengths in each direction of a training side, without pairs of over `longest` pieces on a side."""
    sums = [_Sums() for _ in range(directions)]
    for first in range(0, len(side), TOGETHER):
        rows = slice(first, first + TOGETHER)
        source, target = (tokens.lengths[rows].astype(np.int64) + 1 for tokens in (side.source, side.target))
        fits = np.maximum(source, target) <= longest
        for task, task_sums in enumerate(sums):
            members = fits if side.tasks is None else fits & (side.tasks[rows] == task)
            task_sums.add(source[members], target[members])
    return [task_sums.lengths() for task_sums in sums]


class _Sums:
    """Sums over pairs, by bin."""

    def __init__(self) -> None:
        self._sources = np.zeros(1, dtype=np.int64)
        """(longest + 1,) pairs by source pieces."""
        self._pairs, self._sum, self._squares, self._most = (np.zeros(len(_EDGES)) for _ in range(4))

    def add(self, source: np.ndarray, target: np.ndarray) -> None:
        """Add pairs with these numbers of pieces, (n,) each."""
        place, ratio = np.searchsorted(_EDGES, source), target / source
        self._pairs += np.bincount(place, minlength=len(_EDGES))
        self._sum += np.bincount(place, ratio, len(_EDGES))
        self._squares += np.bincount(place, ratio**2, len(_EDGES))
        np.maximum.at(self._most, place, ratio)
        sources = np.bincount(source, minlength=len(self._sources))
        sources[: len(self._sources)] += self._sources
        self._sources = sources

    def lengths(self) -> Lengths:
        """Return the lengths of all added pairs."""
        total = int(self._sources.sum())
        if not total:
            return Lengths(bins=(), percentiles={})
        reached = np.searchsorted(np.cumsum(self._sources), [-(-total * percent // 100) for percent in PERCENTILES])
        percentiles = dict(zip(PERCENTILES, reached.tolist(), strict=True))
        # neighbouring bins are joined so that each has `LEAST` pairs, or all of them if there are fewer
        ends, pairs = [0], 0.0
        for number, count in enumerate(self._pairs, start=1):
            pairs += count
            if pairs >= LEAST:
                ends.append(number)
                pairs = 0.0
        last = int(self._pairs.nonzero()[0][-1]) + 1
        if pairs or len(ends) == 1:
            ends = [*ends[: max(len(ends) - 1, 1)], last]
        return Lengths(bins=tuple(self._bin(slice(*edges)) for edges in pairwise(ends)), percentiles=percentiles)

    def _bin(self, bins: slice) -> Bin:
        pairs = self._pairs[bins].sum()
        mean = self._sum[bins].sum() / pairs
        variance = max(0.0, self._squares[bins].sum() / pairs - mean**2)
        return Bin(
            longest=int(_EDGES[bins.stop - 1]),
            pairs=int(pairs),
            mean=float(mean),
            spread=math.sqrt(variance),
            most=float(self._most[bins].max()),
        )
