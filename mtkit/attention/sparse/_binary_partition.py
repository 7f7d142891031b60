"""Binary partition: spans of 2^m positions, and the few spans that represent all positions on one side of a token.

Node (m, p) covers positions p 2^m to (p + 1) 2^m - 1; the nodes of level 0 are the tokens. A walk starts at a token,
goes outwards and takes k nodes per level. If it leaves a level in the middle of a parent, the child that is left over
comes first on the next level. So the nodes are disjoint, leave no gap, and depend only on the token's position and k.

At level m the walk to the left enters at node ((i - 1 + k) >> m) - k, to the right at ((i + 1 - k) >> m) + k.
Neighbours see nearly the same nodes, so that a list of few nodes serves a block of queries.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from mtkit.attention.kernels.listed import Lists, smallest_type
from mtkit.recording import kept

Number = TypeVar("Number", int, Tensor)
BLOCK = 32
"""Maximum number of tokens that share a list of nodes: longer blocks waste products, shorter ones copies of keys."""


class Edge(NamedTuple):
    """A node that a token reads, with the walk's level and slot (0 to k - 1) at which it was reached."""

    level: int
    place: int
    walked: int
    slot: int


def left_walk(position: int, k: int) -> Iterator[Edge]:
    """Yield the nodes that cover all positions before `position`, outwards."""
    place, half, level = position - 1, False, 0
    while place >= 0:
        for slot in range(k):
            if place >= 0:
                yield Edge(level - 1, 2 * place, level, slot) if half else Edge(level, place, level, slot)
                half, place = False, place - 1
        half, place, level = place % 2 == 0, place // 2, level + 1


def right_walk(position: int, k: int, length: int) -> Iterator[Edge]:
    """Yield the nodes that cover all positions after `position` of `length`, outwards; some may be empty."""
    place, half, level = position + 1, False, 0
    while place < count(length, level):
        for slot in range(k):
            if place < count(length, level):
                yield Edge(level - 1, 2 * place + 1, level, slot) if half else Edge(level, place, level, slot)
                half, place = False, place + 1
        half, place, level = place % 2 == 1, place // 2, level + 1


def count(length: int, level: int, *, complete: bool = False) -> int:
    """Return the number of nodes in a level over `length` positions; `complete` leaves out a node that the end cuts."""
    return length >> level if complete else -(-length >> level)


def top(length: int, k: int, *, causal: bool) -> int:
    """Return the highest level that any of `length` tokens reads; its spans are shorter than `length`."""
    level = 0
    while (length - 2 + k) >> (level + 1) >= k if causal else ((1 - k) >> (level + 1)) + k < count(length, level + 1):
        level += 1
    return level


def finished(position: int) -> int:
    """Return how many spans, of levels 1 to this number, end at `position`."""
    return ((position + 1) & -(position + 1)).bit_length() - 1


def finishing_order(level: int, place: int) -> int:
    """Return how many nodes, tokens included, end before node (level, place); shorter nodes end first."""
    end = ((place + 1) << level) - 1
    return 2 * end - end.bit_count() + level


@dataclass(frozen=True)
class Walks:
    """The walks of all tokens to one side."""

    k: int
    right: bool

    def ends(self, first: Number, last: Number, level: int) -> tuple[Number, Number]:
        """Return the lowest and the highest node of a level that tokens `first` to `last` may take."""
        if self.right:
            return self._entry(first, level), self._entry(last, level) + self.k
        return self._entry(first, level) - self.k, self._entry(last, level)

    def taken(self, i: Tensor, place: Tensor, level: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return whether the token at i takes the node, and at which level and slot of its walk."""
        entry = self._entry(i, level)
        slot = place - entry if self.right else entry - place
        taken = (slot >= self._left_over(level - 1, i)) & (slot < self.k + self._left_over(level, i))
        slot = slot.clamp(0, self.k)
        return taken, level + slot // self.k, slot % self.k

    def _entry(self, i: Number, level: int) -> Number:
        return ((i + 1 - self.k) >> level) + self.k if self.right else ((i - 1 + self.k) >> level) - self.k

    def _left_over(self, level: int, i: Tensor) -> Tensor | int:
        """Whether the walk leaves a level in the middle of a parent, as 0 or 1."""
        if level < 0:
            return 0
        entry = self._entry(i, level)
        return (entry + self.k) % 2 if self.right else (entry - self.k + 1) % 2


def labels_of(k: int, clip: int) -> int:
    """Return the number of labels."""
    return (2 * k + 1) * (clip + 1)


def label_of(walked: Number, slot: Number, right: bool, k: int, clip: int) -> Number:
    """Return the label of a node reached at this level and slot of a walk; all levels from `clip` on share labels.

    Label 0 is the token itself.
    """
    level = walked.clamp(max=clip) if isinstance(walked, Tensor) else min(walked, clip)
    return (2 * k + 1) * level + 2 * slot + 1 + right


@kept(4)  # one to four bytes for each listed pair
def token_lists(length: int, k: int, clip: int, causal: bool, device: torch.device) -> Lists:
    """List the nodes that each block of tokens reads, numbered level by level, with `label_of` each pair.

    The result is cached for all layers: it depends only on the arguments.
    """
    sides = (Walks(k, False),) if causal else (Walks(k, False), Walks(k, True))
    block = -(-length // -(-length // BLOCK))  # the same number of blocks, with the least padding
    starts = range(0, length, block)
    i = torch.arange(len(starts) * block, device=device).view(-1, block, 1)
    places, labels, offset = [], [], 0
    for level in range(top(length, k, causal=causal) + 1):
        nodes = count(length, level, complete=causal)
        for joined, width in _windows(sides, starts, block, level, nodes):
            first = joined[0].ends(i[:, :1], i[:, :1], level)[0].clamp(0, nodes - width)
            place = first + torch.arange(width, device=device)  # (blocks, 1, width)
            label = torch.where((place == i) & (level == 0), 0, labels_of(k, clip))
            for side in joined:
                taken, walked, slot = side.taken(i, place, level)
                label = torch.where(taken, label_of(walked, slot, side.right, k, clip), label)
            places.append(offset + place.squeeze(1))
            labels.append(label.to(smallest_type(labels_of(k, clip))))
        offset += nodes
    return Lists(torch.cat(places, -1), torch.cat(labels, -1))


def _windows(
    sides: tuple[Walks, ...], starts: range, block: int, level: int, nodes: int
) -> Iterator[tuple[tuple[Walks, ...], int]]:
    """Yield sides whose nodes of a level form one window for each block of tokens, and the window's width.

    Both sides share a window if this is no wider in total, or if the tokens themselves are between them.
    """
    ranges = []
    for start in starts:
        last = start + block - 1
        ends = [side.ends(start, last, level) for side in sides]
        if level == 0:
            ends[-1] = ends[-1][0], max(ends[-1][1], last)
        ranges.append(ends)
    widths = [min(max(high - low for low, high in side) + 1, nodes) for side in zip(*ranges, strict=True)]
    both = min(max(ends[-1][1] - ends[0][0] for ends in ranges) + 1, nodes)
    if level == 0 or both <= sum(widths):
        yield sides, both
    else:
        yield from (((side,), width) for side, width in zip(sides, widths, strict=True))
