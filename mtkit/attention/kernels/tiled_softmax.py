"""Softmax attention of query blocks over keys, a few blocks at a time, in O(T) memory.

One autograd function serves all providers of blocks. A provider yields tiles: a few blocks of queries with their keys,
values and scores, so few that the scores stay in the processor's cache. The backward pass computes the scores again, as
in Dao et al., "FlashAttention", 2022, arXiv 2205.14135, algorithm 4. Scores are in units of log 2, because powers of
two are the fastest to compute. Providers: `attend_biased` here, `listed`, `chunks` and `windowed_rows`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.reproducible import seeded_dropout

SCORES_AT_ONCE = {"cpu": 1 << 18}
"""Scores of a tile, by kind of device; 2^26 on others."""
FAR = -1e30
"""Added to the scores of hidden keys: on CPUs faster than replacing them."""
NOTHING_SEEN = FAR / 10
"""A log-sum-exp below this means that no key is seen."""
LOG2 = math.log(2)


def scores_at_once(device: torch.device) -> int:
    """The maximum number of scores per tile."""
    return SCORES_AT_ONCE.get(device.type, 1 << 26)


class Place(Protocol):
    """The place of a tile's rows in a tensor of all queries or keys."""

    def of(self, x: Tensor) -> Tensor:
        """The tile's rows (..., n, K) of x."""

    def add(self, total: Tensor, rows: Tensor) -> None:
        """Add rows (..., n, K) to the tile's rows of total."""


class Slices(NamedTuple):
    """Ranges of the leading axes, which no two tiles share."""

    ranges: tuple[slice, ...]

    def of(self, x: Tensor) -> Tensor:
        """A view of x (..., n, K)."""
        return x[self.ranges]

    def add(self, total: Tensor, rows: Tensor) -> None:
        """Write rows (..., n, K) to total: no two tiles have the same."""
        total[self.ranges].copy_(rows)


@dataclass(frozen=True)
class RowIndex:
    """Rows (..., n) of a matrix; a row may occur several times."""

    index: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Rows (..., n, K) of x (R, K)."""
        return x.index_select(0, self.index.flatten()).unflatten(0, self.index.shape)

    def add(self, total: Tensor, rows: Tensor) -> None:
        """Add rows (..., n, K) to total (R, K)."""
        total.index_add_(0, self.index.flatten(), rows.flatten(0, -2).type_as(total))


@dataclass(frozen=True)
class Tile:
    """Blocks of queries q (..., c, K), scaled, with keys k (..., L, K), values v (..., L, V) and scores (..., c, L)."""

    queries: Place
    keys: Place
    values: Place
    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    """In units of log 2, biased, `FAR` lower for hidden keys."""
    real: Tensor | None = None
    """(..., c, 1): which of the queries count; None: all."""


class LearnedBias(Protocol):
    """A learned bias on scores, during one pass."""

    def add_gradient(self, tile: Tile, d_scores: Tensor) -> Tensor | None:
        """Add to the gradients of the learned tensors; returns the part of the scaled queries' gradient, if any."""

    def gradients(self) -> Sequence[Tensor]:
        """The gradients of the learned tensors over all tiles."""


class TileProvider:
    """A provider of tiles."""

    joined = False
    """Whether a query's softmax runs over all tiles that hold it.

    If so, queries are `RowIndex` of a matrix, and the number of rows is the index of queries that are not real.
    """

    exclusive = False
    """Whether each row of queries, keys and values is in exactly one tile, so that totals need no zeros."""
    least = NOTHING_SEEN
    """A query whose scores are all this low sees no key."""

    def __init__(self, scale: float, added: bool = False) -> None:
        """`scale` multiplies products of queries and keys; if `added`, a query gets the sum of its tiles' outputs."""
        self.scale, self.added = scale, added

    def bias(self, q: Tensor, learned: Sequence[Tensor]) -> LearnedBias | None:
        """The bias of a pass; None if nothing is learned."""
        return None

    def tiles(self, q: Tensor, k: Tensor, v: Tensor, bias: Any) -> Iterator[Tile]:
        """All tiles, in the same order in each pass."""
        raise NotImplementedError

    def read(self, tile: Tile, weights: Tensor, share: Tensor) -> None:
        """Read the weights of a tile in the forward pass: weights (..., c, L) times share (..., c, 1), not joined."""


def attend_blocks(
    blocks: TileProvider, q: Tensor, k: Tensor, v: Tensor, learned: Sequence[Tensor] = (), *, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The outputs (..., V) of queries q (..., K), and which queries see a key if the tiles are joined.

    Keys, values and learned tensors are as the provider takes them. A query that sees no key gets zero. Outputs are in
    float32 at least.
    """
    seed = int(torch.randint(1 << 31, ())) if dropout else 0
    with torch.autocast(q.device.type, enabled=False):
        heads, seen = _TiledSoftmax.apply(blocks, dropout, seed, q, k, v, *learned)  # type: ignore[no-untyped-call]
    return heads, seen


class _TiledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, blocks: TileProvider, dropout: float, seed: int, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.blocks, ctx.dropout, ctx.seed, ctx.learned = blocks, dropout, seed, len(learned)
        count, *others = q.shape[:-1]
        shape = count + blocks.joined, *others, v.shape[-1]
        heads = upcast(v).new_empty(shape) if blocks.exclusive else upcast(v).new_zeros(shape)
        joint = heads.new_full((count + 1 if blocks.joined else 0, 1), FAR)
        log_sums: list[Tensor] = []
        noise = seeded_dropout(dropout, seed, q.device)
        for tile in blocks.tiles(q, k, v, blocks.bias(q, learned)):
            top = tile.scores.amax(-1, keepdim=True)
            weights = tile.scores.sub_(top).exp2_()
            mass, seen = weights.sum(-1, keepdim=True), top > blocks.least
            if tile.real is not None:
                seen &= tile.real
            share = seen / mass
            blocks.read(tile, weights, share)
            output, log_sum = upcast(noise(weights).type_as(v) @ tile.v) * share, top + mass.log2()
            if blocks.joined:
                assert isinstance(tile.queries, RowIndex)
                earlier, log_sum = tile.queries.of(joint), log_sum.where(seen, FAR)
                after = torch.logaddexp2(earlier, log_sum)
                output *= torch.exp2(log_sum - after)
                output.addcmul_(tile.queries.of(heads), torch.expm1((earlier - after) * LOG2))
                tile.queries.add(heads, output)
                joint.view(-1).scatter_(0, tile.queries.index.flatten(), after.flatten())
            else:
                tile.queries.add(heads, output)
                log_sums.append(log_sum.where(seen, -FAR))  # relative to it, every weight is zero
        if blocks.joined:
            joint = joint.where(joint > NOTHING_SEEN, -FAR)
            log_sums = [joint]
        ctx.save_for_backward(q, k, v, heads, *learned, *log_sums)
        seen = joint[:-1] < -NOTHING_SEEN
        ctx.mark_non_differentiable(seen)
        return heads[: len(q)], seen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_heads: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_heads.device.type, enabled=False):  # a caller's own must not change the types in here
            return None, None, None, *_TiledSoftmax._gradients(ctx, d_heads)

    @staticmethod
    def _gradients(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        blocks: TileProvider = ctx.blocks
        q, k, v, heads, *saved = ctx.saved_tensors
        learned, log_sums = saved[: ctx.learned], saved[ctx.learned :]
        room = torch.empty_like if blocks.exclusive else torch.zeros_like
        d_q, d_k, d_v = (room(x, dtype=heads.dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
        if blocks.joined:
            d_q, d_heads = (F.pad(x, (0, 0, 0, 1)) for x in (d_q, d_heads))
        bias = blocks.bias(q, learned)
        noise, again = (seeded_dropout(ctx.dropout, ctx.seed, q.device) for _ in range(2))
        for number, tile in enumerate(blocks.tiles(q, k, v, bias)):
            d_out = tile.queries.of(d_heads)
            log_sum = tile.queries.of(log_sums[0]) if blocks.joined else log_sums[number]
            weights = tile.scores.sub_(log_sum).exp2_()
            mean = None if blocks.added else (d_out * tile.queries.of(heads)).sum(-1, keepdim=True)
            d_out = d_out.type_as(v)
            tile.values.add(d_v, noise(weights).type_as(v).mT @ d_out)
            d_weights = again(upcast(d_out @ tile.v.mT))
            if mean is None:
                mean = (d_weights * weights).sum(-1, keepdim=True)
            d_scores = d_weights.sub_(mean).mul_(weights)
            d_bias = None if bias is None else bias.add_gradient(tile, d_scores)
            d_scores = d_scores.type_as(q)
            d_rows = d_scores @ tile.k
            tile.queries.add(d_q, (d_rows if d_bias is None else d_rows.add_(d_bias)).mul_(blocks.scale))
            tile.keys.add(d_k, d_scores.mT @ (tile.q * LOG2))
        d_q = d_q[:-1] if blocks.joined else d_q
        return d_q.type_as(q), d_k.type_as(k), d_v.type_as(v), *(() if bias is None else bias.gradients())


def attend_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
    """softmax(q k^T scale + bias) v, (N, n, c, V), with a learned bias; each query sees at least one key.

    PyTorch's fused kernel for the CPU has no gradient for a bias: without this, all scores would be kept.
    q (N, n, c, K), k (N, n, L, K) and v (N, n, L, V) may be views that overlap; bias broadcasts to (N, n, c, L), and is
    minus infinity for a hidden key.
    """
    return attend_blocks(_BiasedBlocks(scale), q, k, v, [bias], dropout=dropout)[0].type_as(v)


class _Bias:
    """A bias that broadcasts to (N, n, c, L)."""

    def __init__(self, bias: Tensor) -> None:
        self._bias, self._total = bias / LOG2, torch.zeros_like(bias)

    def at(self, ranges: Sequence[slice]) -> Tensor:
        """The bias of a tile."""
        return _broadcast_slices(self._bias, ranges)

    def add_gradient(self, tile: Tile, d_scores: Tensor) -> None:
        assert isinstance(tile.queries, Slices)
        total = _broadcast_slices(self._total, tile.queries.ranges)
        total += d_scores.sum_to_size(total.shape)

    def gradients(self) -> Sequence[Tensor]:
        return (self._total,)


def _broadcast_slices(x: Tensor, ranges: Sequence[slice]) -> Tensor:
    """The part of x that broadcasts to these ranges of its first axes."""
    return x[tuple(part if size > 1 else slice(None) for part, size in zip(ranges, x.shape, strict=False))]


class _BiasedBlocks(TileProvider):
    exclusive = True
    least = -math.inf  # each query sees a key, however low its bias

    def bias(self, q: Tensor, learned: Sequence[Tensor]) -> _Bias:
        return _Bias(*learned)

    def tiles(self, q: Tensor, k: Tensor, v: Tensor, bias: _Bias) -> Iterator[Tile]:
        """Some blocks of one stream, or all blocks of some streams."""
        for place in slice_blocks(len(q), q.shape[1], q.shape[2] * k.shape[2], q.device):
            # copies: products are faster with keys that do not overlap
            rows, near_k, near_v = (
                q[place.ranges] * (self.scale / LOG2),
                *(x[place.ranges].contiguous() for x in (k, v)),
            )
            scores = upcast(rows @ near_k.mT).add_(bias.at(place.ranges))
            yield Tile(place, place, place, rows, near_k, near_v, scores)


def slice_blocks(streams: int, blocks: int, scores: int, device: torch.device) -> Iterator[Slices]:
    """All blocks of all streams, each of so many scores, in tiles: blocks of one stream, or several whole streams."""
    most = max(scores_at_once(device) // scores, 1)
    several = max(most // blocks, 1)
    for block in range(0, blocks, most):
        for stream in range(0, streams, several):
            yield Slices((slice(stream, min(stream + several, streams)), slice(block, min(block + most, blocks))))
