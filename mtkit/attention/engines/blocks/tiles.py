"""The layout of a sparse pattern in memory: blocks of queries, each beside the keys it may see, with an exact mask.

The axes of a layout are (B, H, streams, blocks, positions of a block, K). A pattern dilated by d has d streams, each of
every d-th position; other patterns have one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.engines.blocks.pattern import Pattern, Union, Window

LONGEST_BLOCK = 128
"""Queries in a block beside a wide window: longer blocks waste products, shorter ones the kernel's time."""
SHORTEST_BLOCK = 16


@dataclass(frozen=True)
class Tiles:
    """A few blocks of queries and their keys.

    q (B, H, streams, blocks, c, K); k (B, G, streams, blocks, L, K) and v likewise; visible broadcasts to the scores
    (B, H, streams, blocks, c, L); query_position (streams, blocks, c) and key_position (streams, blocks, L), of length
    1 along axes on which they are constant.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor
    query_position: Tensor
    key_position: Tensor


class WindowLayout:
    """Blocks of queries beside windows of keys, for windows of one dilation, and the first `columns` keys.

    With `elsewhere`, another layout holds the columns.
    """

    def __init__(
        self, windows: Sequence[Window], *, length: int, causal: bool, columns: int = 0, elsewhere: bool = False
    ) -> None:
        self.windows, self.length, self.causal = Union(tuple(windows)), length, causal
        self.border, self.columns = columns, 0 if elsewhere else min(columns, length)
        self.dilation = max(min(windows[0].dilation, length), 1) if windows else 1  # no step leads beyond the length
        self.stream = -(-length // self.dilation)  # its length
        sides = zip(*(window.reach(causal) for window in windows), strict=True) if windows else ((0,), (0,))
        self.back, self.ahead = (max(self.stream if side is None else side for side in each) for each in sides)
        unit = math.lcm(*(window.unit for window in windows))
        wide = min(max(self.back, self.ahead, SHORTEST_BLOCK), LONGEST_BLOCK)
        self.block = unit * max(1, round(wide / unit))
        self.blocks = -(-self.stream // self.block)
        if self.stream**2 <= self.blocks * self.block * self.width:  # one block for all costs no more
            self.block, self.blocks, self.back, self.ahead = self.stream, 1, 0, 0

    @property
    def width(self) -> int:
        """The number of positions in a window."""
        return self.back + self.block + self.ahead

    def tiles(
        self, q: Tensor, k: Tensor, v: Tensor, *, valid: Tensor | None, earlier: Pattern, relative: bool
    ) -> list[Tiles]:
        """All blocks of q (B, H, T, K), k (B, G, T, K), v (B, G, T, V), in groups of neighbours.

        valid (B, T). Keys that `earlier` sees are omitted. Blocks away from the borders form one group with one mask;
        `relative` asks for their positions even where these differ.
        """
        q, keys, values = self._queries(q), self._padded(k), self._padded(v)
        real = None if valid is None else self._padded(valid[:, None, :, None])
        groups = []
        for first, last in self._groups(valid):
            alike = last - first > 1 and self._alike(valid) == (first, last)
            query_position, key_position = self._positions(q, first, first + 1 if alike else last, alike)
            visible = self._visible(query_position, key_position, earlier)
            if real is not None and valid is not None and not alike:
                shown = self._windows(real, first, last).transpose(-1, -2)  # (B, 1, streams, blocks, 1, L)
                if self.columns:
                    columns = valid[:, None, None, None, None, : self.columns]
                    shown = torch.cat([columns.expand(*shown.shape[:-1], -1), shown], dim=-1)
                visible = visible & shown
            if alike and relative and self.columns:
                query_position, key_position = self._positions(q, first, last, alike=False)
            seen_keys, seen_values = (
                self._with_columns(x, self._windows(padded, first, last)) for x, padded in ((k, keys), (v, values))
            )
            groups.append(Tiles(q[:, :, :, first:last], seen_keys, seen_values, visible, query_position, key_position))
        return groups

    def joined(self, outputs: list[Tensor]) -> Tensor:
        """The outputs (B, H, T, V) from those of each group, (B, H, streams, blocks, c, V)."""
        streams = torch.cat(outputs, dim=3).flatten(3, 4)[:, :, :, : self.stream]
        return streams.transpose(2, 3).flatten(2, 3)[:, :, : self.length]

    def _groups(self, valid: Tensor | None) -> Iterator[tuple[int, int]]:
        """The ranges of blocks before, within and behind the ones that share a mask."""
        first, last = self._alike(valid)
        if last - first <= 1:
            first = last = self.blocks
        for start, end in ((0, first), (first, last), (last, self.blocks)):
            if start < end:
                yield start, end

    def _alike(self, valid: Tensor | None) -> tuple[int, int]:
        """The blocks whose windows hold only real keys, and no columns."""
        shortest = self.length
        if valid is not None:  # asking an accelerator would wait for it: there every block has a mask of its own
            shortest = int(valid.sum(1).min()) if valid.device.type == "cpu" else 0
        first = -(-(-(-self.border // self.dilation) + self.back) // self.block)
        return first, (shortest // self.dilation - self.ahead) // self.block

    def _streams(self, x: Tensor) -> Tensor:
        """(B, H, T, K) to (B, H, streams, T / streams, K)."""
        if self.dilation == 1:
            return x.unsqueeze(2)
        whole = F.pad(x, (0, 0, 0, self.stream * self.dilation - self.length))
        return whole.unflatten(2, (self.stream, self.dilation)).transpose(2, 3)

    def _queries(self, q: Tensor) -> Tensor:
        rest = self.blocks * self.block - self.stream
        streams = self._streams(q)
        return (F.pad(streams, (0, 0, 0, rest)) if rest else streams).unflatten(3, (self.blocks, self.block))

    def _padded(self, x: Tensor) -> Tensor:
        """Keys with room before and behind for the first and the last window."""
        behind = self.blocks * self.block - self.stream + self.ahead
        streams = self._streams(x)
        return F.pad(streams, (0, 0, self.back, behind)) if self.back or behind else streams

    def _windows(self, padded: Tensor, first: int, last: int) -> Tensor:
        """(B, G, streams, last - first, L, K): overlapping views, no copies."""
        covered = padded.narrow(3, first * self.block, (last - first - 1) * self.block + self.width)
        return covered.unfold(3, self.width, self.block).transpose(-1, -2)

    def _with_columns(self, x: Tensor, windows: Tensor) -> Tensor:
        if not self.columns:
            return windows
        columns = x[:, :, None, None, : self.columns].expand(-1, -1, *windows.shape[2:4], -1, -1)
        return torch.cat([columns, windows], dim=4)

    def _positions(self, like: Tensor, first: int, last: int, alike: bool) -> tuple[Tensor, Tensor]:
        """The positions of queries and keys in blocks `first` to `last`; those of one stream where all are alike."""
        stream = torch.arange(1 if alike else self.dilation, device=like.device).view(-1, 1, 1)
        start = torch.arange(first, last, device=like.device).unsqueeze(-1) * self.block
        queries = (start + torch.arange(self.block, device=like.device)) * self.dilation + stream
        keys = (start - self.back + torch.arange(self.width, device=like.device)) * self.dilation + stream
        columns = torch.arange(self.columns, device=like.device).expand(*keys.shape[:2], -1)
        return queries, torch.cat([columns, keys], dim=-1)

    def _visible(self, query_position: Tensor, key_position: Tensor, earlier: Pattern) -> Tensor:
        """Whether each query sees each key; a key counts in its window if the window sees it, else as a column."""
        i, j = query_position.unsqueeze(-1), key_position.unsqueeze(-2)
        near = self.windows.sees(i, j)
        column = torch.arange(j.shape[-1], device=j.device) < self.columns
        visible = (near ^ column) & (j >= 0) & (j < self.length) & ~earlier.sees(i, j)
        visible = visible & (j <= i) if self.causal else visible
        return visible.expand(1, 1, *torch.broadcast_shapes(i.shape, j.shape))
