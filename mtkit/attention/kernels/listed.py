"""Softmax attention of blocks of queries over lists of keys, with a label for each pair, in O(T) memory.

A few blocks are computed at a time, so that their scores stay in the cache of the processor. The backward pass computes
the scores again, as in `windowed_rows`, unless there are so few of them that the forward pass keeps the weights.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.reproducible import seeded_dropout
from mtkit.attention.kernels.windowed_rows import FAR, NOTHING_SEEN, scores_at_once

KEPT = 1 << 24
"""Weights that the forward pass keeps for the backward pass, at most: 64 MiB for each attention."""

LANES = 8
"""Sums that the gradient of a label is added up in: an addition waits for one before it to the same sum."""


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
    keeps: bool = True,
) -> Tensor:
    """The heads' outputs (B, H, T, V), zero where no key is seen.

    q (B, H, T, K), k (B, H, S, K), v (B, H, S, V); missing (B, S) marks keys that no query sees. If it `keeps` weights,
    up to `KEPT` of them stay for the backward pass.
    """
    blocks, block = lists.labels.shape[:2]
    rest = blocks * block - q.shape[2]
    hidden = None if missing is None else missing.repeat_interleave(q.shape[1], 0).type_as(upcast(q))
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
            keeps,
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
    lanes: Tensor
    """The labels, neighbouring keys' in other tables of `LANES` that lie side by side."""


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
        keeps: bool,
    ) -> Tensor:
        ctx.lists, ctx.missing, ctx.scale, ctx.dropout, ctx.seed = lists, missing, scale, dropout, seed
        tables = None if vectors is None or biases is None else _Tables(vectors, biases, scale, q)
        heads = v.new_empty(*q.shape[:3], v.shape[-1])
        seen = torch.empty(*q.shape[:3], 1, dtype=torch.bool, device=q.device)
        size = *q.shape[:3], lists.places.shape[1]
        keeps = keeps and any(ctx.needs_input_grad[:3]) and math.prod(size) <= KEPT
        kept = upcast(q).new_empty(size) if keeps else None
        noise = seeded_dropout(dropout, seed, q.device)
        for part in _parts(lists, len(q), k.shape[1], tables):
            at = part.streams, part.blocks
            scores = _scores(q[at] * scale, tables, _beside(k, part), part, missing)
            seen[at] = scores.amax(-1, keepdim=True) > NOTHING_SEEN
            weights = torch.softmax(scores, -1, out=None if kept is None else kept[at])
            heads[at] = (noise(weights).type_as(v) @ _beside(v, part)) * seen[at]
        ctx.save_for_backward(q, k, v, vectors, biases, heads, seen, kept)
        return heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_heads.device.type, enabled=False):  # a caller's own must not change the types in here
            return _Listed._gradients(ctx, d_heads)

    @staticmethod
    def _gradients(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, vectors, biases, heads, seen, kept = ctx.saved_tensors
        tables = None if vectors is None else _Tables(vectors, biases, ctx.scale, q)
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(upcast(k)), torch.zeros_like(upcast(v))
        noise, again = (seeded_dropout(ctx.dropout, ctx.seed, q.device) for _ in range(2))
        for part in _parts(ctx.lists, len(q), k.shape[1], tables):
            at = part.streams, part.blocks
            rows, near_k, near_v = q[at] * ctx.scale, _beside(k, part), _beside(v, part)
            weights = _scores(rows, tables, near_k, part, ctx.missing).softmax(-1) if kept is None else kept[at]
            d_out = d_heads[at] * seen[at]
            _add(d_v, noise(weights).type_as(v).mT @ d_out, part)
            d_weights = again(upcast(d_out @ near_v.mT))
            mean = (upcast(d_out) * heads[at]).sum(-1, keepdim=True)
            d_scores = d_weights.sub_(mean).mul_(weights)
            d_rows = d_scores.type_as(q) @ near_k
            if tables is not None:
                d_rows += tables.gradient(d_scores, rows, part)
            d_q[at] = d_rows * ctx.scale
            _add(d_k, d_scores.type_as(q).mT @ rows, part)
        d_tables = (None, None) if tables is None else tables.gradients()
        return d_q, d_k.type_as(k), d_v.type_as(v), *d_tables, None, None, None, None, None, None


class _Tables:
    """The scores by label of each stream, of which the last label hides keys, and their gradients."""

    def __init__(self, vectors: Tensor, biases: Tensor, scale: float, q: Tensor) -> None:
        copies = len(q) // len(vectors)
        self._vectors = F.pad(vectors, (0, 0, 0, 1)).type_as(q).repeat(copies, 1, 1)
        self._biases = F.pad(upcast(biases) * scale, (0, 1), value=FAR).unsqueeze(1).repeat(copies, 1, 1)
        self._d_vectors, self._d_biases = (torch.zeros_like(upcast(x)) for x in (self._vectors, self._biases))
        self._given, self._scale, self.count = (vectors, biases), scale, self._vectors.shape[1]

    def scores(self, rows: Tensor, part: _Part) -> Tensor:
        """(n, b, c, L) of queries (n, b, c, K) that are scaled."""
        scores = upcast(rows.flatten(1, 2) @ self._vectors[part.streams].mT).add_(self._biases[part.streams])
        return scores.view(*rows.shape[:3], -1).gather(-1, part.labels.expand(len(rows), -1, -1, -1))

    def gradient(self, d_scores: Tensor, rows: Tensor, part: _Part) -> Tensor:
        """That of the queries (n, b, c, K) by that of their scores (n, b, c, L), which the tables' is added to."""
        sums = d_scores.new_zeros(*d_scores.shape[:3], LANES * self.count)
        sums.scatter_add_(-1, part.lanes.expand_as(d_scores), d_scores)
        sums = sums.unflatten(-1, (LANES, self.count)).sum(-2).flatten(1, 2)
        self._d_biases[part.streams] += sums.sum(1, keepdim=True)
        sums = sums.type_as(rows)
        self._d_vectors[part.streams] += upcast(sums.mT @ rows.flatten(1, 2))
        return (sums @ self._vectors[part.streams]).view_as(rows)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Those of the tables, of all parts."""
        vectors, biases = self._given
        d_vectors = self._d_vectors[:, :-1].unflatten(0, (-1, len(vectors))).sum(0)
        d_biases = self._d_biases[:, 0, :-1].unflatten(0, (-1, len(biases))).sum(0) * self._scale
        return d_vectors.type_as(vectors), d_biases.type_as(biases)


def _parts(lists: Lists, streams: int, keys: int, tables: _Tables | None) -> Iterator[_Part]:
    """All streams of so many keys and blocks, in parts of limited size; labels that are looked up in the tables."""
    blocks, block, width = lists.labels.shape
    most = max(scores_at_once(lists.labels.device) // (block * width), 1)
    several = max(most // blocks, 1)
    for first in range(0, blocks, most):
        some = slice(first, first + most)
        places, labels = lists.places[some], lists.labels[some].to(torch.bool if tables is None else torch.long)
        lanes = labels if tables is None else labels + torch.arange(width, device=places.device) % LANES * tables.count
        first_of = torch.arange(min(several, streams), device=places.device).unsqueeze(1) * keys
        rows = first_of + places.flatten()
        for stream in range(0, streams, several):
            end = min(stream + several, streams)
            yield _Part(slice(stream, end), some, places, rows[: end - stream].flatten(), labels, lanes)


def _beside(x: Tensor, part: _Part) -> Tensor:
    """The keys (n, b, L, K) of a part, of x (N, S, K)."""
    return x[part.streams].flatten(0, 1).index_select(0, part.rows).unflatten(0, (-1, *part.places.shape))


def _scores(rows: Tensor, tables: _Tables | None, near_k: Tensor, part: _Part, missing: Tensor | None) -> Tensor:
    """(n, b, c, L), of queries (n, b, c, K) that are scaled."""
    scores = upcast(rows @ near_k.mT)
    if tables is None:
        scores.masked_fill_(part.labels, FAR)
    else:
        scores += tables.scores(rows, part)
    if missing is not None:
        scores.add_(missing[part.streams][:, part.places].unsqueeze(-2), alpha=FAR)
    return scores


def _add(total: Tensor, rows: Tensor, part: _Part) -> None:
    """Adds rows (n, b, L, K) to total (N, S, K)."""
    total[part.streams].flatten(0, 1).index_add_(0, part.rows, rows.flatten(0, 2).type_as(total))
