"""Tokens sorted by hash bucket and cut into chunks, in several rounds: which keys lie beside which queries.

Streams are the heads of all segments, N = B H.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.windows import Part


def sorted_chunks(
    buckets: Tensor, valid: Tensor | None, chunk: int, across_buckets: bool, causal: bool
) -> Iterator["SortedChunks"]:
    """How the tokens lie in each round, of buckets (B, H, rounds, T) and valid (B, T).

    With `across_buckets` the sorted tokens are cut as they lie, a token sees its chunk and the one before it; else the
    tokens of each bucket are cut by themselves, and it sees no other bucket.
    """
    buckets = buckets.permute(2, 0, 1, 3).flatten(1, 2)  # (rounds, N, T)
    order = buckets.argsort(dim=-1, stable=True)
    place = order.argsort(dim=-1)
    chunks = place // chunk
    if not across_buckets:
        chunks = _chunk_numbers(buckets.gather(-1, order), chunk).gather(-1, place)
    chunks = chunks.float()  # faster to compare than integers, and as exact below 2^23 chunks
    real = None if valid is None else valid.repeat_interleave(buckets.shape[1] // len(valid), 0)
    for each in range(len(buckets)):
        yield SortedChunks(order[each], place[each], chunks[: each + 1], real, chunk, across_buckets, causal)


class SortedChunks:
    """Tokens sorted by bucket in one round, in blocks of a chunk, each beside the keys that may be visible to it."""

    def __init__(
        self,
        order: Tensor,
        place: Tensor,
        chunks: Tensor,
        real: Tensor | None,
        chunk: int,
        across_buckets: bool,
        causal: bool,
    ) -> None:
        """Order, place and real (N, T); chunks (rounds, N, T) of this round, which is the last, and those before it."""
        length = order.shape[-1]
        self.length, self.block, self.across = length, min(chunk, length), across_buckets
        self.count = -(-length // self.block)
        # chunks that begin with their bucket begin inside a block, and reach one block further to either side
        self.before = self.block * min(1 if self.across else 2, self.count - 1)
        behind = self.block * min(0 if self.across or causal else 1, self.count - 1)
        self.rest = self.count * self.block - length
        self.behind, self.width = behind + self.rest, self.before + self.block + behind
        self.order, self.place = order, place
        missing = torch.zeros_like(chunks[0]) if real is None else (~real).gather(-1, order).type_as(chunks)
        self.missing = self._keys(missing, 1)
        # odd numbers for queries and even ones for keys: a chunk's own and the one before it are one step away
        numbers = 2 * chunks.gather(-1, order.expand_as(chunks))
        self.numbers = list(zip(self._queries(numbers - 1), self._keys(numbers, 0), strict=True))
        # among the sorted tokens of a bucket, those behind a token are its future
        own = chunks.new_ones(self.block, self.width)
        self.own = own.triu(self.before) if causal else own.triu(self.before).tril(self.before)

    def hidden(self, part: Part) -> Tensor:
        """Above 0 for keys that a query does not see in this round, or has seen in one before it, (n, blocks, c, L)."""
        hidden = self.own + self.missing[part]
        for i, j in self.numbers[:-1]:
            hidden += (2 - (i[part] - j[part]).abs_()).relu_()
        if not self.across:  # there a window is no more than the two chunks
            i, j = (x[part] for x in self.numbers[-1])
            hidden += (i - j).abs_().sub_(1)
        return hidden

    def blocks(self, x: Tensor) -> Tensor:
        """(N, T, K) to sorted (N, blocks, c, K)."""
        return _moved(x, F.pad(self.order, (0, self.rest)), self.place).unflatten(1, (self.count, self.block))

    def windows(self, x: Tensor) -> Tensor:
        """(N, T, K) to sorted (N, S, K), with room before and behind."""
        return _moved(x, F.pad(self.order, (self.before, self.behind)), self.place + self.before)

    def unsorted(self, blocks: Tensor) -> Tensor:
        """(N, blocks, c, V) to (N, T, V)."""
        return _moved(blocks.flatten(1, 2)[:, : self.length], self.place, self.order)

    def _queries(self, numbers: Tensor) -> Tensor:
        """(..., T) to (..., blocks, c, 1)."""
        return F.pad(numbers, (0, self.rest)).unflatten(-1, (self.count, self.block)).unsqueeze(-1)

    def _keys(self, numbers: Tensor, nothing: int) -> Tensor:
        """(..., T) to (..., blocks, 1, L)."""
        padded = F.pad(numbers, (self.before, self.behind), value=nothing)
        return padded.unfold(-1, self.width, self.block).unsqueeze(-2)


def _moved(x: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """Rows (N, S, K) of x (N, T, K) at `order` (N, S), of which that at `place` (N, T) alone has a gradient for it."""
    rows: Tensor = _Moved.apply(x, order, place)  # type: ignore[no-untyped-call]
    return rows


class _Moved(torch.autograd.Function):
    """Faster than a gather: in the backward pass there is nothing to add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return _rows(x, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _rows(gradient, *ctx.saved_tensors), None, None


def _rows(x: Tensor, order: Tensor) -> Tensor:
    first = torch.arange(len(x), device=x.device).unsqueeze(-1) * x.shape[1]
    return x.flatten(0, 1).index_select(0, (first + order).flatten()).unflatten(0, order.shape)


def _chunk_numbers(buckets: Tensor, chunk: int) -> Tensor:
    """Numbers (..., T) of the chunks of sorted buckets (..., T), each begun by a bucket's first token or a full chunk.

    The last chunk of a bucket is not just before the first of the next.
    """
    place = torch.arange(buckets.shape[-1], device=buckets.device).expand_as(buckets)
    first = buckets != F.pad(buckets[..., :-1], (1, 0), value=-1)
    start = torch.where(first, place, 0).cummax(-1).values
    begins = (place - start) % chunk == 0
    return (begins.long() + first).cumsum(-1)
