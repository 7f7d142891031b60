"""Sparse position patterns: an algebra of the keys that a query sees. `a | b` shows the keys of either pattern.

A pattern is a pure function of positions: it is independent of content and batch length. It is also
independent of the role: the caller hides later keys from causal queries, and padding from all. Besides the exact
predicate `sees`, a pattern states what its layout in blocks needs (`pattern_blocks`, `random_pattern`), and which keys
decoding must keep (`kept`). Patterns drawn at random, which differ from head to head, are in `random_pattern`.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import reduce
from itertools import chain

import torch
from torch import Tensor


class Pattern:
    """A rule for the keys that a query sees."""

    @property
    def members(self) -> tuple["Pattern", ...]:
        """The patterns that this one unites."""
        return (self,)

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether the query at i sees the key at j, for integer positions that broadcast; (B or 1, H, ...) by head."""
        raise NotImplementedError

    def mask(self, i: Tensor, j: Tensor) -> Tensor:
        """`sees` of whole sequences, whose positions i (T, 1) and j (S,) count from 0: (T, S), or (B or 1, H, T, S)."""
        return self.sees(i, j)

    def covers(self, length: int, causal: bool) -> bool:
        """Whether each of the first `length` queries sees all of the first `length` keys (up to its own if causal)."""
        raise NotImplementedError

    def keys(self, queries: range, length: int) -> list[Collection[int]]:
        """The keys among the first `length` that neighbouring queries see: one list for all heads, or one per head.

        Each key is listed once. The list of several queries may hold further keys; the list of a single query is exact.
        """
        raise NotImplementedError

    @property
    def kept(self) -> tuple[int, int | None]:
        """The keys that later causal queries may see: numbers of the first and of the latest ones (None: all)."""
        raise NotImplementedError

    def __or__(self, other: "Pattern") -> "Pattern":
        return Union((*self.members, *other.members))


@dataclass(frozen=True)
class Union(Pattern):
    """The union of several patterns."""

    parts: tuple[Pattern, ...]

    @property
    def members(self) -> tuple[Pattern, ...]:
        return self.parts

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether any part sees j from i; a union without parts sees nothing."""
        return _any((part.sees(i, j) for part in self.parts), i)

    def mask(self, i: Tensor, j: Tensor) -> Tensor:
        """The union of the parts' masks."""
        return _any((part.mask(i, j) for part in self.parts), i)

    def covers(self, length: int, causal: bool) -> bool:
        """Whether a single part covers everything."""
        return any(part.covers(length, causal) for part in self.parts)

    def keys(self, queries: range, length: int) -> list[Collection[int]]:
        """The keys of all parts, in order."""
        parts = [part.keys(queries, length) for part in self.parts]
        heads = range(max(len(lists) for lists in parts))
        return [sorted({key for lists in parts for key in lists[head % len(lists)]}) for head in heads]

    @property
    def kept(self) -> tuple[int, int | None]:
        """The largest numbers of all parts."""
        firsts, windows = zip(*(part.kept for part in self.parts), strict=True)
        return max(firsts), None if None in windows else max(windows)


class Window(Pattern):
    """A pattern whose keys lie near the query, at positions that are `dilation` apart."""

    dilation: int
    unit: int
    """Blocks must be multiples of it, so that all see alike."""

    def reach(self, causal: bool) -> tuple[int | None, int | None]:
        """The reach before and after a block of queries, in steps of `dilation`; None: no limit."""
        raise NotImplementedError


@dataclass(frozen=True)
class Band(Window):
    """The keys up to `back` steps of `dilation` before the query and `ahead` after it; None: no limit."""

    back: int | None
    ahead: int | None
    dilation: int = 1
    unit = 1

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether j - i is a multiple of the dilation within reach."""
        distance = j - i
        seen = distance % self.dilation == 0
        if self.back is not None:
            seen = seen & (distance >= -self.back * self.dilation)
        return seen if self.ahead is None else seen & (distance <= self.ahead * self.dilation)

    def covers(self, length: int, causal: bool) -> bool:
        """Whether it is not dilated and reaches from end to end."""
        far = all(side is None or side >= length - 1 for side in self.reach(causal)[: 1 if causal else 2])
        return far and (self.dilation == 1 or length == 1)

    def keys(self, queries: range, length: int) -> list[Collection[int]]:
        """The steps in reach; every position in reach if there are at least `dilation` queries."""
        d = self.dilation
        back, ahead = ((length if side is None else side) * d for side in (self.back, self.ahead))
        if len(queries) >= d:
            return [range(max(queries[0] - back, 0), min(queries[-1] + ahead + 1, length))]
        ranges = [range(max(i - back, i % d), min(i + ahead + 1, length), d) for i in queries]
        return [sorted(chain(*ranges))]

    @property
    def kept(self) -> tuple[int, int | None]:
        """The latest `back * dilation + 1` keys."""
        return 0, None if self.back is None else self.back * self.dilation + 1

    def reach(self, causal: bool) -> tuple[int | None, int | None]:
        """The steps seen before and after the query; None: all. A causal query sees none after."""
        return self.back, 0 if causal else self.ahead


class BlockWindow(Window):
    """The keys in the query's own block of `size` positions, and those up to a distance from the block's two ends."""

    size: int
    dilation = 1

    @property
    def sides(self) -> tuple[int, int]:
        """The number of positions seen before and after the block."""
        raise NotImplementedError

    @property
    def unit(self) -> int:  # type: ignore[override]
        """Positions per block."""
        return self.size

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether j is near enough to the block of i."""
        back, ahead = self.sides
        place = j - i.div(self.size, rounding_mode="floor") * self.size
        return (place >= -back) & (place < self.size + ahead)

    def covers(self, length: int, causal: bool) -> bool:
        """Whether the last block reaches the first key and, if not causal, the first block the last key."""
        back, ahead = self.sides
        return back >= (length - 1) // self.size * self.size and (causal or self.size + ahead >= length)

    def keys(self, queries: range, length: int) -> list[Collection[int]]:
        """All keys from the first in reach to the last."""
        back, ahead = self.sides
        first, last = (query // self.size * self.size for query in (queries[0], queries[-1]))
        return [range(max(first - back, 0), min(last + self.size + ahead, length))]

    @property
    def kept(self) -> tuple[int, int | None]:
        """The keys of the query's block and those before it."""
        return 0, self.sides[0] + self.size

    def reach(self, causal: bool) -> tuple[int | None, int | None]:
        """Positions seen before and after the query's own block."""
        back, ahead = self.sides
        return back, 0 if causal else ahead


@dataclass(frozen=True)
class Blocks(BlockWindow):
    """The keys in the query's own block of `size` positions, `back` blocks before it and `ahead` after it."""

    size: int
    back: int = 0
    ahead: int = 0

    @property
    def sides(self) -> tuple[int, int]:
        """The positions of these blocks."""
        return self.back * self.size, self.ahead * self.size


@dataclass(frozen=True)
class Flanked(BlockWindow):
    """The keys in the query's own block of `size` positions, `back` positions before it and `ahead` after it."""

    size: int
    back: int = 0
    ahead: int = 0

    @property
    def sides(self) -> tuple[int, int]:
        """`back` and `ahead`."""
        return self.back, self.ahead


@dataclass(frozen=True)
class Columns(Pattern):
    """The first `count` keys, for every query."""

    count: int

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether j is one of them."""
        return (j < self.count).expand(torch.broadcast_shapes(i.shape, j.shape))

    def covers(self, length: int, causal: bool) -> bool:
        """Whether all keys are among the first."""
        return self.count >= length

    def keys(self, queries: range, length: int) -> list[Collection[int]]:
        """The same for all queries."""
        return [range(min(self.count, length))]

    @property
    def kept(self) -> tuple[int, int | None]:
        """The first `count` keys, and the latest one."""
        return self.count, 1


@dataclass(frozen=True)
class Rows(Pattern):
    """Every key, for the first `count` queries."""

    count: int

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether i is one of them."""
        return (i < self.count).expand(torch.broadcast_shapes(i.shape, j.shape))

    def covers(self, length: int, causal: bool) -> bool:
        """Whether all queries are among the first."""
        return self.count >= length

    def keys(self, queries: range, length: int) -> list[Collection[int]]:
        """All for the first queries, none for others."""
        return [range(length if queries[0] < self.count else 0)]

    @property
    def kept(self) -> tuple[int, int | None]:
        """The keys that the last of the first queries sees."""
        return self.count, 1


@dataclass(frozen=True)
class Comb(Pattern):
    """The keys at places `first` to `first + count - 1` of each `stride` positions, for every query."""

    stride: int
    first: int
    count: int

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether j is at one of these places."""
        place = j % self.stride - self.first
        return ((place >= 0) & (place < self.count)).expand(torch.broadcast_shapes(i.shape, j.shape))

    def covers(self, length: int, causal: bool) -> bool:
        """Whether the comb holds every position."""
        return self.first == 0 and self.count >= min(self.stride, length)

    def keys(self, queries: range, length: int) -> list[Collection[int]]:
        """The same for all queries."""
        teeth = (range(start, min(start + self.count, length)) for start in range(self.first, length, self.stride))
        return [list(chain(*teeth))]

    @property
    def kept(self) -> tuple[int, int | None]:
        """All keys; a step reads few of them."""
        return 0, None


def global_tokens(count: int) -> Pattern:
    """The first `count` tokens as internal global nodes, which see all tokens and are seen by all."""
    return Columns(count) | Rows(count)


def _any(masks: Iterable[Tensor], i: Tensor) -> Tensor:
    """Return whether any of the masks is True; False without masks."""
    return reduce(torch.logical_or, masks, torch.zeros((), dtype=torch.bool, device=i.device))
