"""Sparse position patterns: which keys a query sees, as an algebra. `a | b` is what either sees.

A pattern is a pure function of positions, never of content nor of how long the batch is. It knows nothing of roles:
whoever runs it adds that a causal query sees no later key, and that nobody sees padding. Besides the exact predicate
`sees`, each says what is needed to lay it out in blocks (`tiles`) and to keep its keys while decoding (`kept`).
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from mtkit.attention.hashing import hashed


class Pattern:
    """Which keys a query sees."""

    @property
    def members(self) -> tuple["Pattern", ...]:
        """The patterns that this one unites."""
        return (self,)

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether the query at i sees the key at j, for integer positions that broadcast."""
        raise NotImplementedError

    def covers(self, length: int, causal: bool) -> bool:
        """Whether each of the first `length` queries sees all of as many keys: up to its own where causal."""
        raise NotImplementedError

    def keys(self, i: int) -> Collection[int]:
        """The keys that a causal query at i sees, each once."""
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

    def keys(self, i: int) -> Collection[int]:
        """Those of all parts, in order."""
        return sorted({key for part in self.parts for key in part.keys(i)})

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

    def keys(self, i: int) -> range:
        """Steps back from i, i among them."""
        steps = i // self.dilation if self.back is None else min(self.back, i // self.dilation)
        return range(i - steps * self.dilation, i + 1, self.dilation)

    @property
    def kept(self) -> tuple[int, int | None]:
        """The band itself."""
        return 0, None if self.back is None else self.back * self.dilation + 1

    def reach(self, causal: bool) -> tuple[int | None, int | None]:
        """Both radii."""
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
        """The block."""
        return self.size

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether the two blocks are near enough."""
        distance = j.div(self.size, rounding_mode="floor") - i.div(self.size, rounding_mode="floor")
        return (distance >= -self.back) & (distance <= self.ahead)

    def covers(self, length: int, causal: bool) -> bool:
        """Whether there are no blocks out of reach."""
        others = (length - 1) // self.size
        return self.back >= others and (causal or self.ahead >= others)

    def keys(self, i: int) -> range:
        """From the first block in reach up to i."""
        return range(max(i // self.size - self.back, 0) * self.size, i + 1)

    @property
    def kept(self) -> tuple[int, int | None]:
        """As many blocks as are in reach."""
        return 0, (self.back + 1) * self.size

    def reach(self, causal: bool) -> tuple[int | None, int | None]:
        """Whole blocks."""
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

    def keys(self, i: int) -> range:
        """Those up to i."""
        return range(min(self.count, i + 1))

    @property
    def kept(self) -> tuple[int, int | None]:
        """Themselves."""
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

    def keys(self, i: int) -> range:
        """All up to i for the first queries, none for others."""
        return range(i + 1 if i < self.count else 0)

    @property
    def kept(self) -> tuple[int, int | None]:
        """What the last of the first queries sees."""
        return self.count, 1


@dataclass(frozen=True, eq=False)
class Random(Pattern):
    """`count` keys for each query and head, drawn once and for all: slot s of query i takes floor(u * candidates).

    u is a hash of key, head, position and slot. Candidates are the keys up to the query's own where causal, else the
    first `lengths` (B,) of each segment. Where there are no more of them than slots, all are taken; a key drawn twice
    counts once. `key` stands for whatever else the draw depends on (`random_key`).
    """

    count: int
    heads: int
    key: int
    lengths: Tensor | None = None

    def picks(self, i: Tensor) -> Tensor:
        """The keys of queries at i, (B or 1, H, *i.shape, count) in ascending order; -1 for an empty slot."""
        head = torch.arange(self.heads, device=i.device).view(-1, *[1] * (i.dim() + 1))
        slot = torch.arange(self.count, device=i.device)
        draw = hashed(hashed(hashed(head + self.key) + i.unsqueeze(-1)) + slot)  # (H, *i.shape, count), 32 bits each
        candidates = (i + 1).unsqueeze(-1)
        if self.lengths is not None:
            candidates = self.lengths.view(-1, *[1] * draw.dim())
        chosen = (draw * candidates) >> 32
        chosen = torch.where(candidates <= self.count, slot.where(slot < candidates, -1), chosen)
        chosen = chosen.view(-1, *draw.shape).sort(dim=-1).values
        again = chosen[..., 1:] == chosen[..., :-1]
        return torch.cat([chosen[..., :1], chosen[..., 1:].masked_fill(again, -1)], dim=-1)

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether j was picked for i, (B or 1, H, ...)."""
        return (self.picks(i) == j.unsqueeze(-1)).any(-1)

    def covers(self, length: int, causal: bool) -> bool:
        """Whether there are slots for all."""
        return self.count >= length

    def keys(self, i: int) -> Collection[int]:
        """What any of the heads picked."""
        return {key for key in self.picks(torch.tensor(i)).flatten().tolist() if key >= 0}

    @property
    def kept(self) -> tuple[int, int | None]:
        """All keys."""
        return 0, None


def global_tokens(count: int) -> Pattern:
    """The first `count` tokens as internal global nodes: everyone sees them, and they see everyone."""
    return Columns(count) | Rows(count)
