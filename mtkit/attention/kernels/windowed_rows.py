"""One softmax over the keys that several layouts of the same rows place beside blocks of queries, in O(T) memory.

A few blocks of a few streams are computed at a time, so that rows and scores stay in the cache of the processor. The
backward pass computes the scores again, as in Dao et al., "FlashAttention", 2022, arXiv 2205.14135, algorithm 4. Scores
are in units of log 2, because powers of two are the fastest to compute.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.reproducible import seeded_dropout

SCORES_AT_ONCE = {"cpu": 1 << 18}
"""Scores worked on at a time, by kind of device; 2^26 on others."""
ROWS_AT_ONCE = {"cpu": 1 << 14}
"""Rows of whole streams worked on at a time, by kind of device; 2^22 on others."""
FAR = -1e30
"""Added to scores that are hidden: on CPUs faster than putting something else in their place."""
NOTHING_SEEN = FAR / 10
"""A log-sum-exp below this is that of no key."""
SHORTEST = 1e-6
"""Least length that a query is divided by."""


class Layout(Protocol):
    """Streams of rows in blocks of c, each beside a window of L places, which begins `before` places earlier."""

    block: int
    before: int
    width: int
    each: int
    """Blocks of a stream."""
    keys: Tensor
    """(places,): the row at each place, R where there is none; from `before` on those of the queries, each once."""
    place: Tensor
    """(N, T): where among the queries each row of each stream lies."""

    def hide(self, scores: Tensor, blocks: slice) -> None:
        """Lowers scores (blocks, c, L) below `NOTHING_SEEN` where a query does not see a key."""


def stream_rows(shape: Sequence[int], device: torch.device) -> Tensor:
    """The rows (N, T) of each stream, of shape (B, T, H): a row is one head of one token, a stream one of a segment."""
    return torch.arange(math.prod(shape), device=device).view(*shape).transpose(1, 2).flatten(0, 1)


def attend_layouts(q: Tensor, v: Tensor, layouts: Sequence[Layout], *, dropout: float = 0.0) -> Tensor:
    """The outputs (B, T, H, V) of queries (B, T, H, K) over themselves as keys, at length 1, and values (B, T, H, V).

    The softmax of a row runs over the rows that it sees in any layout; a row that sees none gets its own value.
    """
    seed = int(torch.randint(1 << 31, ())) if dropout else 0
    with torch.autocast(q.device.type, enabled=False):
        rows = q.contiguous(), v.contiguous()
        heads: Tensor = _Layouts.apply(*rows, layouts, dropout, seed)  # type: ignore[no-untyped-call]
    return heads


class _Layouts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, v: Tensor, layouts: Sequence[Layout], dropout: float, seed: int) -> Tensor:
        ctx.layouts, ctx.dropout, ctx.seed = layouts, dropout, seed
        rows = stream_rows(q.shape[:3], q.device)
        heads, x = torch.empty_like(v), _Rows(q, v)
        log_sum = x.inverse.new_empty(len(x.q), 1)
        noise = seeded_dropout(dropout, seed, q.device)
        for group in _groups(rows):
            own = rows[group].flatten()
            outputs, sums = zip(*(_attended(x, layout, group, noise) for layout in layouts), strict=True)
            shares = torch.stack(sums)
            top = shares.amax(0)
            shares = shares.sub_(top).exp2_()
            mass = shares.sum(0)
            for output, share in zip(outputs, shares.div_(mass), strict=True):
                output.mul_(share)
            joined = reduce(Tensor.add_, outputs).type_as(v)
            heads.view_as(x.v).index_copy_(0, own, torch.where(top > NOTHING_SEEN, joined, x.v.index_select(0, own)))
            log_sum.index_copy_(0, own, mass.log2_().add_(top))
        ctx.save_for_backward(q, v, heads, log_sum)
        return heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_heads.device.type, enabled=False):  # a caller's own must not change the types in here
            return _Layouts._gradients(ctx, d_heads.contiguous())

    @staticmethod
    def _gradients(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        q, v, heads, log_sum = ctx.saved_tensors
        rows, x = stream_rows(q.shape[:3], q.device), _Rows(q, v)
        out, upstream = heads.view_as(x.v), d_heads.view_as(x.v)
        d_q, d_v = torch.empty_like(x.q), torch.empty_like(x.v)
        # the log-sum-exp, and the mean of the weights' gradients; rows that see nothing or are padding have no weight
        known = log_sum.new_full((len(x.q) + 1, 2), -FAR)
        known[:-1, :1] = torch.where(log_sum > NOTHING_SEEN, log_sum, -FAR)
        noises = [seeded_dropout(ctx.dropout, ctx.seed, q.device) for _ in range(2)]
        for group in _groups(rows):
            own = rows[group].flatten()
            above = upcast(upstream.index_select(0, own))
            known[:, 1:].index_copy_(0, own, (above * out.index_select(0, own)).sum(-1, keepdim=True))
            layouts = [_gradients(x, layout, group, upstream, known, noises) for layout in ctx.layouts]
            of_q, of_k, of_v = (reduce(Tensor.add_, each) for each in zip(*layouts, strict=True))
            of_v.addcmul_(above, (log_sum.index_select(0, own) <= NOTHING_SEEN).type_as(above))
            inverse = x.inverse.index_select(0, own)
            unit = upcast(x.q.index_select(0, own)) * inverse
            along = (of_k * unit).sum(-1, keepdim=True)
            of_k.addcmul_(unit, along, value=-1).mul_(inverse).add_(of_q, alpha=math.log(2))
            d_q.index_copy_(0, own, of_k.type_as(q))
            d_v.index_copy_(0, own, of_v.type_as(v))
        return d_q.view_as(q), d_v.view_as(v), None, None, None


class _Rows:
    """Queries and values by row, (R, K) and (R, V), and 1 over the queries' lengths."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self.q, self.v = q.flatten(0, 2), v.flatten(0, 2)
        length = torch.linalg.vector_norm(self.q, dim=-1, keepdim=True, dtype=upcast(self.q).dtype)
        self.inverse = length.clamp_(min=SHORTEST).reciprocal_()


def _attended(x: _Rows, layout: Layout, group: slice, noise: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The outputs (rows, V) of a group of streams in one layout, and the log-sum-exp (rows, 1), in float32 at least."""
    heads = x.inverse.new_empty((group.stop - group.start) * layout.each * layout.block, x.v.shape[1])
    sums = heads.new_empty(len(heads), 1)
    for part in _parts(x, layout, group):
        top = part.scores.amax(-1, keepdim=True)
        weights = part.scores.sub_(top).exp2_()
        mass = weights.sum(-1, keepdim=True)
        output = noise(weights).type_as(x.v) @ part.v
        torch.div(output, mass, out=part.of_queries(heads))
        torch.add(top, mass.log2_(), out=part.of_queries(sums))
    place = (layout.place[group] - group.start * layout.each * layout.block).flatten()
    return heads.index_select(0, place), sums.index_select(0, place)


def _gradients(
    x: _Rows,
    layout: Layout,
    group: slice,
    upstream: Tensor,
    known: Tensor,
    noises: Sequence[Callable[[Tensor], Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """The share of one layout in the gradients of queries (in units of log 2), keys and values, each (rows, K)."""
    queries = (group.stop - group.start) * layout.each * layout.block
    d_q = x.inverse.new_empty(queries, x.q.shape[1])
    d_k, d_v = (d_q.new_zeros(queries - layout.block + layout.width, rows.shape[1]) for rows in (x.q, x.v))
    for part in _parts(x, layout, group):
        log_sum, mean = part.blocks(known.index_select(0, part.queries)).split(1, dim=-1)
        d_out = part.blocks(upstream.index_select(0, part.queries.clamp(max=len(x.q) - 1)))
        weights = part.scores.sub_(log_sum).exp2_()
        part.add(d_v, noises[0](weights).type_as(x.v).transpose(1, 2) @ d_out)
        d_weights = noises[1](upcast(d_out @ part.v.transpose(1, 2)))
        d_scores = d_weights.sub_(mean).mul_(weights).type_as(x.v)
        part.of_queries(d_q).copy_(d_scores @ part.k)
        part.add(d_k, d_scores.transpose(1, 2) @ part.q)
    place = (layout.place[group] - group.start * layout.each * layout.block).flatten()
    d_q, place = d_q.index_select(0, place), place + layout.before
    return d_q, d_k.index_select(0, place), d_v.index_select(0, place)


class _Part:
    """Some neighbouring blocks of a group: q (blocks, c, K), k and v (blocks, L, K), scores (blocks, c, L)."""

    def __init__(self, x: _Rows, layout: Layout, first: int, last: int, start: int) -> None:
        """Blocks `first` to `last`, of a group that begins with block `start`."""
        self._layout, block = layout, layout.block
        self._span = slice((first - start) * block, (last - start) * block)
        keys = layout.keys[first * block : (last - 1) * block + layout.width]
        self.queries = keys[layout.before : layout.before + (last - first) * block]
        rows = keys.clamp(max=len(x.q) - 1)
        q = x.q.index_select(0, rows)
        k = (q * (x.inverse.index_select(0, rows) / math.log(2))).type_as(x.v)
        self.q = self.blocks(q[layout.before : layout.before + len(self.queries)])
        self.k, self.v = self._windows(k), self._windows(x.v.index_select(0, rows))
        self.scores = upcast(self.q @ self.k.transpose(1, 2))
        layout.hide(self.scores, slice(first, last))

    def blocks(self, rows: Tensor) -> Tensor:
        """(blocks, c, K)."""
        return rows.unflatten(0, (-1, self._layout.block))

    def of_queries(self, total: Tensor) -> Tensor:
        """The rows (blocks, c, K) of these blocks, from those of all queries of the group."""
        return self.blocks(total[self._span])

    def add(self, total: Tensor, windows: Tensor) -> None:
        """Adds windows (blocks, L, K) to the rows of all places, piece by piece, because windows overlap."""
        size = self._span.stop - self._span.start
        for each, piece in enumerate(windows.split(self._layout.block, dim=1)):
            start = self._span.start + each * self._layout.block
            self.blocks(total[start : start + size]).add_(piece)

    def _windows(self, rows: Tensor) -> Tensor:
        """(blocks, L, K), views that overlap."""
        return rows.unfold(0, self._layout.width, self._layout.block).transpose(1, 2)


def scores_at_once(device: torch.device) -> int:
    """The maximum number of scores per part."""
    return SCORES_AT_ONCE.get(device.type, 1 << 26)


def _groups(rows: Tensor) -> Iterator[slice]:
    """All streams of rows (N, T), in groups of limited size."""
    streams, length = rows.shape
    most = max(ROWS_AT_ONCE.get(rows.device.type, 1 << 22) // length, 1)
    for first in range(0, streams, most):
        yield slice(first, min(first + most, streams))


def _parts(x: _Rows, layout: Layout, group: slice) -> Iterator[_Part]:
    """All blocks of a group of streams, in parts of limited size."""
    most = max(scores_at_once(x.q.device) // (layout.block * layout.width), 1)
    start, end = group.start * layout.each, group.stop * layout.each
    for first in range(start, end, most):
        yield _Part(x, layout, first, min(first + most, end), start)
