"""Softmax attention of blocks of queries over blocks of keys picked for each segment and head, in O(T) memory.

A few blocks of queries are computed at a time, so that their scores stay in the cache of the processor. The backward
pass computes the scores again, as in `windowed_rows`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import expand_heads, upcast
from mtkit.attention.kernels.reproducible import seeded_dropout
from mtkit.attention.kernels.windowed_rows import FAR, NOTHING_SEEN, scores_at_once


def attend_picked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    picks: Tensor,
    size: int,
    *,
    scale: float,
    causal: bool = False,
    valid: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """The heads' outputs (B, H, T, V), zero where no key is seen.

    q (B, H, T, K), k (B, G, S, K), v (B, G', S, V) where G and G' divide H; valid (B, S). picks (B or 1, H or 1,
    blocks, slots) are numbers of blocks of `size` keys beside each block of as many queries, each once, in ascending
    order behind the empty slots, which are -1; where causal, none is larger than that of the queries.
    """
    batch, heads, length = q.shape[:3]
    if k.shape[1] != v.shape[1]:
        k, v = (expand_heads(x, heads) for x in (k, v))
    groups, blocks, others = k.shape[1], -(-length // size), -(-k.shape[2] // size)
    picks = picks.expand(batch, heads, -1, -1)
    hidden = _hidden(valid, k.shape[2], others * size, upcast(q)).unflatten(-1, (others, size))
    segment, head = (torch.arange(n, device=q.device) for n in (batch, heads))
    of_keys = (segment.unsqueeze(-1) * groups + head // (heads // groups)) * others
    of_hidden = segment.unsqueeze(-1).clamp(max=len(hidden) - 1) * others
    beside = _Beside(
        picks.flatten(0, 2),
        of_keys.repeat_interleave(blocks),
        of_hidden.expand(-1, heads).repeat_interleave(blocks),
        F.pad(hidden.flatten(0, 1), (0, 0, 0, 1), value=FAR),
        torch.arange(blocks, device=q.device).repeat(batch * heads) if causal and size > 1 else None,
    )
    rows = [_blocks(x, size, count) for x, count in ((q, blocks), (k, others), (v, others))]
    seed = int(torch.randint(1 << 31, ())) if dropout else 0
    with torch.autocast(q.device.type, enabled=False):
        output: Tensor = _Picked.apply(*rows, beside, scale, dropout, seed)  # type: ignore[no-untyped-call]
    return output.view(batch, heads, blocks * size, -1)[:, :, :length]


def _blocks(x: Tensor, size: int, blocks: int) -> Tensor:
    """(B, H, T, K) as blocks of all segments and heads, (B*H*blocks, size, K)."""
    rest = blocks * size - x.shape[2]
    return (F.pad(x, (0, 0, 0, rest)) if rest else x).reshape(-1, size, x.shape[-1])


def _hidden(valid: Tensor | None, keys: int, places: int, like: Tensor) -> Tensor:
    """What padding adds to the scores of keys, (B or 1, places)."""
    if valid is None:
        valid = torch.ones(1, keys, dtype=torch.bool, device=like.device)
    return F.pad((~valid).type_as(like) * FAR, (0, places - keys), value=FAR)


class _Beside(NamedTuple):
    """What lies beside the blocks of queries of all segments and heads, which form one axis of length n."""

    picks: Tensor
    """(n, slots)"""
    first_key: Tensor
    """(n,): where the keys of the block's segment and head begin among all blocks of keys."""
    first_hidden: Tensor
    """(n,): where those of its segment begin in `hidden`."""
    hidden: Tensor
    """(blocks of keys + 1, size): what is added to scores; the last row is that of an empty slot."""
    own: Tensor | None
    """(n,), where queries see no later key: their own block of keys, the last that a block of queries sees, if any."""


class _Part(NamedTuple):
    """A few blocks of queries, the blocks of keys beside them, and their scores (b, c, L)."""

    some: slice
    at: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor


class _Picked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beside: _Beside, scale: float, dropout: float, seed: int
    ) -> Tensor:
        ctx.beside, ctx.scale, ctx.dropout, ctx.seed = beside, scale, dropout, seed
        heads = v.new_empty(*q.shape[:2], v.shape[-1])
        log_sum = upcast(q).new_empty(*q.shape[:2], 1)
        noise = seeded_dropout(dropout, seed, q.device)
        for part in _parts(q, k, v, beside, scale):
            top = part.scores.amax(-1, keepdim=True)
            weights = part.scores.sub_(top).exp_()
            mass, seen = weights.sum(-1, keepdim=True), top > NOTHING_SEEN
            heads[part.some] = (noise(weights).type_as(v) @ part.v) * (seen / mass)
            log_sum[part.some] = torch.where(seen, top + mass.log(), -FAR)  # no score is more than nothing of that
        ctx.save_for_backward(q, k, v, heads, log_sum)
        return heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_heads.device.type, enabled=False):  # a caller's own must not change the types in here
            return _Picked._gradients(ctx, d_heads)

    @staticmethod
    def _gradients(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, heads, log_sum = ctx.saved_tensors
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(upcast(k)), torch.zeros_like(upcast(v))
        mean = (upcast(d_heads) * heads).sum(-1, keepdim=True)
        noise, again = (seeded_dropout(ctx.dropout, ctx.seed, q.device) for _ in range(2))
        for part in _parts(q, k, v, ctx.beside, ctx.scale):
            d_out = d_heads[part.some]
            weights = part.scores.sub_(log_sum[part.some]).exp_()
            _add(d_v, part.at, noise(weights).type_as(v).transpose(1, 2) @ d_out)
            d_weights = again(upcast(d_out @ part.v.transpose(1, 2)))
            d_scores = d_weights.sub_(mean[part.some]).mul_(weights).type_as(q)
            d_q[part.some] = (d_scores @ part.k) * ctx.scale
            _add(d_k, part.at, d_scores.transpose(1, 2) @ (q[part.some] * ctx.scale))
        return d_q, d_k.type_as(k), d_v.type_as(v), None, None, None, None


def _parts(q: Tensor, k: Tensor, v: Tensor, beside: _Beside, scale: float) -> Iterator[_Part]:
    """All blocks of queries (n, c, K), in parts of limited size."""
    (count, size), slots = q.shape[:2], beside.picks.shape[1]
    values = size * slots * max(size, k.shape[-1] // 2)  # scores of a block, or half of its keys where these are more
    most = max(scores_at_once(q.device) // values, 1)
    row = torch.arange(size, device=q.device)
    later = (row > row.unsqueeze(-1)).type_as(beside.hidden) * FAR  # (c, c)
    empty = len(beside.hidden) - 1
    for first in range(0, count, most):
        some = slice(first, min(first + most, count))
        picks = beside.picks[some]
        at = (beside.first_key[some].unsqueeze(-1) + picks.clamp(min=0)).flatten()
        shown = torch.where(picks < 0, empty, beside.first_hidden[some].unsqueeze(-1) + picks)
        near_k, near_v = (x.index_select(0, at).view(len(picks), -1, x.shape[-1]) for x in (k, v))
        scores = upcast((q[some] * scale) @ near_k.transpose(1, 2))
        scores += beside.hidden.index_select(0, shown.flatten()).view(len(picks), 1, -1)
        if beside.own is not None:
            scores[..., -size:].add_(later * (picks[:, -1] == beside.own[some]).view(-1, 1, 1))
        yield _Part(some, at, near_k, near_v, scores)


def _add(total: Tensor, at: Tensor, rows: Tensor) -> None:
    """Adds rows (b, L, K), the blocks of keys at `at`, to total (blocks, size, K)."""
    total.flatten(1).index_add_(0, at, rows.reshape(len(at), -1).type_as(total))
