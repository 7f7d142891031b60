"""One softmax over windows of keys, and some first keys, by the CPU's fused kernel, a few blocks at a time.

Autograd would hold the gradients of all windows, although each key lies in several; here those of a few blocks are
added up while they are in the cache of the processor. The kernel's backward pass needs outputs and log-sum-exps alone.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtkit.attention.engines.blocks.pattern import Union
from mtkit.attention.engines.blocks.tiles import Fold, WindowLayout, add_windows, room, surely_all
from mtkit.attention.engines.softmax.dot_product import widened
from mtkit.attention.engines.softmax.fused_parts import KERNEL, KERNEL_BACKWARD, added

ROWS_AT_ONCE = 1 << 12
"""Queries of all heads that are worked on at a time."""


def pays(q: Tensor, layout: WindowLayout) -> bool:
    """Whether windows overlap, or have columns, and are more than are worked on at a time."""
    apart = layout.width + layout.columns == layout.block
    return layout.blocks > 1 and not apart and q.shape[:3].numel() > ROWS_AT_ONCE


def attend_windows(
    q: Tensor, k: Tensor, v: Tensor, layout: WindowLayout, *, scale: float, valid: Tensor | None
) -> Tensor:
    """The heads' outputs (B, H, T, V) over the keys of the layout, zero where no key is seen.

    q (B, H, T, K), k (B, G, T, K), v (B, G, T, V) that the kernel takes (`can_fuse`), where G divides H; valid (B, T).
    """
    length = q.shape[2]
    if rest := layout.stream * layout.dilation - length:  # some streams are shorter
        q, k, v = (F.pad(x, (0, 0, 0, rest)) for x in (q, k, v))
    with torch.autocast("cpu", enabled=False):
        heads: Tensor = _Windows.apply(q, k, v, layout, scale, valid)  # type: ignore[no-untyped-call]
    return heads[:, :, :length]


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: WindowLayout, scale: float, valid: Tensor | None
    ) -> Tensor:
        ctx.layout, ctx.scale, ctx.valid = layout, scale, valid
        heads, log_sum = _zeros(v, *q.shape[1:3]), _zeros(widened(v[..., :1]), *q.shape[1:3])
        for chunk in _chunks(q, k, v, layout, valid):
            out, sums = KERNEL(*chunk.rows, 0.0, False, attn_mask=chunk.mask, scale=scale)
            chunk.put(heads, chunk.cleared(out))
            chunk.put(log_sum, sums.unsqueeze(-1))
        ctx.save_for_backward(q, k, v, heads, log_sum)
        return heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast("cpu", enabled=False):  # a caller's own must not change the types in here
            return _Windows._gradients(ctx, d_heads)

    @staticmethod
    def _gradients(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, heads, log_sum), layout = ctx.saved_tensors, ctx.layout
        step, places = layout.block, room(layout.blocks, layout.block, layout.width)
        d_q = _zeros(q, *q.shape[1:3])
        totals = [_zeros(widened(x), x.shape[1], places * layout.dilation) for x in (k, v)]
        start = layout.back * layout.dilation  # before it lies what was zeros before the keys
        d_k, d_v = (total[:, :, start : start + q.shape[2]] for total in totals)
        for chunk in _chunks(q, k, v, layout, ctx.valid):
            above, out, sums = (widened(chunk.queries(x)) for x in (d_heads, heads, log_sum))
            known = chunk.cleared(above), *chunk.rows, out, sums.squeeze(-1)
            d_rows, *found = KERNEL_BACKWARD(*known, 0.0, False, attn_mask=chunk.mask, scale=ctx.scale)
            chunk.put(d_q, d_rows)
            for d, total, rows in zip((d_k, d_v), totals, found, strict=True):
                columns, windows = chunk.beside(rows).tensor_split([layout.columns], 4)
                add_windows(_streams(total, layout), windows, chunk.first, step)
                if layout.columns:
                    d[:, :, : layout.columns] += columns.sum((2, 3))
        return d_q, d_k.type_as(k), d_v.type_as(v), None, None, None


def _zeros(like: Tensor, heads: int, length: int) -> Tensor:
    """(B, heads, length, K), in memory position by position, as projections give and take them."""
    return like.new_zeros(len(like), length, heads, like.shape[-1]).transpose(1, 2)


def _streams(x: Tensor, layout: WindowLayout) -> Tensor:
    """A view (B, H, streams, T / streams, K) of (B, H, T, K)."""
    return x.unflatten(2, (-1, layout.dilation)).transpose(2, 3)


def _chunks(q: Tensor, k: Tensor, v: Tensor, layout: WindowLayout, valid: Tensor | None) -> Iterator["_Chunk"]:
    """All blocks, those that share a mask together."""
    most = max(ROWS_AT_ONCE // (len(q) * q.shape[1] * layout.dilation * layout.block), 1)
    for start, end in layout.groups(valid):
        together = _mask(q, layout, start, end, valid) if layout.alike(start, end, valid) else None
        for first in range(start, end, most):
            last = min(first + most, end)
            yield _Chunk(q, (k, v), layout, first, last, together or _mask(q, layout, first, last, valid))


def _mask(q: Tensor, layout: WindowLayout, first: int, last: int, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What is added to the scores of blocks `first` to `last`, and which queries see a key, None where all do."""
    visible = layout.visible(first, last, valid, Union(()), q.device)
    some = visible.any(-1, keepdim=True)
    return added(visible, some, widened(q)), None if surely_all(some) else some


class _Chunk:
    """A few blocks of queries, from the first on, in the axes of the kernel.

    rows: queries (N, n, c, K), keys and values (N, n, L, K); mask is added to scores.
    """

    def __init__(
        self,
        q: Tensor,
        others: Sequence[Tensor],
        layout: WindowLayout,
        first: int,
        last: int,
        mask: tuple[Tensor, Tensor | None],
    ) -> None:
        self.first, self._layout = first, layout
        self._places = slice(first * layout.block, last * layout.block)
        near = [layout.with_columns(x, layout.window(_streams(x, layout), first, last)) for x in others]
        self._fold, self._near = Fold(self._blocks(q), near[0]), near[0].shape
        self.rows = [widened(x) for x in (self.queries(q), *map(self._fold.keys, near))]
        self.mask, self._some = (x if x is None else self._fold.mask(x) for x in mask)

    def queries(self, x: Tensor) -> Tensor:
        """The rows (N, n, c, ...) of x (B, H, T, ...)."""
        return self._fold.queries(self._blocks(x))

    def _blocks(self, x: Tensor) -> Tensor:
        """(B, H, streams, blocks, c, ...) of x (B, H, T, ...)."""
        own = _streams(x, self._layout)[:, :, :, self._places]
        if missing := self._places.stop - self._places.start - own.shape[3]:
            own = F.pad(own, (0, 0, 0, missing))
        return own.unflatten(3, (-1, self._layout.block))

    def beside(self, rows: Tensor) -> Tensor:
        """(B, G, streams, blocks, L, K) of rows (N, n, L, K)."""
        return rows.reshape(self._near)

    def cleared(self, rows: Tensor) -> Tensor:
        """Rows (N, n, c, ...) with zeros for queries that see nothing: to the kernel they see everything."""
        return rows if self._some is None else rows * self._some

    def put(self, total: Tensor, rows: Tensor) -> None:
        """Writes rows (N, n, c, ...) to where they belong in total (B, H, T, ...)."""
        own = _streams(total, self._layout)[:, :, :, self._places]
        own.copy_(self._fold.unfold(rows).flatten(3, 4)[:, :, :, : own.shape[3]])
