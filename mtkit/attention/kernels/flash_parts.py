"""Softmax by the CPU's flash-attention kernel over keys in several parts, or over windows of keys, in O(T) memory.

The parts of a softmax are joined by their log-sum-exp. The kernel's backward pass computes weights as
exp(score - log-sum-exp) and also needs the outputs (Dao et al., "FlashAttention", 2022, arXiv 2205.14135, algorithm 4):
given the outputs over all parts, it computes each part's share of the gradients.

`attend_fused` lays out each part again in the backward pass, so that only one part's key gradients are held at a time.
`attend_windows` computes a few blocks of queries at a time: autograd would hold the gradients of all windows, although
each key is in several of them; here a few blocks' gradients are added up while they are in the processor's cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.pattern import Union
from mtkit.attention.kernels.pattern_blocks import Fold, WindowLayout, add_windows, room, surely_all

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class KernelRows:
    """Queries (N, n, c, K), keys (N, n, L, K) and values (N, n, L, K) in the kernel's four axes.

    visible broadcasts to (N, n, c, L).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor


@dataclass(frozen=True)
class FusedPart:
    """Keys in one layout, as several groups of rows.

    joined makes (B, H, T, ...) of the groups' results (N, n, c, ...), laid the groups' rows of (B, H, T, ...).
    """

    groups: Sequence[KernelRows]
    join_blocks: Callable[[list[Tensor]], Tensor]
    split_blocks: Callable[[Tensor], list[Tensor]]


Lay = Callable[[Tensor, Tensor, Tensor], FusedPart]
"""Lays out a part of queries, keys and values."""


def can_fuse(q: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes these: it is the CPU's, and values are as wide as keys."""
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def attend_fused(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Lay], *, scale: float) -> Tensor:
    """The heads' outputs (B, H, T, V) over the keys of all parts, zero where no key is seen.

    q (B, H, T, K), k (B, G, T, K), v (B, G, T, V), from which each of `parts` makes a part; they are called again for
    the backward pass. No key is in two parts of a query.
    """
    with torch.autocast("cpu", enabled=False):
        heads: Tensor = _Fused.apply(parts, scale, q, k, v)  # type: ignore[no-untyped-call]
    return heads


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lays: Sequence[Lay], scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.lays, ctx.scale = lays, scale
        parts = [_attended(lay(q, k, v), scale) for lay in lays]
        log_sums = torch.stack([log_sum for _, log_sum in parts])
        shares, log_sum = log_sums.softmax(0), log_sums.logsumexp(0)
        heads = parts[0][0].mul_(shares[0])
        for (others, _), share in zip(parts[1:], shares[1:], strict=True):
            heads.addcmul_(others, share)
        nothing = log_sum <= torch.finfo(log_sum.dtype).min / 2
        heads.masked_fill_(nothing, 0.0)
        ctx.save_for_backward(q, k, v, heads, log_sum.masked_fill(nothing, torch.finfo(log_sum.dtype).max))
        return heads.to(v.dtype, copy=True) if heads.dtype != v.dtype else heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_heads: Tensor) -> tuple[Any, ...]:
        *given, heads, log_sum = ctx.saved_tensors
        total: tuple[Tensor, ...] = ()
        with torch.autocast("cpu", enabled=False):
            for lay in ctx.lays:
                of_part = _gradients(lay, given, (d_heads.type_as(heads), heads, log_sum), ctx.scale)
                total = tuple(map(torch.add, total, of_part)) if total else of_part
        return None, None, *total


def _attended(part: FusedPart, scale: float) -> tuple[Tensor, Tensor]:
    """The outputs (B, H, T, V) of one part, and the log-sum-exp (B, H, T, 1)."""
    results = []
    for group in part.groups:
        q, k, v = (upcast(x) for x in (group.q, group.k, group.v))
        some = group.visible.any(-1, keepdim=True)
        heads, log_sum = KERNEL(q, k, v, 0.0, False, attn_mask=added(group.visible, some, q), scale=scale)
        results.append((heads, log_sum.unsqueeze(-1).where(some, torch.finfo(heads.dtype).min)))
    heads, log_sum = (part.join_blocks(list(blocks)) for blocks in zip(*results, strict=True))
    return heads, log_sum


def _gradients(lay: Lay, given: Sequence[Tensor], joint: Sequence[Tensor], scale: float) -> tuple[Tensor, ...]:
    """What one part adds to the gradients of the given queries, keys and values.

    whole: of all parts together, the gradient of the outputs and the outputs, (B, H, T, V), and the log-sum-exp,
    (B, H, T, 1).
    """
    leaves = [x.detach().requires_grad_() for x in given]
    with torch.enable_grad():
        part = lay(*leaves)
    d_whole, heads, log_sum = (part.split_blocks(x) for x in joint)
    groups = [_gradients_of_group(*inputs, scale) for inputs in zip(part.groups, d_whole, heads, log_sum, strict=True)]
    waiting, gradients = list(zip(*groups, strict=True)), list[Tensor]()
    laid = zip(*((group.q, group.k, group.v) for group in part.groups), strict=True)
    del groups, joint, d_whole, heads, log_sum
    for leaf, rows in zip(leaves, laid, strict=True):
        gradients += torch.autograd.grad(rows, leaf, waiting.pop(0))  # one at a time, so that each then leaves memory
    return tuple(gradients)


def _gradients_of_group(
    rows: KernelRows, d_heads: Tensor, heads: Tensor, log_sum: Tensor, scale: float
) -> list[Tensor]:
    """The gradients of a group's queries, keys and values."""
    laid = rows.q, rows.k, rows.v
    q, k, v = (upcast(x) for x in laid)
    some = rows.visible.any(-1, keepdim=True)
    shown = log_sum.where(some, torch.finfo(log_sum.dtype).max)  # exp would overflow for keys that are not seen
    known = (d_heads * some).contiguous(), q, k, v, heads.contiguous(), shown.squeeze(-1).contiguous()
    gradients = KERNEL_BACKWARD(*known, 0.0, False, attn_mask=added(rows.visible, some, q), scale=scale)
    return [d.type_as(x) for d, x in zip(gradients, laid, strict=True)]


def added(visible: Tensor, some: Tensor, like: Tensor) -> Tensor:
    """What the kernel adds to scores. A row that sees nothing sees all: its result is not read."""
    return torch.zeros((), dtype=like.dtype).where(visible | ~some, float("-inf"))


ROWS_AT_ONCE = 1 << 13
"""Queries of all heads that are worked on at a time."""


def windows_are_faster(q: Tensor, layout: WindowLayout) -> bool:
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
        heads, log_sum = _rows(v, *q.shape[1:3]), _rows(upcast(v[..., :1]), *q.shape[1:3])
        for chunk in _chunks(q, k, v, layout, valid):
            out, sums = chunk.attended(scale)
            chunk.put(heads, out)
            chunk.put(log_sum, sums)
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
        d_q = _rows(q, *q.shape[1:3])
        totals = [_rows(upcast(x), x.shape[1], places * layout.dilation).zero_() for x in (k, v)]
        start = layout.back * layout.dilation  # before it lies what was zeros before the keys
        d_k, d_v = (total[:, :, start : start + q.shape[2]] for total in totals)
        for chunk in _chunks(q, k, v, layout, ctx.valid):
            (d_blocks, *windows), *columns = chunk.gradients(d_heads, heads, log_sum, ctx.scale)
            for total, rows in zip(totals, windows, strict=True):
                add_windows(_streams(total, layout), rows, chunk.first, step)
            for others, *first_keys in columns:
                d_blocks = d_blocks + others
                for d, each in zip((d_k, d_v), first_keys, strict=True):
                    d[:, :, : layout.columns] += each.sum((2, 3))
            chunk.put(d_q, d_blocks)
        return d_q, d_k.type_as(k), d_v.type_as(v), None, None, None


def _rows(like: Tensor, heads: int, length: int) -> Tensor:
    """Room for (B, heads, length, K), in memory position by position, as projections give and take them."""
    return like.new_empty(len(like), length, heads, like.shape[-1]).transpose(1, 2)


def _streams(x: Tensor, layout: WindowLayout) -> Tensor:
    """A view (B, H, streams, T / streams, K) of (B, H, T, K)."""
    return x.unflatten(2, (-1, layout.dilation)).transpose(2, 3)


def _chunks(q: Tensor, k: Tensor, v: Tensor, layout: WindowLayout, valid: Tensor | None) -> Iterator["_Chunk"]:
    """All blocks; blocks that share a mask are in one chunk."""
    most = max(ROWS_AT_ONCE // (len(q) * q.shape[1] * layout.dilation * layout.block), 1)
    for start, end in layout.groups(valid):
        together = _masks(q, layout, start, end, valid) if layout.alike(start, end, valid) else None
        for first in range(start, end, most):
            last = min(first + most, end)
            yield _Chunk(q, (k, v), layout, first, last, together or _masks(q, layout, first, last, valid))


Mask = tuple[Tensor | None, Tensor | None]
"""What is added to the scores of blocks, None where nothing is, and which queries see a key, None where all do."""


def _masks(q: Tensor, layout: WindowLayout, first: int, last: int, valid: Tensor | None) -> list[Mask]:
    """Of blocks `first` to `last` beside their windows, and beside the columns."""
    all_keys = layout.visible(first, last, valid, Union(()), q.device)
    columns, windows = all_keys.tensor_split([layout.columns], -1)
    masks: list[Mask] = []
    for visible in [windows, columns] if layout.columns else [windows]:
        some = visible.any(-1, keepdim=True)
        mask = None if surely_all(visible) else added(visible, some, upcast(q))
        masks.append((mask, None if surely_all(some) else some))
    return masks


class _Part:
    """Queries (B, H, streams, blocks, c, K) beside keys and values (B, G, streams, blocks, L, K), for the kernel."""

    def __init__(self, q: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> None:
        """`mask` broadcasts to (B, H, streams, blocks, c, L), and (..., c, 1)."""
        self._fold, self._keys, self._values = Fold(q, keys), keys.shape, values.shape
        self._rows = [upcast(x) for x in (self._fold.queries(q), self._fold.keys(keys), self._fold.keys(values))]
        self._mask = None if mask[0] is None else self._fold.mask(mask[0])
        self._some = mask[1]

    def attended(self, scale: float) -> tuple[Tensor, Tensor]:
        """The outputs (B, H, streams, blocks, c, V) and their log-sum-exp (..., 1), the least number without a key."""
        heads, log_sum = KERNEL(*self._rows, 0.0, False, attn_mask=self._mask, scale=scale)
        log_sum = self._fold.unfold(log_sum.unsqueeze(-1))
        if self._some is not None:  # to the kernel such a query sees all keys
            log_sum = log_sum.where(self._some, torch.finfo(log_sum.dtype).min)
        return self._fold.unfold(heads), log_sum

    def gradients(self, d_heads: Tensor, heads: Tensor, log_sum: Tensor, scale: float) -> list[Tensor]:
        """Of queries, keys and values, in their axes, from the whole softmax's d_heads, heads and log_sum."""
        if self._some is not None:
            log_sum = log_sum.where(self._some, torch.finfo(log_sum.dtype).max)
        d_heads, heads, log_sum = (self._fold.queries(x) for x in (d_heads, heads, log_sum))
        known = d_heads, *self._rows, heads, log_sum.squeeze(-1)
        d_q, d_k, d_v = KERNEL_BACKWARD(*known, 0.0, False, attn_mask=self._mask, scale=scale)
        return [self._fold.unfold(d_q), d_k.reshape(self._keys), d_v.reshape(self._values)]


class _Chunk:
    """A few blocks of queries, from the first on, beside their windows, and beside the columns as one block.

    Columns next to each window would be copied as often as there are blocks.
    """

    def __init__(
        self,
        q: Tensor,
        others: Sequence[Tensor],
        layout: WindowLayout,
        first: int,
        last: int,
        masks: list[Mask],
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
        """The outputs (B, H, streams, blocks, c, V), zero where no key is seen, and the log-sum-exp (..., 1)."""
        heads, log_sum = self._parts[0].attended(scale)
        for part in self._parts[1:]:
            others, sums = (x.view(*x.shape[:3], *self._shape, -1) for x in part.attended(scale))
            heads, log_sum = heads.lerp_(others, (sums - log_sum).sigmoid_()), torch.logaddexp(log_sum, sums)
        nothing = log_sum <= torch.finfo(log_sum.dtype).min / 2
        return heads.masked_fill_(nothing, 0.0) if nothing.any() else heads, log_sum

    def gradients(self, d_heads: Tensor, heads: Tensor, log_sum: Tensor, scale: float) -> list[list[Tensor]]:
        """Of the queries in blocks, of keys and of values, by part, from those (B, H, T, ...) of the whole softmax."""
        d_heads, heads, log_sum = (upcast(self._blocks(x)) for x in (d_heads, heads, log_sum))
        first, *rest = self._parts
        gradients = [first.gradients(d_heads, heads, log_sum, scale)]
        for part in rest:
            d_heads, heads, log_sum = (self._merged(x) for x in (d_heads, heads, log_sum))
            d_q, *others = part.gradients(d_heads, heads, log_sum, scale)
            gradients.append([d_q.view(*d_q.shape[:3], *self._shape, -1), *others])
        return gradients

    def _merged(self, x: Tensor) -> Tensor:
        """(B, H, streams, blocks, c, ...) as one block; what is alike for all blocks is repeated."""
        return x.expand(*x.shape[:3], *self._shape, -1).flatten(3, 4).unsqueeze(3)

    def _blocks(self, x: Tensor) -> Tensor:
        """(B, H, streams, blocks, c, ...) of x (B, H, T, ...)."""
        block_rows = _streams(x, self._layout)[:, :, :, self._places]
        if missing := self._places.stop - self._places.start - block_rows.shape[3]:
            block_rows = F.pad(block_rows, (0, 0, 0, missing))
        return block_rows.unflatten(3, (-1, self._layout.block))

    def put(self, total: Tensor, blocks: Tensor) -> None:
        """Writes blocks (B, H, streams, blocks, c, ...) to where they belong in total (B, H, T, ...)."""
        block_rows = _streams(total, self._layout)[:, :, :, self._places]
        block_rows.copy_(blocks.flatten(3, 4)[:, :, :, : block_rows.shape[3]])
