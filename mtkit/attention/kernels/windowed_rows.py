"""One softmax over the keys that several layouts of the same rows place next to blocks of queries, in O(T) memory."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.pattern_blocks import surely_all
from mtkit.attention.kernels.tiled_softmax import LOG2, RowIndex, Tile, TileProvider, attend_blocks, scores_at_once

ROWS_AT_ONCE = {"cpu": 1 << 14}
"""RowIndex of whole streams worked on at a time, by kind of device; 2^22 on others."""
SHORTEST = 1e-6
"""Least length that a key is divided by."""


class Layout(Protocol):
    """Streams of rows in blocks of c, each with a window of L places that begins `positions_before` places earlier."""

    block: int
    positions_before: int
    width: int
    stream_blocks: int
    """Blocks of a stream."""
    keys: Tensor
    """(places,): the row at each place, R if there is none; from `positions_before` on, the rows of queries, once."""
    place: Tensor
    """(N, T): the place of each stream's rows among the queries."""

    def hide(self, scores: Tensor, blocks: slice) -> None:
        """Lower scores (blocks, c, L) below `NOTHING_SEEN` if a query does not see a key."""


def stream_rows(shape: Sequence[int], device: torch.device) -> Tensor:
    """The rows (N, T) of each stream, of shape (B, T, H): a row is one head of one token, a stream one of a segment."""
    return torch.arange(math.prod(shape), device=device).view(*shape).transpose(1, 2).flatten(0, 1)


def attend_layouts(q: Tensor, v: Tensor, layouts: Sequence[Layout], *, dropout: float = 0.0) -> Tensor:
    """The outputs (B, T, H, V) of queries (B, T, H, K) over themselves as keys, at length 1, and values (B, T, H, V).

    The softmax of a row runs over the rows that it sees in any layout; a row that sees none gets its own value.
    """
    rows, values = q.flatten(0, 2), v.flatten(0, 2)
    provider = _WindowedRows(layouts, stream_rows(q.shape[:3], q.device))
    heads, seen = attend_blocks(provider, rows, rows, values, dropout=dropout)
    heads = heads.type_as(v)
    return (heads if surely_all(seen) else torch.where(seen, heads, values)).view_as(v)


@dataclass(frozen=True)
class _Windows:
    """Windows of `width` rows of a matrix, one every `step` of them; index (places,)."""

    index: Tensor
    width: int
    step: int

    def of(self, x: Tensor) -> Tensor:
        """The windows (blocks, width, K) of x (R, K), views that overlap."""
        return self.windows(x.index_select(0, self.index))

    def windows(self, rows: Tensor) -> Tensor:
        """The windows (blocks, width, K) of the rows (places, K)."""
        return rows.unfold(0, self.width, self.step).transpose(1, 2)

    def add(self, total: Tensor, rows: Tensor) -> None:
        """Add windows (blocks, width, K) to total."""
        total.index_add_(0, self.index, self.sums(total, rows))

    def sums(self, total: Tensor, rows: Tensor) -> Tensor:
        """The sums (places, K) of windows, piece by piece, because windows overlap."""
        size = len(rows) * self.step
        sums = total.new_empty(len(self.index) + self.step, total.shape[1])
        sums[size if self.width >= self.step else 0 :] = 0  # the first whole piece is copied, not added
        for number, piece in enumerate(rows.split(self.step, dim=1)):
            start = number * self.step
            place = sums[start : start + size].unflatten(0, (-1, self.step))[:, : piece.shape[1]]
            (place.copy_ if start == 0 and self.width >= self.step else place.add_)(piece)
        return sums[: len(self.index)]


@dataclass(frozen=True)
class _UnitWindows(_Windows):
    """Windows of rows that are scaled to length 1 when they are read."""

    unit: Tensor
    """(places, K)"""
    inverse: Tensor
    """(places, 1): 1 over the rows' lengths."""

    def add(self, total: Tensor, rows: Tensor) -> None:
        """Add the gradient of the rows from the windows' gradient (blocks, width, K)."""
        sums = self.sums(total, rows)
        along = (sums * self.unit).sum(-1, keepdim=True)
        total.index_add_(0, self.index, sums.addcmul_(self.unit, along, value=-1).mul_(self.inverse))


class _WindowedRows(TileProvider):
    """All layouts of all streams, in groups of streams whose rows stay in the cache."""

    joined = True

    def __init__(self, layouts: Sequence[Layout], rows: Tensor) -> None:
        super().__init__(1.0)
        self.layouts, self.rows = layouts, rows

    def tiles(self, q: Tensor, k: Tensor, v: Tensor, bias: None) -> Iterator[Tile]:
        streams = len(self.rows)
        several = max(ROWS_AT_ONCE.get(q.device.type, 1 << 22) // self.rows.shape[1], 1)
        for stream in range(0, streams, several):
            for layout in self.layouts:
                block, most = layout.block, max(scores_at_once(q.device) // (layout.block * layout.width), 1)
                start, end = (x * layout.stream_blocks for x in (stream, min(stream + several, streams)))
                for first in range(start, end, most):
                    last = min(first + most, end)
                    places = layout.keys[first * block : (last - 1) * block + layout.width]
                    queries = places[
                        layout.positions_before : layout.positions_before + (last - first) * block
                    ].unflatten(0, (-1, block))
                    values = _Windows(places.clamp(max=len(q) - 1), layout.width, block)
                    near = k.index_select(0, values.index)
                    length = torch.linalg.vector_norm(near, dim=-1, keepdim=True, dtype=upcast(near).dtype)
                    inverse = length.clamp_(min=SHORTEST).reciprocal_()
                    unit = near * inverse
                    keys = _UnitWindows(values.index, layout.width, block, unit, inverse)
                    rows = near[layout.positions_before : layout.positions_before + queries.numel()].unflatten(
                        0, (-1, block)
                    ) * (1 / LOG2)
                    near_k, near_v = keys.windows(unit.type_as(q)), values.of(v)
                    scores = upcast(rows @ near_k.mT)
                    layout.hide(scores, slice(first, last))
                    real = (queries < len(q)).unsqueeze(-1)
                    yield Tile(RowIndex(queries), keys, values, rows, near_k, near_v, scores, real)
