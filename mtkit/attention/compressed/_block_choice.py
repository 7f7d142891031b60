"""Attention to compressed blocks that also selects blocks of tokens by their weights.

Weights of a few queries are held at a time: importance is added up from them while they are in the processor's cache,
and the backward pass computes them again.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.compressed._looped_choice import How, looped_choice, loops_choose
from mtkit.attention.compressed._spans import Spans
from mtkit.attention.kernels.chosen_blocks import FORCED, best_blocks
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.tiled_softmax import FAR, LOG2, Tile, TileProvider, attend_blocks, scores_at_once
from mtkit.device import to_device
from mtkit.recording import kept

TOGETHER = 8
"""Selected blocks whose importance is one product."""


class BlockChoice(NamedTuple):
    """The rule that selects blocks of `size` tokens by the weights of compressed blocks, which are `spans`."""

    spans: Spans
    size: int
    selected: int
    causal: bool

    def best(self, importance: Tensor, position: Tensor | None, lengths: Tensor | None) -> Tensor:
        """Return the selected blocks (B, G, T, n); M means none.

        importance (B, G, T, M) of blocks; lengths (B,) without padding. Queries at positions (T, 1) select the blocks
        near them first.
        """
        block = torch.arange(importance.shape[-1], device=importance.device)
        if position is not None:
            query_block = position // self.size
            near = torch.cat([query_block * 0, query_block - 1, query_block + 1], -1).clamp(0, len(block) - 1)
            importance = importance.scatter(-1, near.expand(*importance.shape[:-1], -1), FORCED)
            importance.scatter_(-1, query_block.expand(*importance.shape[:-1], -1), float("inf"))
            if self.causal:
                importance.masked_fill_(block > query_block, float("-inf"))
        if lengths is not None:
            importance = importance.masked_fill(block * self.size >= lengths.view(-1, 1, 1, 1), float("-inf"))
        return best_blocks(importance, self.selected)

    def importance(self, weights: Tensor, blocks: int) -> Tensor:
        """Return the importance (..., M) of blocks from the weights (..., P) of compressed blocks.

        Each compressed block counts as often as the strides that it and the block have in common.
        """
        inside, of_block = self.size // self.spans.stride, self.spans.size // self.spans.stride
        width = TOGETHER * inside
        if missing := self.padded(blocks) - weights.shape[-1]:
            weights = F.pad(weights, (0, missing))
        groups = weights.unflatten(-1, (-1, width))
        total = groups @ _in_common(inside, of_block, weights.device, weights.dtype)  # (..., groups, TOGETHER)
        for last in range(1, of_block):  # these reach into the first block of the next group
            total[..., 1:, 0].add_(groups[..., :-1, width - last], alpha=of_block - last)
        return total.flatten(-2)[..., :blocks]

    def padded(self, blocks: int) -> int:
        """Return the number of compressed blocks of whole groups of `TOGETHER` blocks."""
        return -(-blocks // TOGETHER) * TOGETHER * (self.size // self.spans.stride)


@kept(16)
def _in_common(inside: int, of_block: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return how many strides the compressed blocks and the blocks of a group share, (TOGETHER * inside, TOGETHER)."""
    compressed, first = torch.arange(TOGETHER * inside).unsqueeze(-1), torch.arange(TOGETHER) * inside
    common = (compressed + of_block).minimum(first + inside) - compressed.maximum(first)
    return to_device(common.clamp(min=0).to(dtype), device)


def attend_and_choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: BlockChoice,
    length: int,
    *,
    scale: float,
    self_role: bool,
    valid: Tensor | None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, H, T, V) over compressed blocks, and the selected blocks (B, G, T, n) of `length` tokens.

    q (B, H, T, K), in float32 at least, k (B, G, P, K), v (B, G, P, V); valid (B, length) hides blocks with padding.
    """
    batch, heads, queries, _ = q.shape
    groups = k.shape[1]
    blocks = -(-length // choice.size)
    chosen = torch.empty(batch * groups, queries, choice.selected, dtype=torch.long, device=q.device)
    lengths = None if valid is None else valid.sum(1).repeat_interleave(groups)

    def select(streams: slice, some: slice, weights: Tensor, share: Tensor) -> None:
        """Select for some queries from their weights (s, h * c, P) times share (s, h * c, 1)."""
        few = -(-some.stop // choice.size) if choice.causal else blocks  # later blocks are not seen
        importance = (choice.importance(weights, few) * share).unflatten(1, (-1, some.stop - some.start)).sum(1)
        position = torch.arange(some.start, some.stop, device=q.device).unsqueeze(-1) if self_role else None
        here = None if lengths is None else lengths[streams]
        best = choice.best(importance.unsqueeze(1), position, here)[:, 0]
        chosen[streams, some] = best.masked_fill_(best == few, blocks)

    if not dropout and loops_choose(q, k, v):

        def select_by(first: int, importance: Tensor) -> None:
            """Select for the queries from `first` on from the importance (s, queries, blocks)."""
            some = slice(first, first + importance.shape[1])
            position = torch.arange(some.start, some.stop).unsqueeze(-1) if self_role else None
            chosen[:, some] = choice.best(importance.unsqueeze(1), position, lengths)[:, 0]

        size, stride = choice.spans.size, choice.spans.stride
        seen = torch.full((batch * groups,), choice.spans.closed(length))
        if lengths is not None and not choice.causal:
            seen = (lengths - size).div(stride, rounding_mode="floor").add(1).clamp(min=0)
        sizes = size, stride if choice.causal else 0, choice.size // stride, size // stride
        how = How(sizes, scale, blocks, seen, select_by)
        return looped_choice(how, q, *(x.flatten(0, 1) for x in (k, v))), chosen.unflatten(0, (batch, groups))
    count, hidden = choice.padded(blocks), None
    k, v = (F.pad(x, (0, 0, 0, count - x.shape[2])) for x in (k, v))
    if lengths is not None and not choice.causal:
        ends = torch.arange(count, device=q.device) * choice.spans.stride + choice.spans.size
        hidden = (ends > lengths.unsqueeze(-1)).type_as(upcast(q)) * FAR
    provider = _Tiles(scale, choice, choice.spans.closed(length), hidden, select)
    k, v = (x.flatten(0, 1) for x in (k, v))
    output, _ = attend_blocks(provider, q.unflatten(1, (groups, -1)).flatten(0, 1), k, v, dropout=dropout)
    return output.view(batch, heads, queries, -1), chosen.unflatten(0, (batch, groups))


class _Ranges(NamedTuple):
    """Rows of some streams: queries (N, h, T, X), of all heads that share keys, or the first keys (N, P, X)."""

    ranges: tuple[slice, ...]

    def of(self, x: Tensor) -> Tensor:
        """Return rows (s, n, X)."""
        rows = x[self.ranges]
        return rows.flatten(1, 2) if rows.dim() == 4 else rows

    def add(self, total: Tensor, rows: Tensor) -> None:
        """Add rows (s, n, X) to total."""
        part = total[self.ranges]
        part += rows.view(part.shape)


class _Tiles(TileProvider):
    """Some queries of some streams, with the compressed blocks that they see; a stream has one head of keys."""

    def __init__(
        self,
        scale: float,
        choice: BlockChoice,
        real: int,
        hidden: Tensor | None,
        select: Callable[[slice, slice, Tensor, Tensor], None],
    ) -> None:
        """Store what `select` gets: some streams, some queries, their weights and share.

        Only the first `real` keys exist. `hidden` (N, P) is added to scores.
        """
        super().__init__(scale)
        self.choice, self.real, self.hidden, self.select = choice, real, hidden, select

    def tiles(self, q: Tensor, k: Tensor, v: Tensor, bias: None) -> Iterator[Tile]:
        streams, heads, length, _ = q.shape
        most = max(scores_at_once(q.device) // (heads * k.shape[1]), 1)  # queries
        several = max(most // length, 1)
        for stream in range(0, streams, several):
            for first in range(0, length, most):
                some = slice(stream, min(stream + several, streams)), slice(first, min(first + most, length))
                yield self._tile(q, k, v, *some)

    def _tile(self, q: Tensor, k: Tensor, v: Tensor, streams: slice, some: slice) -> Tile:
        spans, count = self.choice.spans, k.shape[1]
        if self.choice.causal:
            count = self.choice.padded(-(-some.stop // self.choice.size))
        queries, keys = _Ranges((streams, slice(None), some)), _Ranges((streams, slice(count)))
        rows, near_k, near_v = queries.of(q) * (self.scale / LOG2), keys.of(k), keys.of(v)
        scores = upcast(rows @ near_k.mT)
        if self.choice.causal:
            ended = spans.closed(some.start + 1)  # all queries see these
            last = torch.arange(ended, count, device=q.device) * spans.stride + spans.size - 1
            later = last > torch.arange(some.start, some.stop, device=q.device).unsqueeze(-1)
            scores.unflatten(1, (q.shape[1], -1))[..., ended:].masked_fill_(later, FAR)
        elif self.hidden is not None:
            scores += self.hidden[streams].unsqueeze(1)
        else:
            scores[..., self.real :] = FAR
        return Tile(queries, keys, keys, rows, near_k, near_v, scores)

    def read(self, tile: Tile, weights: Tensor, share: Tensor) -> None:
        assert isinstance(tile.queries, _Ranges)
        streams, _, some = tile.queries.ranges
        self.select(streams, some, weights, share)
