"""Softmax attention of blocks of queries over keys, each gathered one by one in every segment and head, in O(T) memory.

A few blocks are computed at a time: rows are gathered for them alone, and scores stay in the cache of the processor.
The backward pass gathers and computes them again, as in `windowed_rows`. Scores are in units of log 2, because powers
of two are the fastest to compute.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.reproducible import seeded_dropout
from mtkit.attention.kernels.windowed_rows import FAR, NOTHING_SEEN, scores_at_once

Places = tuple[Tensor, Tensor]
"""Positions (B, H, blocks, n), and which of them count."""


def attend_gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query: Places,
    key: Places,
    *,
    scale: float,
    causal: bool = False,
    shared: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """The outputs (B, H, T, V) of queries over the keys of their block, in float32 at least, zero where no key is seen.

    q (B, H, T, K), k (B, H, S, K), v (B, H, S, V). A query of several blocks gets the sum of its outputs. Where causal,
    queries see no later keys; where `shared`, their own key only if they see no other.
    """
    (queries, taken), (keys, there) = (tuple(each.flatten(0, 2) for each in places) for places in (query, key))
    stream = torch.arange(len(q) * q.shape[1], device=q.device).repeat_interleave(query[0].shape[2]).unsqueeze(-1)
    queries, keys = queries + stream * q.shape[2], keys + stream * k.shape[2]
    if q.device.type == "cpu":  # blocks without queries are left out; an accelerator would be waited for
        some = taken.any(-1)
        queries, taken, keys, there = (each[some] for each in (queries, taken, keys, there))
    beside = _Beside(queries, taken, keys, there, causal, shared)
    seed = int(torch.randint(1 << 31, ())) if dropout else 0
    rows = (x.flatten(0, 2) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        heads: Tensor = _Gathered.apply(*rows, beside, scale, dropout, seed)  # type: ignore[no-untyped-call]
    return heads.unflatten(0, q.shape[:3])


class _Beside(NamedTuple):
    """What lies beside what in the blocks of all segments and heads, which form one axis of length n."""

    queries: Tensor
    """(n, t): a row among those of all segments and heads."""
    taken: Tensor
    keys: Tensor
    """(n, s)"""
    there: Tensor
    causal: bool
    shared: bool

    def hidden(self, some: slice) -> Tensor:
        """The pairs (b, t, s) of a few blocks that are not seen."""
        here, other = self.queries[some].unsqueeze(-1), self.keys[some].unsqueeze(-2)
        visible = self.taken[some].unsqueeze(-1) & self.there[some].unsqueeze(-2)
        if self.causal:
            visible &= other <= here
        if self.shared:
            visible = others_first(visible, other == here)
        return visible.logical_not_()


class _Part(NamedTuple):
    """A few blocks: their rows in all segments and heads, queries (b, t, K), keys and values (b, s, K), scores."""

    some: slice
    queries: Tensor
    keys: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beside: _Beside, scale: float, dropout: float, seed: int
    ) -> Tensor:
        ctx.beside, ctx.scale, ctx.dropout, ctx.seed = beside, scale, dropout, seed
        heads = upcast(v).new_zeros(len(q), v.shape[1])
        log_sum = upcast(q).new_empty(*beside.queries.shape, 1)
        noise = seeded_dropout(dropout, seed, q.device)
        for part in _parts(q, k, v, beside, scale):
            top = part.scores.amax(-1, keepdim=True)
            weights = part.scores.sub_(top).exp2_()
            mass, seen = weights.sum(-1, keepdim=True), top > NOTHING_SEEN
            _add(heads, part.queries, (noise(weights).type_as(v) @ part.v) * (seen / mass))
            log_sum[part.some] = torch.where(seen, top + mass.log2(), -FAR)  # no score is more than nothing of that
        ctx.save_for_backward(q, k, v, log_sum)
        return heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_heads.device.type, enabled=False):  # a caller's own must not change the types in here
            return _Gathered._gradients(ctx, d_heads)

    @staticmethod
    def _gradients(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_sum = ctx.saved_tensors
        d_q, d_k, d_v = (torch.zeros_like(upcast(x)) for x in (q, k, v))
        noise, again = (seeded_dropout(ctx.dropout, ctx.seed, q.device) for _ in range(2))
        for part in _parts(q, k, v, ctx.beside, ctx.scale):
            d_out = _rows(d_heads, part.queries).type_as(v)
            weights = part.scores.sub_(log_sum[part.some]).exp2_()
            _add(d_v, part.keys, noise(weights).type_as(v).transpose(1, 2) @ d_out)
            d_scores = again(upcast(d_out @ part.v.transpose(1, 2))).mul_(weights)
            d_scores.addcmul_(weights, d_scores.sum(-1, keepdim=True), value=-1)
            d_scores = d_scores.type_as(q)
            _add(d_q, part.queries, (d_scores @ part.k) * ctx.scale)
            _add(d_k, part.keys, d_scores.transpose(1, 2) @ (part.q * math.log(2)))
        return d_q.type_as(q), d_k.type_as(k), d_v.type_as(v), None, None, None, None


def _parts(q: Tensor, k: Tensor, v: Tensor, beside: _Beside, scale: float) -> Iterator[_Part]:
    """All blocks, in parts of limited size, their queries scaled."""
    blocks, size = beside.queries.shape
    most = max(scores_at_once(q.device) // max(size * beside.keys.shape[1], 1), 1)
    for first in range(0, blocks, most):
        some = slice(first, first + most)
        queries, keys = beside.queries[some], beside.keys[some]
        near_q, near_k, near_v = _rows(q, queries) * (scale / math.log(2)), _rows(k, keys), _rows(v, keys)
        scores = upcast(near_q @ near_k.transpose(1, 2)).masked_fill_(beside.hidden(some), FAR)
        yield _Part(some, queries, keys, near_q, near_k, near_v, scores)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (b, n, K) of x (R, K)."""
    return x.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def _add(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """Adds values (b, n, K) to the rows of total (R, K)."""
    total.index_add_(0, rows.flatten(), values.flatten(0, 1).type_as(total))


def others_first(visible: Tensor, own: Tensor) -> Tensor:
    """Visible keys (..., s) without the query's own, except where there is no other."""
    others = visible & ~own
    return torch.where(others.any(-1, keepdim=True), others, visible)
