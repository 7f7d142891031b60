"""Softmax attention of blocks of queries over lists of keys, with a label for each pair, in O(T) memory.

A few blocks are computed at a time, so that their scores stay in the cache of the processor. The backward pass computes
the scores again, as in `windowed_rows`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtkit.attention.engines.blocks.windowed_rows import FAR, NOTHING_SEEN, scores_at_once
from mtkit.attention.engines.softmax.dot_product import widened
from mtkit.attention.engines.softmax.dropout import seeded_dropout


@dataclass(frozen=True)
class Lists:
    """The keys of each block of queries: places (blocks, L) in the sequence of keys.

    The list of a block may hold a place twice, but a query sees it at most once.

    labels (blocks, c, L) are columns of a table that holds a score per query and label; a label one past the last
    column hides the key from the query. Without a table, 0 shows a key and 1 hides it.
    """

    places: Tensor
    labels: Tensor


def smallest_type(largest: int) -> torch.dtype:
    """The smallest integer type that holds labels up to this one."""
    return torch.uint8 if largest < 256 else torch.int32


def attend_listed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    lists: Lists,
    *,
    missing: Tensor | None = None,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The heads' outputs (B, H, T, V), zero where no key is seen.

    q (B, H, T, K), k (B, H, S, K), v (B, H, S, V); table (B, H, T, labels), if any, is added to the scaled scores by
    label; missing (B, S) marks keys that no query sees.
    """
    blocks, block = lists.labels.shape[:2]
    rest = blocks * block - q.shape[2]
    hidden = None if missing is None else missing.repeat_interleave(q.shape[1], 0).type_as(widened(q))
    padded = (x if x is None or not rest else F.pad(x, (0, 0, 0, rest)) for x in (q, table))
    rows = (x if x is None else x.flatten(0, 1).unflatten(1, (blocks, block)) for x in padded)
    seed = int(torch.randint(1 << 31, ())) if dropout else 0
    with torch.autocast(q.device.type, enabled=False):
        heads: Tensor = _Listed.apply(  # type: ignore[no-untyped-call]
            *rows, k.flatten(0, 1), v.flatten(0, 1), lists, hidden, scale, dropout, seed
        )
    return heads.flatten(1, 2)[:, : q.shape[2]].unflatten(0, q.shape[:2])


class _Part(NamedTuple):
    """A few streams, and a few of their blocks with the places and labels of their keys."""

    streams: slice
    blocks: slice
    places: Tensor
    labels: Tensor


class _Listed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        table: Tensor | None,
        k: Tensor,
        v: Tensor,
        lists: Lists,
        missing: Tensor | None,
        scale: float,
        dropout: float,
        seed: int,
    ) -> Tensor:
        ctx.lists, ctx.missing, ctx.scale, ctx.dropout, ctx.seed = lists, missing, scale, dropout, seed
        heads = v.new_empty(*q.shape[:3], v.shape[-1])
        noise = seeded_dropout(dropout, seed, q.device)
        for part in _parts(lists, len(q), table):
            at = part.streams, part.blocks
            scores = _scores(q[at], table, _beside(k, part), part, missing, scale)
            weights = noise(scores.softmax(-1)).type_as(v)
            heads[at] = (weights @ _beside(v, part)) * _seen(scores)
        ctx.save_for_backward(q, table, k, v, heads)
        return heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_heads.device.type, enabled=False):  # a caller's own must not change the types in here
            return _Listed._gradients(ctx, d_heads)

    @staticmethod
    def _gradients(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        q, table, k, v, heads = ctx.saved_tensors
        d_q = torch.empty_like(q)
        d_table = torch.empty_like(table) if table is not None and ctx.needs_input_grad[1] else None
        d_k, d_v = torch.zeros_like(widened(k)), torch.zeros_like(widened(v))
        mean = (widened(d_heads) * heads).sum(-1, keepdim=True)
        noise, again = (seeded_dropout(ctx.dropout, ctx.seed, q.device) for _ in range(2))
        for part in _parts(ctx.lists, len(q), table):
            at = part.streams, part.blocks
            near_k, near_v = _beside(k, part), _beside(v, part)
            scores = _scores(q[at], table, near_k, part, ctx.missing, ctx.scale)
            weights, d_out = scores.softmax(-1), d_heads[at] * _seen(scores)
            _add(d_v, noise(weights).type_as(v).transpose(-1, -2) @ d_out, part)
            d_weights = again(widened(d_out @ near_v.transpose(-1, -2)))
            d_scores = d_weights.sub_(mean[at]).mul_(weights)
            if d_table is not None:
                d_table[at] = _by_label(d_scores, part, d_table.shape[-1])
            d_scores = d_scores.type_as(q)
            d_q[at] = (d_scores @ near_k) * ctx.scale
            _add(d_k, d_scores.transpose(-1, -2) @ (q[at] * ctx.scale), part)
        return d_q, d_table, d_k.type_as(k), d_v.type_as(v), None, None, None, None, None


def _parts(lists: Lists, streams: int, table: Tensor | None) -> Iterator[_Part]:
    """All streams and blocks, in parts of limited size; labels of the type that what is done with them asks for."""
    blocks, block, width = lists.labels.shape
    most = max(scores_at_once(lists.labels.device) // (block * width), 1)
    several = max(most // blocks, 1)
    for first in range(0, blocks, most):
        some = slice(first, first + most)
        places, labels = lists.places[some], lists.labels[some].to(torch.bool if table is None else torch.long)
        for stream in range(0, streams, several):
            yield _Part(slice(stream, min(stream + several, streams)), some, places, labels)


def _beside(x: Tensor, part: _Part) -> Tensor:
    """The keys (n, b, L, K) of a part, of x (N, S, K)."""
    return x[part.streams].index_select(1, part.places.flatten()).unflatten(1, part.places.shape)


def _scores(
    q: Tensor, table: Tensor | None, near_k: Tensor, part: _Part, missing: Tensor | None, scale: float
) -> Tensor:
    """(n, b, c, L)."""
    scores = widened((q * scale) @ near_k.transpose(-1, -2))
    if table is None:
        scores.masked_fill_(part.labels, FAR)
    else:
        by_label = F.pad(widened(table[part.streams, part.blocks]), (0, 1), value=FAR)
        scores += by_label.gather(-1, part.labels.expand(len(q), -1, -1, -1))
    if missing is not None:
        scores.add_(missing[part.streams][:, part.places].unsqueeze(-2), alpha=FAR)
    return scores


def _seen(scores: Tensor) -> Tensor:
    """Whether a query sees any key, (n, b, c, 1)."""
    return scores.amax(-1, keepdim=True) > NOTHING_SEEN


def _by_label(scores: Tensor, part: _Part, labels: int) -> Tensor:
    """Sums (n, b, c, labels) of scores (n, b, c, L)."""
    sums = scores.new_zeros(*scores.shape[:3], labels + 1)
    return sums.scatter_add_(-1, part.labels.expand_as(scores), scores)[..., :labels]


def _add(total: Tensor, rows: Tensor, part: _Part) -> None:
    """Adds rows (n, b, L, K) to total (N, S, K)."""
    total[part.streams].index_add_(1, part.places.flatten(), rows.flatten(1, 2).type_as(total))
