"""Overlapping windows of keys by the CPU's flash-attention kernel, a few blocks of queries at a time.

Autograd would hold the gradients of all windows, although each key is in several of them; here a few blocks' gradients
are added up while they are in the processor's cache.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.flash.parts import KERNEL, KERNEL_BACKWARD, added, attend_parts, position_rows
from mtkit.attention.kernels.pattern import Union
from mtkit.attention.kernels.pattern_blocks import Fold, WindowLayout, surely_all
from mtkit.attention.kernels.window_views import add_windows, room

ROWS_AT_ONCE = 1 << 13
"""Queries of all heads that are worked on at a time."""


def windows_are_faster(q: Tensor, layout: WindowLayout) -> bool:
    """Return whether the layout has overlapping windows or columns, and more queries than are worked on at a time."""
    apart = layout.width + layout.columns == layout.block
    return layout.blocks > 1 and not apart and q.shape[:3].numel() > ROWS_AT_ONCE


def attend_windows(
    q: Tensor, k: Tensor, v: Tensor, layout: WindowLayout, *, scale: float, valid: Tensor | None
) -> Tensor:
    """Return the heads' outputs (B, H, T, V) over the keys of the layout, zero if no key is seen.

    q (B, H, T, K), k (B, G, T, K), v (B, G, T, V) that the kernel supports (`can_fuse`); G divides H; valid
    (B, T).
    """
    length = q.shape[2]
    if rest := layout.stream * layout.dilation - length:  # some streams are shorter
        q, k, v = (F.pad(x, (0, 0, 0, rest)) for x in (q, k, v))
    return attend_parts(q, k, v, [WindowPart(layout, valid)], scale=scale)[:, :, :length]


class WindowPart:
    """The windows and columns of a layout, for streams of the same length; valid (B, T)."""

    def __init__(self, layout: WindowLayout, valid: Tensor | None) -> None:
        self._layout, self._valid = layout, valid

    def attended(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        heads, log_sum = position_rows(v, *q.shape[1:3]), position_rows(v[..., :1], *q.shape[1:3])
        for chunk in _chunks(q, k, v, self._layout, self._valid):
            out, sums = chunk.attended(scale)
            chunk.put(heads, out)
            chunk.put(log_sum, sums)
        return heads, log_sum

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, d_heads: Tensor, heads: Tensor, log_sum: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        layout = self._layout
        d_q, places = position_rows(q, *q.shape[1:3]), room(layout.blocks, layout.block, layout.width)
        totals = [position_rows(x, x.shape[1], places * layout.dilation).zero_() for x in (k, v)]
        start = layout.back * layout.dilation  # before it lies what was zeros before the keys
        d_k, d_v = (total[:, :, start : start + q.shape[2]] for total in totals)
        for chunk in _chunks(q, k, v, layout, self._valid):
            (d_blocks, *windows), *columns = chunk.gradients(d_heads, heads, log_sum, scale)
            for total, rows in zip(totals, windows, strict=True):
                add_windows(_streams(total, layout), rows, chunk.first, layout.block)
            for others, *first_keys in columns:
                d_blocks = d_blocks + others
                for d, each in zip((d_k, d_v), first_keys, strict=True):
                    d[:, :, : layout.columns] += each.sum((2, 3))
            chunk.put(d_q, d_blocks)
        return d_q, d_k, d_v


def _streams(x: Tensor, layout: WindowLayout) -> Tensor:
    """Return a view (B, H, streams, T / streams, K) of (B, H, T, K)."""
    return x.unflatten(2, (-1, layout.dilation)).transpose(2, 3)


def _chunks(q: Tensor, k: Tensor, v: Tensor, layout: WindowLayout, valid: Tensor | None) -> Iterator["_Chunk"]:
    """Yield all blocks, a few at a time; neighbours that see alike share their masks."""
    most = max(ROWS_AT_ONCE // (len(q) * q.shape[1] * layout.dilation * layout.block), 1)
    for start, end in layout.groups(valid):
        together = _masks(q, layout, start, end, valid) if layout.alike(start, end, valid) else None
        for first in range(start, end, most):
            last = min(first + most, end)
            yield _Chunk(q, (k, v), layout, first, last, together or _masks(q, layout, first, last, valid))


Mask = tuple[Tensor | None, Tensor | None]
"""Numbers to add to the scores of blocks (None: none), and a mask of the queries that see a key (None: all)."""


def _masks(q: Tensor, layout: WindowLayout, first: int, last: int, valid: Tensor | None) -> list[Mask]:
    """Return the masks of blocks `first` to `last` for their windows, and for the columns if there are any."""
    all_keys = layout.visible(first, last, valid, Union(()), q.device)
    columns, windows = all_keys.tensor_split([layout.columns], -1)
    masks: list[Mask] = []
    for visible in [windows, columns] if layout.columns else [windows]:
        some = visible.any(-1, keepdim=True)
        mask = None if surely_all(visible) else added(visible, some, upcast(q))
        masks.append((mask, None if surely_all(some) else some))
    return masks


class _Part:
    """Queries (B, H, streams, blocks, c, K) with keys and values (B, G, streams, blocks, L, K), for the kernel."""

    def __init__(self, q: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> None:
        """Lay out rows for the kernel; `mask` broadcasts to (B, H, streams, blocks, c, L), and (..., c, 1)."""
        self._fold, self._keys, self._values = Fold(q, keys), keys.shape, values.shape
        self._rows = [upcast(x) for x in (self._fold.queries(q), self._fold.keys(keys), self._fold.keys(values))]
        self._mask = None if mask[0] is None else self._fold.mask(mask[0])
        self._some = mask[1]

    def attended(self, scale: float) -> tuple[Tensor, Tensor]:
        """Return outputs (B, H, streams, blocks, c, V) and log-sum-exp (..., 1), the least number without a key."""
        heads, log_sum = KERNEL(*self._rows, 0.0, False, attn_mask=self._mask, scale=scale)
        log_sum = self._fold.unfold(log_sum.unsqueeze(-1))
        if self._some is not None:  # to the kernel such a query sees all keys
            log_sum = log_sum.where(self._some, torch.finfo(log_sum.dtype).min)
        return self._fold.unfold(heads), log_sum

    def gradients(self, d_heads: Tensor, heads: Tensor, log_sum: Tensor, scale: float) -> list[Tensor]:
        """Return gradients of queries, keys and values from the whole softmax's d_heads, heads and log_sum."""
        if self._some is not None:
            log_sum = log_sum.where(self._some, torch.finfo(log_sum.dtype).max)
        d_heads, heads, log_sum = (self._fold.queries(x) for x in (d_heads, heads, log_sum))
        known = d_heads, *self._rows, heads, log_sum.squeeze(-1)
        d_q, d_k, d_v = KERNEL_BACKWARD(*known, 0.0, False, attn_mask=self._mask, scale=scale)
        return [self._fold.unfold(d_q), d_k.reshape(self._keys), d_v.reshape(self._values)]


class _Chunk:
    """A few blocks of queries, from the first on, with their windows; all together read the columns.

    Columns next to each window would be copied as often as there are blocks.
    """

    def __init__(
        self, q: Tensor, others: Sequence[Tensor], layout: WindowLayout, first: int, last: int, masks: list[Mask]
    ) -> None:
        self.first, self._layout = first, layout
        self._places = slice(first * layout.block, last * layout.block)
        block_rows = self._blocks(q)
        self._shape = block_rows.shape[3:5]
        windows = [layout.window(_streams(x, layout), first, last) for x in others]
        self._parts = [_Part(block_rows, windows[0], windows[1], masks[0])]
        if layout.columns:
            streams = block_rows.shape[2]
            keys, values = (x[:, :, None, None, : layout.columns].expand(-1, -1, streams, -1, -1, -1) for x in others)
            mask = (None if x is None else self._merged(x) for x in masks[1])
            self._parts.append(_Part(self._merged(block_rows), keys, values, (next(mask), next(mask))))

    def attended(self, scale: float) -> tuple[Tensor, Tensor]:
        """Return outputs (B, H, streams, blocks, c, V) and log-sum-exp (..., 1), the least number without a key."""
        heads, log_sum = self._parts[0].attended(scale)
        for part in self._parts[1:]:
            others, sums = (x.view(*x.shape[:3], *self._shape, -1) for x in part.attended(scale))
            heads, log_sum = heads.lerp_(others, (sums - log_sum).sigmoid_()), torch.logaddexp(log_sum, sums)
        return heads, log_sum

    def gradients(self, d_heads: Tensor, heads: Tensor, log_sum: Tensor, scale: float) -> list[list[Tensor]]:
        """Return the gradients of query, key and value blocks, by part, from the whole softmax (B, H, T, ...)."""
        d_heads, heads, log_sum = (upcast(self._blocks(x)) for x in (d_heads, heads, log_sum))
        first, *rest = self._parts
        gradients = [first.gradients(d_heads, heads, log_sum, scale)]
        for part in rest:
            d_heads, heads, log_sum = (self._merged(x) for x in (d_heads, heads, log_sum))
            d_q, *others = part.gradients(d_heads, heads, log_sum, scale)
            gradients.append([d_q.view(*d_q.shape[:3], *self._shape, -1), *others])
        return gradients

    def _merged(self, x: Tensor) -> Tensor:
        """Return (B, H, streams, blocks, c, ...) as one block; what is alike for all blocks is repeated."""
        return x.expand(*x.shape[:3], *self._shape, -1).flatten(3, 4).unsqueeze(3)

    def _blocks(self, x: Tensor) -> Tensor:
        """Return the blocks (B, H, streams, blocks, c, ...) of x (B, H, T, ...)."""
        block_rows = _streams(x, self._layout)[:, :, :, self._places]
        if missing := self._places.stop - self._places.start - block_rows.shape[3]:
            block_rows = F.pad(block_rows, (0, 0, 0, missing))
        return block_rows.unflatten(3, (-1, self._layout.block))

    def put(self, total: Tensor, blocks: Tensor) -> None:
        """Write blocks (B, H, streams, blocks, c, ...) to their places in total (B, H, T, ...)."""
        block_rows = _streams(total, self._layout)[:, :, :, self._places]
        block_rows.copy_(blocks.flatten(3, 4)[:, :, :, : block_rows.shape[3]])
