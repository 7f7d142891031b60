"""Binary partition: spans of 2^m positions, and the few of them that stand for all positions on one side of a token.

Node (m, p) covers positions p 2^m to (p + 1) 2^m - 1; those of level 0 are the tokens. From a token outwards a walk
takes k nodes a level; where it leaves a level in the middle of a parent, the child left over comes first on the next
level. So the nodes are disjoint, leave no hole, and depend on the token's position and k alone.

At level m the walk to the left enters at node ((i - 1 + k) >> m) - k, to the right at ((i + 1 - k) >> m) + k, so that
neighbours see nearly the same nodes: a window of few nodes serves a whole block of queries.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

Number = TypeVar("Number", int, Tensor)
SHORTEST_BLOCK = 16
"""Queries that share a window where spans are shorter."""


class Edge(NamedTuple):
    """A node that a token reads, and the walk's level and slot (0 to k - 1) at which it was reached."""

    level: int
    place: int
    walked: int
    slot: int


def left_walk(position: int, k: int) -> Iterator[Edge]:
    """The nodes that cover all positions before `position`, outwards."""
    place, half, level = position - 1, False, 0
    while place >= 0:
        for slot in range(k):
            if place >= 0:
                yield Edge(level - 1, 2 * place, level, slot) if half else Edge(level, place, level, slot)
                half, place = False, place - 1
        half, place, level = place % 2 == 0, place // 2, level + 1


def right_walk(position: int, k: int, length: int) -> Iterator[Edge]:
    """The nodes that cover all positions after `position` of `length`, outwards; some of them may be empty."""
    place, half, level = position + 1, False, 0
    while place < count(length, level):
        for slot in range(k):
            if place < count(length, level):
                yield Edge(level - 1, 2 * place + 1, level, slot) if half else Edge(level, place, level, slot)
                half, place = False, place + 1
        half, place, level = place % 2 == 1, place // 2, level + 1


def count(length: int, level: int, *, whole: bool = False) -> int:
    """Nodes of a level over `length` positions; with `whole`, those that the end does not cut."""
    return length >> level if whole else -(-length >> level)


def top(length: int, k: int, *, causal: bool) -> int:
    """The highest level that any of `length` tokens reads; its spans are shorter than `length`."""
    level = 0
    while (length - 2 + k) >> (level + 1) >= k if causal else ((1 - k) >> (level + 1)) + k < count(length, level + 1):
        level += 1
    return level


def finished(position: int) -> int:
    """How many spans, of levels 1 to this, end at `position`."""
    return ((position + 1) & -(position + 1)).bit_length() - 1


def finishing_order(level: int, place: int) -> int:
    """How many nodes, tokens among them, end before node (level, place), the shorter first."""
    end = ((place + 1) << level) - 1
    return 2 * end - end.bit_count() + level


@dataclass(frozen=True)
class Window:
    """The nodes of one level on one side of every token, shared by blocks of queries."""

    level: int
    k: int
    right: bool

    @property
    def block(self) -> int:
        """Queries of a block."""
        return max(1 << self.level, SHORTEST_BLOCK)

    @property
    def width(self) -> int:
        """Nodes beside a block."""
        last = self.block - 1
        furthest = self._entry(last) + self.k if self.right else self._entry(last)
        return furthest - self._first + 1

    def nodes(self, x: Tensor, blocks: int) -> Tensor:
        """Beside each block its window of x (B, H, nodes, K), zeros where there is none: (B, H, blocks, width, K)."""
        before, skipped = max(-self._first, 0), max(self._first, 0)
        covered = (blocks - 1) * self._stride + self.width
        behind = max(skipped + covered - before - x.shape[2], 0)
        padded = F.pad(x, (0, 0, before, behind)).narrow(2, skipped, covered)
        return padded.unfold(2, self.width, self._stride).transpose(-1, -2)

    def edges(self, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """For `length` queries, a multiple of the block, each (length, width) or broadcastable to it.

        Whether the walk takes the node, the level at which it does, and the slot.
        """
        i = torch.arange(length, device=device).unsqueeze(-1)
        place = i // self.block * self._stride + self._first + torch.arange(self.width, device=device)
        entry = self._entry(i)
        slot = place - entry if self.right else entry - place
        taken = (slot >= self._left_over(self.level - 1, i)) & (slot < self.k + self._left_over(self.level, i))
        slot = slot.clamp(0, self.k)
        return taken & (place >= 0), self.level + slot // self.k, slot % self.k

    def _entry(self, i: Number, level: int | None = None) -> Number:
        level = self.level if level is None else level
        return ((i + 1 - self.k) >> level) + self.k if self.right else ((i - 1 + self.k) >> level) - self.k

    def _left_over(self, level: int, i: Tensor) -> Tensor | int:
        """Whether the walk leaves a level in the middle of a parent, as 0 or 1."""
        if level < 0:
            return 0
        entry = self._entry(i, level)
        return (entry + self.k) % 2 if self.right else (entry - self.k + 1) % 2

    @property
    def _stride(self) -> int:
        """Nodes that a block of queries spans."""
        return self.block >> self.level

    @property
    def _first(self) -> int:
        """The first node beside the first block."""
        return self._entry(0) if self.right else self._entry(0) - self.k
