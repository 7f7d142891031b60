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

    labels (blocks, c, L): a label one past the last of those that have a score hides the key from the query. Where none
    has, 0 shows a key and 1 hides it.
    """

    places: Tensor
    labels: Tensor


class LabelScores(NamedTuple):
    """What labels add to scores: scale * (q . vector + bias), of vectors (H or 1, labels, K), biases (H or 1, labels).

    Queries have as many such sums as there are labels; they are computed for a few blocks at a time.
    """

    vectors: Tensor
    biases: Tensor


def smallest_type(largest: int) -> torch.dtype:
    """The smallest integer type that holds labels up to this one."""
    return torch.uint8 if largest < 256 else torch.int32


def attend_listed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_label: LabelScores | None,
    lists: Lists,
    *,
    missing: Tensor | None = None,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The heads' outputs (B, H, T, V), zero where no key is seen.

    q (B, H, T, K), k (B, H, S, K), v (B, H, S, V); missing (B, S) marks keys that no query sees.
    """
    blocks, block = lists.labels.shape[:2]
    rest = blocks * block - q.shape[2]
    hidden = None if missing is None else missing.repeat_interleave(q.shape[1], 0).type_as(widened(q))
    rows = (F.pad(q, (0, 0, 0, rest)) if rest else q).flatten(0, 1).unflatten(1, (blocks, block))
    seed = int(torch.randint(1 << 31, ())) if dropout else 0
    tables = (None, None) if by_label is None else by_label
    with torch.autocast(q.device.type, enabled=False):
        heads: Tensor = _Listed.apply(  # type: ignore[no-untyped-call]
            rows,
            k.flatten(0, 1).contiguous(),
            v.flatten(0, 1).contiguous(),
            *tables,
            lists,
            hidden,
            scale,
            dropout,
            seed,
        )
    heads = heads.flatten(1, 2)
    return (heads[:, : q.shape[2]] if rest else heads).unflatten(0, q.shape[:2])


class _Part(NamedTuple):
    """A few streams, and a few of their blocks with the places and labels of their keys."""

    streams: slice
    blocks: slice
    places: Tensor
    rows: Tensor
    """(n b L,) the places of all these streams, one stream behind the other: rows of one table are quick to copy."""
    labels: Tensor


class _Listed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        vectors: Tensor | None,
        biases: Tensor | None,
        lists: Lists,
        missing: Tensor | None,
        scale: float,
        dropout: float,
        seed: int,
    ) -> Tensor:
        ctx.lists, ctx.missing, ctx.scale, ctx.dropout, ctx.seed = lists, missing, scale, dropout, seed
        tables = None if vectors is None or biases is None else _Tables(vectors, biases, scale, q)
        heads = v.new_empty(*q.shape[:3], v.shape[-1])
        noise = seeded_dropout(dropout, seed, q.device)
        for part in _parts(lists, len(q), k.shape[1], tables is not None):
            at = part.streams, part.blocks
            scores = _scores(q[at] * scale, tables, _beside(k, part), part, missing)
            weights = noise(scores.softmax(-1)).type_as(v)
            heads[at] = (weights @ _beside(v, part)) * _seen(scores)
        ctx.save_for_backward(q, k, v, vectors, biases, heads)
        return heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_heads.device.type, enabled=False):  # a caller's own must not change the types in here
            return _Listed._gradients(ctx, d_heads)

    @staticmethod
    def _gradients(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, vectors, biases, heads = ctx.saved_tensors
        tables = None if vectors is None else _Tables(vectors, biases, ctx.scale, q)
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(widened(k)), torch.zeros_like(widened(v))
        noise, again = (seeded_dropout(ctx.dropout, ctx.seed, q.device) for _ in range(2))
        for part in _parts(ctx.lists, len(q), k.shape[1], tables is not None):
            at = part.streams, part.blocks
            rows, near_k, near_v = q[at] * ctx.scale, _beside(k, part), _beside(v, part)
            scores = _scores(rows, tables, near_k, part, ctx.missing)
            weights, d_out = scores.softmax(-1), d_heads[at] * _seen(scores)
            _add(d_v, noise(weights).type_as(v).mT @ d_out, part)
            d_weights = again(widened(d_out @ near_v.mT))
            mean = (widened(d_out) * heads[at]).sum(-1, keepdim=True)
            d_scores = d_weights.sub_(mean).mul_(weights)
            d_rows = d_scores.type_as(q) @ near_k
            if tables is not None:
                d_rows += tables.gradient(d_scores, rows, part)
            d_q[at] = d_rows * ctx.scale
            _add(d_k, d_scores.type_as(q).mT @ rows, part)
        d_tables = (None, None) if tables is None else tables.gradients()
        return d_q, d_k.type_as(k), d_v.type_as(v), *d_tables, None, None, None, None, None


class _Tables:
    """The scores by label, of which the last hides keys, and their gradients."""

    def __init__(self, vectors: Tensor, biases: Tensor, scale: float, q: Tensor) -> None:
        self._vectors = F.pad(vectors, (0, 0, 0, 1)).type_as(q)
        self._biases = F.pad(widened(biases) * scale, (0, 1), value=FAR).unsqueeze(1)
        self._scale, self._given = scale, (vectors, biases)
        self._d_vectors, self._d_biases = (torch.zeros_like(widened(x)) for x in (self._vectors, self._biases))

    def scores(self, rows: Tensor, part: _Part) -> Tensor:
        """(n, b, c, L) of queries (n, b, c, K) that are scaled."""
        head = self._heads(part)
        scores = widened(self._by_head(rows) @ self._vectors[head].mT) + self._biases[head]
        return scores.view(*rows.shape[:3], -1).gather(-1, part.labels.expand(len(rows), -1, -1, -1))

    def gradient(self, d_scores: Tensor, rows: Tensor, part: _Part) -> Tensor:
        """That of the queries (n, b, c, K) by that of their scores (n, b, c, L), which the tables' is added to."""
        head = self._heads(part)
        sums = d_scores.new_zeros(*d_scores.shape[:3], self._vectors.shape[1])
        sums = self._by_head(sums.scatter_add_(-1, part.labels.expand_as(d_scores), d_scores))
        self._d_biases.index_add_(0, head, sums.sum(1, keepdim=True))
        sums = sums.type_as(rows)
        self._d_vectors.index_add_(0, head, widened(sums.mT @ self._by_head(rows)))
        return (sums @ self._vectors[head]).view_as(rows)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Those of the tables, of all parts."""
        vectors, biases = self._given
        d_biases = self._d_biases[:, 0, :-1] * self._scale
        return self._d_vectors[:, :-1].type_as(vectors), d_biases.type_as(biases)

    def _heads(self, part: _Part) -> Tensor:
        """Of the streams of a part; 0 where all heads have the same table."""
        count = len(self._vectors)
        streams = torch.arange(part.streams.start, part.streams.stop, device=self._vectors.device)
        return streams[:1] * 0 if count == 1 else streams % count

    def _by_head(self, rows: Tensor) -> Tensor:
        """(heads, rows, K) of (n, b, c, K), one for each table."""
        return rows.flatten(0, 2).unsqueeze(0) if len(self._vectors) == 1 else rows.flatten(1, 2)


def _parts(lists: Lists, streams: int, keys: int, by_label: bool) -> Iterator[_Part]:
    """All streams of so many keys and blocks, in parts of limited size; labels of the type that is asked for."""
    blocks, block, width = lists.labels.shape
    most = max(scores_at_once(lists.labels.device) // (block * width), 1)
    several = max(most // blocks, 1)
    for first in range(0, blocks, most):
        some = slice(first, first + most)
        places, labels = lists.places[some], lists.labels[some].to(torch.long if by_label else torch.bool)
        first_of = torch.arange(min(several, streams), device=places.device).unsqueeze(1) * keys
        rows = first_of + places.flatten()
        for stream in range(0, streams, several):
            end = min(stream + several, streams)
            yield _Part(slice(stream, end), some, places, rows[: end - stream].flatten(), labels)


def _beside(x: Tensor, part: _Part) -> Tensor:
    """The keys (n, b, L, K) of a part, of x (N, S, K)."""
    return x[part.streams].flatten(0, 1).index_select(0, part.rows).unflatten(0, (-1, *part.places.shape))


def _scores(rows: Tensor, tables: _Tables | None, near_k: Tensor, part: _Part, missing: Tensor | None) -> Tensor:
    """(n, b, c, L), of queries (n, b, c, K) that are scaled."""
    scores = widened(rows @ near_k.mT)
    if tables is None:
        scores.masked_fill_(part.labels, FAR)
    else:
        scores += tables.scores(rows, part)
    if missing is not None:
        scores.add_(missing[part.streams][:, part.places].unsqueeze(-2), alpha=FAR)
    return scores


def _seen(scores: Tensor) -> Tensor:
    """Whether a query sees any key, (n, b, c, 1)."""
    return scores.amax(-1, keepdim=True) > NOTHING_SEEN


def _add(total: Tensor, rows: Tensor, part: _Part) -> None:
    """Adds rows (n, b, L, K) to total (N, S, K)."""
    total[part.streams].flatten(0, 1).index_add_(0, part.rows, rows.flatten(0, 2).type_as(total))
