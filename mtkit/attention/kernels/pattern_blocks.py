"""The layout of a sparse pattern in memory: blocks of queries, each with the keys it may see, with an exact mask.

The axes of a layout are (B, H, streams, blocks, positions of a block, K). A pattern dilated by d has d streams, each of
every d-th position; other patterns have one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.pattern import Pattern, Union, Window
from mtkit.attention.kernels.window_views import window, windows
from mtkit.device import to_device

LONGEST_BLOCK = 64
"""Queries per block with a wide window: longer blocks waste products, shorter ones the kernel's time.
The CPU's kernel takes 32 of them at a time."""
SHORTEST_BLOCK = 16


@dataclass(frozen=True)
class QueryBlocks:
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


class Fold:
    """Query blocks in the four axes of the fused kernel.

    The streams of all heads become its batch axis and the blocks its head axis, so that overlapping windows stay views;
    streams of one block each are on the head axis themselves, so that heads share their masks. Queries that share a key
    head become rows of one block, so that keys are never copied.
    """

    def __init__(self, q: Tensor, k: Tensor) -> None:
        """Queries and keys in the axes of `QueryBlocks`."""
        self.shape = q.shape[:5]
        self.group = self.shape[1] // k.shape[1]
        self.streams, self.blocks = self.shape[2:4]

    def queries(self, x: Tensor) -> Tensor:
        """Rows (N, n, c', ...) of (B, H, streams, blocks, c, ...)."""
        if self.group > 1:
            x = x.unflatten(1, (-1, self.group)).movedim(2, 4).flatten(4, 5)  # (B, G, streams, blocks, group * c, ...)
        return self.keys(x)

    def keys(self, x: Tensor) -> Tensor:
        """Rows (N, n, L, ...) of (B, G, streams, blocks, L, ...)."""
        if self.blocks > 1:
            return x.flatten(0, 2)
        return x.flatten(2, 4) if self.streams == 1 else x.flatten(0, 1).flatten(1, 2)

    def mask(self, mask: Tensor) -> Tensor:
        """A mask that broadcasts to scores (B, H, streams, blocks, c, L), for the scores of the rows."""
        if self.group > 1:
            mask = mask if mask.shape[1] > 1 else mask.expand(-1, self.group, -1, -1, -1, -1)
            mask = mask.unflatten(1, (-1, self.group)).movedim(2, 4).flatten(4, 5)
        folded = 3 if self.blocks > 1 else 2 if self.streams > 1 else 0  # the axes that become one
        if max(mask.shape[:folded], default=1) > 1:
            rows = (self.shape[0], self.shape[1] // self.group, self.streams)
            mask = mask.expand(*rows[:folded], *[-1] * (6 - folded))
        return self.keys(mask)

    def simple_mask(self, visible: Tensor) -> str | None:
        """ "all" if every query of every block sees all its keys, "triangle" if it sees the keys up to its place."""
        if visible.device.type != "cpu" or max(visible.shape[:4]) > 1:  # asking an accelerator would wait for it
            return None
        if bool(visible.all()):
            return "all"
        square = visible.shape[-1] == visible.shape[-2] and self.group == 1
        return "triangle" if square and torch.equal(visible, torch.ones_like(visible).tril()) else None

    def unfold(self, rows: Tensor) -> Tensor:
        """(B, H, streams, blocks, c, ...) of rows (N, n, c', ...)."""
        batch, heads, streams, blocks, block = self.shape
        grouped = rows.reshape(batch, heads // self.group, streams, blocks, self.group, block, *rows.shape[3:])
        return grouped.movedim(4, 2).flatten(1, 2)


def surely_all(some: Tensor) -> bool:
    """Whether all are known to be true: asked on a CPU, but not on an accelerator, which would be waited for."""
    return some.device.type == "cpu" and bool(some.all())


class WindowLayout:
    """Blocks of queries with windows of keys, for windows of one dilation, and the first `columns` keys.

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
        self.back, self.ahead = (max(self.stream if side is None else side for side in pair) for pair in sides)
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

    def lay_out(
        self, q: Tensor, k: Tensor, v: Tensor, *, valid: Tensor | None, earlier: Pattern, relative: bool
    ) -> list[QueryBlocks]:
        """All blocks of q (B, H, T, K), k (B, G, T, K), v (B, G, T, V), in groups of neighbours.

        valid (B, T). Keys that `earlier` sees are omitted. Blocks away from the borders form one group with one mask;
        `relative` returns their positions even if these differ.
        """
        spans = self.groups(valid)
        queries = self._queries(q).split([last - first for first, last in spans], 3)
        keys, values = (self._windows(x, spans) for x in (k, v))
        groups = []
        for place, (first, last) in enumerate(spans):
            visible = self.visible(first, last, valid, earlier, q.device)
            alike = self.alike(first, last, valid) and not (relative and self.columns)
            positions = self._positions(q.device, first, last, alike)
            near = self.with_columns(k, keys[place]), self.with_columns(v, values[place])
            groups.append(QueryBlocks(queries[place], *near, visible, *positions))
        return groups

    def visible(self, first: int, last: int, valid: Tensor | None, earlier: Pattern, device: torch.device) -> Tensor:
        """The keys that queries of blocks `first` to `last` see, but `earlier` does not.

        (B or 1, 1, streams or 1, blocks or 1, c, L), of length 1 along axes on which all are alike.
        """
        alike = self.alike(first, last, valid)
        visible = self._seen(*self._positions(device, first, last, alike), earlier)
        if valid is None or alike:
            return visible
        real = valid[:, None, :, None]
        return visible & self.with_columns(real, self.window(self.streams(real), first, last)).mT

    def join_blocks(self, outputs: list[Tensor]) -> Tensor:
        """The outputs (B, H, T, V) from the groups' outputs (B, H, streams, blocks, c, V)."""
        streams = (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3)).flatten(3, 4)[:, :, :, : self.stream]
        return streams.transpose(2, 3).flatten(2, 3)[:, :, : self.length]

    def split_blocks(self, x: Tensor, blocks: list[QueryBlocks]) -> list[Tensor]:
        """The rows (B, H, streams, blocks, c, ...) of x (B, H, T, ...) for each group."""
        return list(self._queries(x).split([block.q.shape[3] for block in blocks], dim=3))

    def groups(self, valid: Tensor | None) -> list[tuple[int, int]]:
        """The ranges of blocks before, within and after the ones that share a mask."""
        first, last = self._inner(valid)
        if last - first <= 1:
            first = last = self.blocks
        return [(start, end) for start, end in ((0, first), (first, last), (last, self.blocks)) if start < end]

    def alike(self, first: int, last: int, valid: Tensor | None) -> bool:
        """Whether one mask serves several blocks `first` to `last`."""
        start, end = self._inner(valid)
        return last - first > 1 and start <= first and last <= end

    def _inner(self, valid: Tensor | None) -> tuple[int, int]:
        """The blocks whose windows hold only real keys, and no columns."""
        shortest = self.length
        if valid is not None:  # asking an accelerator would wait for it: there every block has a mask of its own
            shortest = int(valid.sum(1).min()) if valid.device.type == "cpu" else 0
        first = -(-(-(-self.border // self.dilation) + self.back) // self.block)
        return first, (shortest // self.dilation - self.ahead) // self.block

    def streams(self, x: Tensor) -> Tensor:
        """(B, H, T, K) to (B, H, streams, T / streams, K), a view if nothing is missing at the end."""
        rest = self.stream * self.dilation - x.shape[2]
        padded = F.pad(x, (0, 0, 0, rest)) if rest else x
        return padded.unflatten(2, (self.stream, self.dilation)).transpose(2, 3)

    def window(self, streams: Tensor, first: int, last: int) -> Tensor:
        """The windows (B, G, streams, last - first, L, K) for blocks `first` to `last` of streams."""
        return window(streams, first, last, step=self.block, width=self.width, zeros_before=self.back)

    def _queries(self, q: Tensor) -> Tensor:
        rest = self.blocks * self.block - self.stream
        streams = self.streams(q)
        return (F.pad(streams, (0, 0, 0, rest)) if rest else streams).unflatten(3, (self.blocks, self.block))

    def _windows(self, x: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        """The windows of each span of blocks, views (B, G, streams, last - first, L, K) of (B, G, T, K)."""
        zeros_after = self.blocks * self.block - self.stream + self.ahead
        return windows(
            self.streams(x), spans, step=self.block, width=self.width, zeros_before=self.back, zeros_after=zeros_after
        )

    def with_columns(self, x: Tensor, windows: Tensor) -> Tensor:
        """The columns, of x (B, G, T, K), before the keys of windows (B, G, streams, blocks, L, K)."""
        if not self.columns:
            return windows
        columns = x[:, :, None, None, : self.columns].expand(-1, -1, *windows.shape[2:4], -1, -1)
        return torch.cat([columns, windows], dim=4)

    def _positions(self, device: torch.device, first: int, last: int, alike: bool) -> tuple[Tensor, Tensor]:
        """The positions of queries and keys in blocks `first` to `last`; of one block if all are alike."""
        stream = torch.arange(1 if alike else self.dilation, device=device).view(-1, 1, 1)
        start = torch.arange(first, first + 1 if alike else last, device=device).unsqueeze(-1) * self.block
        queries = (start + torch.arange(self.block, device=device)) * self.dilation + stream
        keys = (start - self.back + torch.arange(self.width, device=device)) * self.dilation + stream
        columns = torch.arange(self.columns, device=device).expand(*keys.shape[:2], -1)
        return queries, torch.cat([columns, keys], dim=-1)

    def _seen(self, query_position: Tensor, key_position: Tensor, earlier: Pattern) -> Tensor:
        """Whether each query sees each key; a key counts in its window if the window sees it, else as a column."""
        i, j = query_position.unsqueeze(-1), key_position.unsqueeze(-2)
        near = self.windows.sees(i, j)
        column = torch.arange(j.shape[-1], device=j.device) < self.columns
        visible = (near ^ column) & (j >= 0) & (j < self.length) & ~earlier.sees(i, j)
        visible = visible & (j <= i) if self.causal else visible
        return visible.expand(1, 1, *torch.broadcast_shapes(i.shape, j.shape))


class CombLayout:
    """All queries with the same keys: the keys of one or more combs."""

    def __init__(self, combs: Pattern, *, length: int, causal: bool) -> None:
        self.combs, self.length, self.causal = combs, length, causal

    def lay_out(self, q: Tensor, k: Tensor, v: Tensor, *, valid: Tensor | None, earlier: Pattern) -> list[QueryBlocks]:
        """One block of q (B, H, T, K), with k (B, G, T, K) and v (B, G, T, V); valid (B, T)."""
        [keys] = self.combs.keys(range(self.length), self.length)
        j = to_device(torch.tensor(list(keys) or [0]), q.device)  # the first is hidden where there are none
        i = torch.arange(self.length, device=q.device)
        visible = self.combs.sees(i.unsqueeze(-1), j) & ~earlier.sees(i.unsqueeze(-1), j)
        if self.causal:
            visible = visible & (j <= i.unsqueeze(-1))
        visible = visible.view(1, 1, 1, 1, *visible.shape)
        if valid is not None:
            visible = visible & valid[:, None, None, None, None, j]
        rows, k, v = (x[:, :, None, None] for x in (q, k.index_select(2, j), v.index_select(2, j)))
        return [QueryBlocks(rows, k, v, visible, i.view(1, 1, -1), j.view(1, 1, -1))]

    def split_blocks(self, x: Tensor, blocks: object = None) -> list[Tensor]:
        """The rows (B, H, 1, 1, T, ...) of x (B, H, T, ...)."""
        return [x[:, :, None, None]]

    def join_blocks(self, outputs: list[Tensor]) -> Tensor:
        """(B, H, T, V)."""
        return outputs[0][:, :, 0, 0]
