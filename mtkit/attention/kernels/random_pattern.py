"""Patterns drawn at random for each head, patterns of the last blocks of each segment, and their layouts.

A draw is a hash of key, head, position and slot: it is the same in training, evaluation and decoding, and in any
batch. The key combines seed, role and layer (`random_key`).
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import expand_heads
from mtkit.attention.kernels.pattern import Pattern
from mtkit.attention.kernels.pattern_blocks import QueryBlocks
from mtkit.attention.kernels.reproducible import hashed


@dataclass(frozen=True, eq=False)
class Drawn(Pattern):
    """A pattern of `count` slots per block of queries and head, drawn or otherwise picked."""

    count: int
    heads: int
    key: int

    @property
    def size(self) -> int:
        """The number of queries per block; the queries of a block see the same keys."""
        return 1

    def picks(self, block: Tensor) -> Tensor:
        """The blocks of keys drawn for blocks of queries, (B or 1, H, *block.shape, count); -1 for an empty slot."""
        raise NotImplementedError

    def beside(self, block: Tensor) -> Tensor:
        """The keys that blocks of queries see, (B or 1, H, *block.shape, count * size); negative for an empty slot."""
        return (self.picks(block).unsqueeze(-1) * self.size + torch.arange(self.size, device=block.device)).flatten(-2)

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether j was picked for i, (B or 1, H, ...)."""
        picks = self.picks(i.div(self.size, rounding_mode="floor"))
        return (picks == j.div(self.size, rounding_mode="floor").unsqueeze(-1)).any(-1)

    def mask(self, i: Tensor, j: Tensor) -> Tensor:
        """The same by scattering the picks, without a comparison of each pick with each key: (B or 1, H, T, S)."""
        rows, blocks = (-(-len(position) // self.size) for position in (i, j))
        picks = self.picks(torch.arange(rows, device=i.device))
        picks = picks.where((picks >= 0) & (picks < blocks), blocks)  # an extra column for empty slots
        seen = torch.zeros(*picks.shape[:-1], blocks + 1, dtype=torch.bool, device=i.device)
        seen = seen.scatter_(-1, picks, True)[..., :blocks]
        if self.size == 1:
            return seen
        return seen.repeat_interleave(self.size, -2).repeat_interleave(self.size, -1)[..., : len(i), : len(j)]

    def keys(self, queries: range, length: int) -> list[Collection[int]]:
        """The keys drawn by each head, in order."""
        blocks = torch.arange(queries[0] // self.size, queries[-1] // self.size + 1)
        heads = self.beside(blocks).transpose(0, 1).flatten(1).tolist()
        return [sorted({key for key in keys if 0 <= key < length}) for keys in heads]

    @property
    def kept(self) -> tuple[int, int | None]:
        """All keys, because later queries may draw any of them."""
        return 0, None

    def _draws(self, block: Tensor) -> Tensor:
        """32 bits per slot, (H, *block.shape, count)."""
        head = torch.arange(self.heads, device=block.device).view(-1, *[1] * (block.dim() + 1))
        slot = torch.arange(self.count, device=block.device)
        return hashed(hashed(hashed(head + self.key) + block.unsqueeze(-1)) + slot)


@dataclass(frozen=True, eq=False)
class Random(Drawn):
    """`count` keys per query and head: slot s of query i takes key floor(u * candidates) for the hash u.

    The candidates are the keys up to the query's own if causal, else the first `lengths` (B,) keys of each segment,
    possibly of another sequence (the cross role). All are taken if they are at most as many as the slots; a key
    drawn twice counts once.
    """

    lengths: Tensor | None = None

    def picks(self, block: Tensor) -> Tensor:
        """The keys of queries at `block`, in ascending order."""
        draw, slot = self._draws(block), torch.arange(self.count, device=block.device)
        candidates = (block + 1).unsqueeze(-1)
        if self.lengths is not None:
            candidates = self.lengths.view(-1, *[1] * draw.dim())
        chosen = (draw * candidates) >> 32
        chosen = torch.where(candidates <= self.count, slot.where(slot < candidates, -1), chosen)
        chosen = chosen.view(-1, *draw.shape).sort(dim=-1).values
        again = chosen[..., 1:] == chosen[..., :-1]
        return torch.cat([chosen[..., :1], chosen[..., 1:].masked_fill(again, -1)], dim=-1)

    def covers(self, length: int, causal: bool) -> bool:
        """Whether there are slots for all."""
        return self.count >= length


@dataclass(frozen=True, eq=False)
class RandomBlocks(Drawn):
    """`count` different blocks of `block` keys per block of queries and head; all candidates if there are no more.

    The candidates are blocks at least `apart` blocks away from the queries' block (0 includes it): earlier ones if
    causal, else the blocks of the first `lengths` (B,) keys of each segment. The `first` blocks of the sequence and the
    `last` blocks of each segment are no candidates.
    """

    block: int
    apart: int = 0
    first: int = 0
    last: int = 0
    lengths: Tensor | None = None

    @property
    def size(self) -> int:
        return self.block

    def picks(self, block: Tensor) -> Tensor:
        """Blocks in the order of the draw; slot s takes one of the candidates that the slots before it did not take."""
        end = block + 1
        if self.lengths is not None:
            end = (_blocks(self.lengths, self.size) - self.last).view(-1, *[1] * (block.dim() + 1))
        # the blocks that are too near are a hole of `gone` among the candidates
        hole, behind = ((block + side).clamp(min=self.first).minimum(end) for side in (1 - self.apart, self.apart))
        gone = (behind - hole).clamp(min=0)
        count = (end - self.first - gone).clamp(min=0)
        taken: list[Tensor] = []
        for slot, draw in enumerate(self._draws(block).unbind(-1)):
            place = (draw * (count - slot).clamp(min=0)) >> 32  # among those that are left
            for other in torch.stack(taken, -1).sort(-1).values.unbind(-1) if taken else ():
                place = place + (place >= other)
            taken.append(place)
        places = torch.stack(taken, -1)
        chosen = self.first + places
        chosen = chosen + gone.unsqueeze(-1) * (chosen >= hole.unsqueeze(-1))
        chosen = chosen.masked_fill(places >= count.unsqueeze(-1), -1)
        return chosen.view(-1, self.heads, *block.shape, self.count)

    def covers(self, length: int, causal: bool) -> bool:
        """Whether there are slots for all blocks and no block is excluded."""
        return not (self.apart or self.first or self.last) and self.count * self.size >= length


@dataclass(frozen=True, eq=False)
class LastBlocks(Drawn):
    """The last `count` blocks of `block` keys among the first `lengths` (B,) of each segment, for every query."""

    block: int
    lengths: Tensor

    @property
    def size(self) -> int:
        return self.block

    def picks(self, block: Tensor) -> Tensor:
        """The same for all blocks of queries and all heads; -1 if a segment has fewer blocks."""
        last = (
            _blocks(self.lengths, self.size).unsqueeze(-1) - self.count + torch.arange(self.count, device=block.device)
        )
        last = last.clamp(min=-1).view(-1, *[1] * (block.dim() + 1), self.count)
        return last.expand(-1, self.heads, *block.shape, -1)

    def covers(self, length: int, causal: bool) -> bool:
        """Whether all keys are in the last blocks."""
        return self.count * self.size >= length


@dataclass(frozen=True, eq=False)
class LastRows(Pattern):
    """Every key, for the queries in the last `count` blocks of `size` of each segment of `lengths` (B,)."""

    count: int
    size: int
    lengths: Tensor

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether i is one of them, (B, 1, ...)."""
        shape = torch.broadcast_shapes(i.shape, j.shape)
        first = self.first.view(-1, *[1] * (len(shape) + 1))
        return (i >= first).expand(-1, 1, *shape)

    def covers(self, length: int, causal: bool) -> bool:
        """Whether all queries are in the last blocks."""
        return self.count * self.size >= length

    def rows(self, length: int) -> Tensor:
        """Positions (B, R) below `length` that hold these queries, each once; they may hold earlier ones too."""
        count = min(self.count * self.size, length)
        return self.first.clamp(max=length - count).unsqueeze(-1) + torch.arange(count, device=self.lengths.device)

    @property
    def first(self) -> Tensor:
        """The first of these queries in each segment, (B,)."""
        return (_blocks(self.lengths, self.size) - self.count).clamp(min=0) * self.size


def _blocks(lengths: Tensor, size: int) -> Tensor:
    """The number of blocks that hold so many positions."""
    return -(-lengths // size)


class DrawnLayout:
    """Each block of queries with the keys drawn for it."""

    def __init__(self, pattern: Drawn, *, length: int, causal: bool) -> None:
        self.pattern, self.length, self.causal = pattern, length, causal
        self.blocks = -(-length // pattern.size)

    def lay_out(self, q: Tensor, k: Tensor, v: Tensor, *, valid: Tensor | None, earlier: Pattern) -> list[QueryBlocks]:
        """All blocks of q (B, H, T, K), with k (B, G, S, K) and v (B, G, S, V), as one group.

        valid (B, S). What `earlier` sees is left out.
        """
        block, size = torch.arange(self.blocks, device=q.device), self.pattern.size
        i = block.unsqueeze(-1) * size + torch.arange(size, device=q.device)  # (blocks, c)
        j = self.pattern.beside(block)  # (B or 1, H, blocks, L)
        there = (j >= 0) & (j < k.shape[2])
        place = j.where(there, 0).expand(*q.shape[:2], -1, -1)
        if valid is not None:
            there = there & valid[:, None, None].expand(-1, *place.shape[1:3], -1).gather(-1, place)
        visible = there.unsqueeze(-2) & ~earlier.sees(i.unsqueeze(-1), j.unsqueeze(-2))
        if self.causal:
            visible = visible & (j.unsqueeze(-2) <= i.unsqueeze(-1))
        [rows] = self.split_blocks(q)
        k, v = (self._gathered(expand_heads(x, q.shape[1]), place) for x in (k, v))
        return [QueryBlocks(rows, k, v, visible.unsqueeze(2), i.unsqueeze(0), j.unsqueeze(2))]

    def split_blocks(self, x: Tensor, blocks: object = None) -> list[Tensor]:
        """The rows (B, H, 1, blocks, c, ...) of x (B, H, T, ...)."""
        rest = self.blocks * self.pattern.size - self.length
        return [(F.pad(x, (0, 0, 0, rest)) if rest else x).unflatten(2, (1, self.blocks, self.pattern.size))]

    def join_blocks(self, outputs: list[Tensor]) -> Tensor:
        """(B, H, T, V) from (B, H, 1, blocks, c, V)."""
        return outputs[0].flatten(2, 4)[:, :, : self.length]

    def _gathered(self, x: Tensor, place: Tensor) -> Tensor:
        """(B, H, 1, blocks, L, K)."""
        flat = place.flatten(2).unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])
        return x.gather(2, flat).unflatten(2, place.shape[2:]).unsqueeze(2)
