"""Softmax attention of query blocks over lists of keys, with a label for each pair, in O(T) memory."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.tiled_softmax import (
    FAR,
    LOG2,
    RowIndex,
    Slices,
    Tile,
    TileProvider,
    attend_blocks,
    slice_blocks,
)

LANES = 8
"""Sums in which a label's gradient is added up: an addition waits for the one before it to the same sum."""


@dataclass(frozen=True)
class Lists:
    """The keys of each query block: places (blocks, L) in the sequence of keys.

    The list of a block may hold a place twice, but a query sees it at most once.

    labels (blocks, c, L): the label after the last one with a score hides the key from the query. Where none
    has, 0 shows a key and 1 hides it.
    """

    places: Tensor
    labels: Tensor


class LabelScores(NamedTuple):
    """Addends to scores by label: scale * (q . vector + bias), of vectors (H or 1, labels, K), biases (H or 1, labels).

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
    """The heads' outputs (B, H, T, V), zero for queries that see no key.

    q (B, H, T, K), k (B, H, S, K), v (B, H, S, V); missing (B, S) marks keys that no query sees.
    """
    blocks, block = lists.labels.shape[:2]
    rest = blocks * block - q.shape[2]
    hidden = None if missing is None else missing.repeat_interleave(q.shape[1], 0).type_as(upcast(q)).mul_(FAR)
    rows = (F.pad(q, (0, 0, 0, rest)) if rest else q).flatten(0, 1).unflatten(1, (blocks, block))
    provider = _ListedBlocks(lists, k.shape[2], hidden, scale)
    heads, _ = attend_blocks(provider, rows, k.flatten(0, 2), v.flatten(0, 2), by_label or (), dropout=dropout)
    heads = heads.type_as(v).flatten(1, 2)
    return (heads[:, : q.shape[2]] if rest else heads).unflatten(0, q.shape[:2])


@dataclass(frozen=True, kw_only=True)
class _ListedTile(Tile):
    lanes: Tensor
    """The labels (b, c, L), neighbouring keys' in separate tables of `LANES` that lie side by side."""


class _LabelBias:
    """The scores by label of each stream; the last label hides keys."""

    def __init__(self, vectors: Tensor, biases: Tensor, scale: float, q: Tensor) -> None:
        copies, unit = len(q) // len(vectors), scale / LOG2
        self._vectors = F.pad(vectors, (0, 0, 0, 1)).type_as(q).repeat(copies, 1, 1)
        self._biases = F.pad(upcast(biases) * unit, (0, 1), value=FAR).unsqueeze(1).repeat(copies, 1, 1)
        self._d_vectors, self._d_biases = (torch.zeros_like(upcast(x)) for x in (self._vectors, self._biases))
        self._learned, self._scale, self.count = (vectors, biases), scale, self._vectors.shape[1]

    def scores(self, rows: Tensor, streams: slice, labels: Tensor) -> Tensor:
        """(n, b, c, L) of scaled queries (n, b, c, K)."""
        scores = upcast(rows.flatten(1, 2) @ self._vectors[streams].mT).add_(self._biases[streams])
        return scores.view(*rows.shape[:3], -1).gather(-1, labels.expand(len(rows), -1, -1, -1))

    def add_gradient(self, tile: Tile, d_scores: Tensor) -> Tensor:
        assert isinstance(tile, _ListedTile)
        assert isinstance(tile.queries, Slices)
        streams = tile.queries.ranges[0]
        sums = d_scores.new_zeros(*d_scores.shape[:3], LANES * self.count)
        sums.scatter_add_(-1, tile.lanes.expand_as(d_scores), d_scores)
        sums = sums.unflatten(-1, (LANES, self.count)).sum(-2).flatten(1, 2)
        self._d_biases[streams] += sums.sum(1, keepdim=True)
        sums = sums.type_as(tile.q)
        self._d_vectors[streams] += upcast(sums.mT @ tile.q.flatten(1, 2))
        return (sums @ self._vectors[streams]).view_as(tile.q)

    def gradients(self) -> Sequence[Tensor]:
        vectors, biases = self._learned
        d_vectors = self._d_vectors[:, :-1].unflatten(0, (-1, len(vectors))).sum(0) * LOG2
        d_biases = self._d_biases[:, 0, :-1].unflatten(0, (-1, len(biases))).sum(0) * self._scale
        return d_vectors.type_as(vectors), d_biases.type_as(biases)


class _ListedBlocks(TileProvider):
    """Queries (N, blocks, c, K), and keys and values as rows (N * S, K); hidden (N, S) is added to scores."""

    def __init__(self, lists: Lists, keys: int, hidden: Tensor | None, scale: float) -> None:
        super().__init__(scale)
        self.lists, self.keys, self.hidden = lists, keys, hidden

    def bias(self, q: Tensor, learned: Sequence[Tensor]) -> _LabelBias | None:
        return _LabelBias(learned[0], learned[1], self.scale, q) if learned else None

    def tiles(self, q: Tensor, k: Tensor, v: Tensor, bias: _LabelBias | None) -> Iterator[Tile]:
        first_key = torch.arange(len(q), device=q.device).view(-1, 1, 1) * self.keys
        seen = None
        for place in slice_blocks(len(q), q.shape[1], math.prod(self.lists.labels.shape[1:]), q.device):
            streams, blocks = place.ranges
            if blocks != seen:  # streams share places and labels
                seen, places, labels = blocks, self.lists.places[blocks], self.lists.labels[blocks]
                labels = lanes = labels.to(torch.bool if bias is None else torch.long)
                if bias is not None:
                    lanes = labels + torch.arange(labels.shape[-1], device=q.device) % LANES * bias.count
            keys = RowIndex(first_key[streams] + places)
            rows, near_k, near_v = q[place.ranges] * (self.scale / LOG2), keys.of(k), keys.of(v)
            scores = upcast(rows @ near_k.mT)
            if bias is None:
                scores.masked_fill_(labels, FAR)
            else:
                scores += bias.scores(rows, streams, labels)
            if self.hidden is not None:
                scores += self.hidden[streams][:, places].unsqueeze(-2)
            yield _ListedTile(place, keys, keys, rows, near_k, near_v, scores, lanes=lanes)
