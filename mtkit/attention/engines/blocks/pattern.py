"""Sparse position patterns: which keys a query sees, as an algebra. `a | b` is what either sees.

A pattern is a pure function of positions, never of content nor of how long the batch is. It knows nothing of roles:
whoever runs it adds that a causal query sees no later key, and that nobody sees padding. Besides the exact predicate
`sees`, each says what is needed to lay it out in blocks (`tiles`, `pattern_lists`) and to keep its keys while decoding
(`kept`). Patterns that are drawn at random, and so differ from head to head, are in `random_pattern`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import reduce
from itertools import chain

import torch
from torch import Tensor


class Pattern:
    """Which keys a query sees."""

    @property
    def members(self) -> tuple["Pattern", ...]:
        """The patterns that this one unites."""
        return (self,)

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether the query at i sees the key at j, for integer positions that broadcast; (B or 1, H, ...) by head."""
        raise NotImplementedError

    def covers(self, length: int, causal: bool) -> bool:
        """Whether each of the first `length` queries sees all of as many keys: up to its own where causal."""
        raise NotImplementedError

    def keys(self, queries: range, length: int) -> list[Collection[int]]:
        """The keys that neighbouring queries see of the first `length`, each once: one list for all heads, or one each.

        For several queries there may be more; one query at i sees all of `keys(range(i, i + 1), length)`.
        """
        raise NotImplementedError

    @property
    def kept(self) -> tuple[int, int | None]:
        """What later causal queries may see: so many of the first keys, and of the latest (None: of all)."""
        raise NotImplementedError

    def __or__(self, other: "Pattern") -> "Pattern":
        return Union((*self.members, *other.members))


@dataclass(frozen=True)
class Union(Pattern):
    """What any of several patterns sees."""

    parts: tuple[Pattern, ...]

    @property
    def members(self) -> tuple[Pattern, ...]:
        """The patterns that this one unites."""
        return self.parts

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether any part does; nothing is seen where there is none."""
        nothing = torch.zeros((), dtype=torch.bool, device=i.device)
        return reduce(torch.logical_or, (part.sees(i, j) for part in self.parts), nothing)

    def covers(self, length: int, causal: bool) -> bool:
        """Whether one part alone covers everything."""
        return any(part.covers(length, causal) for part in self.parts)

    def keys(self, queries: range, length: int) -> list[Collection[int]]:
        """Those of all parts, in order."""
        parts = [part.keys(queries, length) for part in self.parts]
        heads = range(max(len(lists) for lists in parts))
        return [sorted({key for lists in parts for key in lists[head % len(lists)]}) for head in heads]

    @property
    def kept(self) -> tuple[int, int | None]:
        """The most that any part asks for."""
        firsts, windows = zip(*(part.kept for part in self.parts), strict=True)
        return max(firsts), None if None in windows else max(windows)


class Window(Pattern):
    """A pattern whose keys lie near the query: within a few blocks of positions that are `dilation` apart."""

    dilation: int
    unit: int
    """Blocks must be multiples of it, so that all see alike."""

    def reach(self, causal: bool) -> tuple[int | None, int | None]:
        """How far before and behind a block of queries the keys lie, in steps of `dilation`; None without limit."""
        raise NotImplementedError


@dataclass(frozen=True)
class Band(Window):
    """The keys up to `back` steps of `dilation` before the query and `ahead` behind it; None without limit."""

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
        """Steps back and ahead; every position in reach where there are as many queries as positions in a step."""
        d = self.dilation
        back, ahead = ((length if side is None else side) * d for side in (self.back, self.ahead))
        if len(queries) >= d:
            return [range(max(queries[0] - back, 0), min(queries[-1] + ahead + 1, length))]
        each = [range(max(i - back, i % d), min(i + ahead + 1, length), d) for i in queries]
        return [sorted(chain(*each))]

    @property
    def kept(self) -> tuple[int, int | None]:
        """The latest `back * dilation + 1` keys."""
        return 0, None if self.back is None else self.back * self.dilation + 1

    def reach(self, causal: bool) -> tuple[int | None, int | None]:
        """Steps seen before and after the query; None is all. Causal queries see nothing after."""
        return self.back, 0 if causal else self.ahead


@dataclass(frozen=True)
class Blocks(Window):
    """The keys in the query's own block of `size` positions, `back` blocks before it and `ahead` behind it."""

    size: int
    back: int = 0
    ahead: int = 0
    dilation = 1

    @property
    def unit(self) -> int:  # type: ignore[override]
        """Positions per block."""
        return self.size

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether the two blocks are near enough."""
        distance = j.div(self.size, rounding_mode="floor") - i.div(self.size, rounding_mode="floor")
        return (distance >= -self.back) & (distance <= self.ahead)

    def covers(self, length: int, causal: bool) -> bool:
        """Whether there are no blocks out of reach."""
        others = (length - 1) // self.size
        return self.back >= others and (causal or self.ahead >= others)

    def keys(self, queries: range, length: int) -> list[Collection[int]]:
        """From the first block in reach to the last."""
        first, last = queries[0] // self.size - self.back, queries[-1] // self.size + self.ahead
        return [range(max(first, 0) * self.size, min((last + 1) * self.size, length))]

    @property
    def kept(self) -> tuple[int, int | None]:
        """The keys of the query's block and of `back` blocks before it."""
        return 0, (self.back + 1) * self.size

    def reach(self, causal: bool) -> tuple[int | None, int | None]:
        """Positions of the blocks seen before and after the query's own."""
        return self.back * self.size, 0 if causal else self.ahead * self.size


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
        """What the last of the first queries sees."""
        return self.count, 1


@dataclass(frozen=True)
class Comb(Pattern):
    """The keys at places `first` to `first + count - 1` of every `stride` positions, for every query."""

    stride: int
    first: int
    count: int

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether j is at one of these places."""
        place = j % self.stride - self.first
        return ((place >= 0) & (place < self.count)).expand(torch.broadcast_shapes(i.shape, j.shape))

    def covers(self, length: int, causal: bool) -> bool:
        """Whether these are all places that there are."""
        return self.first == 0 and self.count >= min(self.stride, length)

    def keys(self, queries: range, length: int) -> list[Collection[int]]:
        """The same for all queries."""
        teeth = (range(start, min(start + self.count, length)) for start in range(self.first, length, self.stride))
        return [list(chain(*teeth))]

    @property
    def kept(self) -> tuple[int, int | None]:
        """All keys, of which few are read."""
        return 0, None


def global_tokens(count: int) -> Pattern:
    """The first `count` tokens as internal global nodes: everyone sees them, and they see everyone."""
    return Columns(count) | Rows(count)
