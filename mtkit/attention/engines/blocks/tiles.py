"""The layout of a sparse pattern in memory: blocks of queries, each beside the keys it may see, with an exact mask.

The axes of a layout are (B, H, streams, blocks, positions of a block, K). A pattern dilated by d has d streams, each of
every d-th position; other patterns have one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
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


class Fold:
    """Tiles in the four axes that the fused kernel knows.

    The streams of all heads become its batch axis and the blocks its head axis, so that overlapping windows stay views;
    streams of one block each are on the head axis themselves, so that heads share their masks. Queries that share a key
    head become rows of one block, so that keys are never copied.
    """

    def __init__(self, tiles: Tiles) -> None:
        self.shape = tiles.q.shape[:5]
        self.group = self.shape[1] // tiles.k.shape[1]
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
        """What broadcasts to the scores (B, H, streams, blocks, c, L), as what broadcasts to those of the rows."""
        if self.group > 1:
            mask = mask if mask.shape[1] > 1 else mask.expand(-1, self.group, -1, -1, -1, -1)
            mask = mask.unflatten(1, (-1, self.group)).movedim(2, 4).flatten(4, 5)
        folded = 3 if self.blocks > 1 else 2 if self.streams > 1 else 0  # the axes that become one
        if max(mask.shape[:folded], default=1) > 1:
            whole = (self.shape[0], self.shape[1] // self.group, self.streams)
            mask = mask.expand(*whole[:folded], *[-1] * (6 - folded))
        return self.keys(mask)

    def simple_mask(self, visible: Tensor) -> str | None:
        """ "all" where every query of every block sees all its keys, "triangle" where it sees those up to its place."""
        if visible.device.type != "cpu" or max(visible.shape[:4]) > 1:  # asking an accelerator would wait for it
            return None
        if bool(visible.all()):
            return "all"
        square = visible.shape[-1] == visible.shape[-2] and self.group == 1
        return "triangle" if square and torch.equal(visible, torch.ones_like(visible).tril()) else None

    def unfold(self, rows: Tensor) -> Tensor:
        """(B, H, streams, blocks, c, ...) of rows (N, n, c', ...)."""
        batch, heads, streams, blocks, block = self.shape
        whole = rows.reshape(batch, heads // self.group, streams, blocks, self.group, block, *rows.shape[3:])
        return whole.movedim(4, 2).flatten(1, 2)


def surely_all(some: Tensor) -> bool:
    """Whether all are known to be true: asked on a CPU, but not on an accelerator, which would be waited for."""
    return some.device.type == "cpu" and bool(some.all())


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
        spans = list(self._groups(valid))
        queries = self._queries(q).split([last - first for first, last in spans], 3)
        keys, values = (self._windows(x, spans) for x in (k, v))
        real = None if valid is None else self._windows(valid[:, None, :, None], spans)
        groups = []
        for place, (first, last) in enumerate(spans):
            alike = last - first > 1 and self._alike(valid) == (first, last)
            query_position, key_position = self._positions(q, first, first + 1 if alike else last, alike)
            visible = self._visible(query_position, key_position, earlier)
            if real is not None and valid is not None and not alike:
                shown = real[place].transpose(-1, -2)  # (B, 1, streams, blocks, 1, L)
                if self.columns:
                    columns = valid[:, None, None, None, None, : self.columns]
                    shown = torch.cat([columns.expand(*shown.shape[:-1], -1), shown], dim=-1)
                visible = visible & shown
            if alike and relative and self.columns:
                query_position, key_position = self._positions(q, first, last, alike=False)
            near = self._with_columns(k, keys[place]), self._with_columns(v, values[place])
            groups.append(Tiles(queries[place], *near, visible, query_position, key_position))
        return groups

    def joined(self, outputs: list[Tensor]) -> Tensor:
        """The outputs (B, H, T, V) from those of each group, (B, H, streams, blocks, c, V)."""
        streams = (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3)).flatten(3, 4)[:, :, :, : self.stream]
        return streams.transpose(2, 3).flatten(2, 3)[:, :, : self.length]

    def laid(self, x: Tensor, tiles: list[Tiles]) -> list[Tensor]:
        """The rows (B, H, streams, blocks, c, ...) of x (B, H, T, ...) for each group."""
        return list(self._queries(x).split([each.q.shape[3] for each in tiles], dim=3))

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

    def _windows(self, x: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        """Beside the blocks first to last of each span, views (B, G, streams, last - first, L, K) of (B, G, T, K)."""
        behind = self.blocks * self.block - self.stream + self.ahead
        return windows(self._streams(x), spans, step=self.block, width=self.width, before=self.back, behind=behind)

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


def windows(
    x: Tensor, spans: list[tuple[int, int]], *, step: int, width: int, before: int, behind: int
) -> tuple[Tensor, ...]:
    """The windows (..., last - first, width, K) of each span (first, last), of x (..., T, K).

    Spans follow one another from 0 on. Window i begins `step` i places into x with so many zeros `before` it and
    `behind` it. Windows are not to be written to.

    Autograd itself would add the gradient of overlapping views number by number, and that of each of several slices to
    zeros of the whole length.
    """
    if width == step and not before:  # these do not overlap
        whole = F.pad(x, (0, 0, 0, behind)) if behind else x
        return whole.unflatten(-2, (-1, step)).split([last - first for first, last in spans], -3)
    made: tuple[Tensor, ...] = _Windows.apply(x, spans, step, width, before, behind)  # type: ignore[no-untyped-call]
    return made


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, spans: list[tuple[int, int]], step: int, width: int, before: int, behind: int
    ) -> tuple[Tensor, ...]:
        ctx.spans, ctx.step, ctx.width, ctx.before, ctx.shape = spans, step, width, before, x.shape
        padded = F.pad(x, (0, 0, before, behind)) if before or behind else x
        return tuple(
            padded.narrow(-2, first * step, (last - first - 1) * step + width).unfold(-2, width, step).mT
            for first, last in spans
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        step, width, (*leading, length, size) = ctx.step, ctx.width, ctx.shape
        most = ctx.spans[-1][1] * step + -(-width // step) * step  # room for whole pieces
        total = gradients[0].new_zeros(*leading, max(most, ctx.before + length), size)
        for (first, last), own in zip(ctx.spans, gradients, strict=True):
            for offset, piece in zip(range(0, width, step), own.split(step, -2), strict=True):
                rows = total.narrow(-2, first * step + offset, (last - first) * step).unflatten(-2, (-1, step))
                rows[..., : piece.shape[-2], :].add_(piece)
        return total.narrow(-2, ctx.before, length), None, None, None, None, None
