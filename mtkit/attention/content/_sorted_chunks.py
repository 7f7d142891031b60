"""The layout of tokens sorted by hash bucket and cut into chunks, in several rounds.

Rows and streams, N = B H of them, are those of `stream_rows`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.windowed_rows import FAR, stream_rows

STEP = 2.0**50
"""Chunk numbers are multiples of it: the square of their distance is 0, or beyond any score."""


def sorted_chunks(
    buckets: Tensor, valid: Tensor | None, chunk: int, across_buckets: bool, causal: bool
) -> list["SortedChunks"]:
    """The layout of the rows in each round, from buckets (B, H, rounds, T) and valid (B, T).

    With `across_buckets`, all sorted tokens are cut into chunks, and a token sees its chunk and the one before.
    Otherwise the tokens of each bucket are cut by themselves, and a token sees no other bucket. Keys that a token has
    seen in an earlier round are hidden.
    """
    batch, heads, _, length = buckets.shape
    rows = stream_rows((batch, length, heads), buckets.device)
    ordered, order = buckets.permute(2, 0, 1, 3).flatten(1, 2).sort(dim=-1, stable=True)  # (rounds, N, T)
    token = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    place = torch.empty_like(order).scatter_(-1, order, token)
    chunks = place // chunk if across_buckets else _chunk_numbers(ordered, chunk).gather(-1, place)
    real = None if valid is None else valid.repeat_interleave(heads, 0)
    return [
        SortedChunks(rows, order[each], place[each], chunks[: each + 1], real, chunk, across_buckets, causal)
        for each in range(len(order))
    ]


class SortedChunks:
    """Tokens sorted by bucket in one round, in blocks, each beside the keys that may be visible to it.

    It is a `Layout` of what `attend_layouts` attends to.
    """

    def __init__(
        self,
        rows: Tensor,
        order: Tensor,
        place: Tensor,
        chunks: Tensor,
        real: Tensor | None,
        chunk: int,
        across: bool,
        causal: bool,
    ) -> None:
        """Rows, order, place and real (N, T); chunks (rounds, N, T) of this round, the last, and those before it."""
        streams, length = order.shape
        # chunks that begin with their bucket begin inside a block: shorter ones are nearer to what is seen
        self.block = min(chunk if across or chunk % 2 else chunk // 2, length)
        self.each = -(-length // self.block)
        self.before = self.block * min(-(-(chunk if across else 2 * chunk) // self.block), self.each - 1)
        self._behind = self.block * min(0 if across or causal else -(-chunk // self.block), self.each - 1)
        self._rest, self._across, self._causal = self.each * self.block - length, across, causal
        self.width = self.before + self.block + self._behind
        stream = torch.arange(streams, device=order.device).unsqueeze(-1)
        self.keys = self._keys(rows.gather(-1, order), rows.numel())
        self.place = place + stream * (self.each * self.block)
        stream_of_key = self._windows(self._keys(stream.expand_as(order), -1))
        elsewhere = stream_of_key != stream.repeat_interleave(self.each, 0).unsqueeze(-1)
        # odd numbers for queries and even ones for keys: a chunk's own and the one before it are one step away
        numbers = (2 * STEP) * chunks.gather(-1, order.expand_as(chunks)).float()
        pairs = [(self._queries(x - STEP), self._windows(self._keys(x, 0))) for x in numbers]
        self._earlier = pairs[:-1]
        if across:  # a window is no more than the two chunks
            missing = torch.zeros_like(order, dtype=torch.bool) if real is None else (~real).gather(-1, order)
            self._hidden = (self._windows(self._keys(missing, 1)) | elsewhere) * FAR
        else:  # no padding is in the bucket of a real token
            self._own = pairs[-1][0], pairs[-1][1].masked_fill(elsewhere, -(2.0**100))
        # among the sorted tokens of a bucket, those behind a token are its future
        self._future = torch.full((self.block, self.block), FAR, device=order.device).triu()

    def hide(self, scores: Tensor, blocks: slice) -> None:
        """See `Layout`."""
        if self._across:
            scores += self._hidden[blocks]
        else:
            i, j = (x[blocks] for x in self._own)
            _limit(scores, i - j, near=True)
        own = scores[..., self.before : self.before + self.block]
        if self._causal:
            own += self._future
        else:
            own.diagonal(dim1=-2, dim2=-1).add_(FAR)
        for i, j in self._earlier:
            _limit(scores, i[blocks] - j[blocks], near=False)

    def _queries(self, numbers: Tensor) -> Tensor:
        """(N, T) to (blocks, c, 1)."""
        return F.pad(numbers, (0, self._rest)).view(-1, self.block, 1)

    def _keys(self, x: Tensor, nothing: int) -> Tensor:
        """(N, T) to (places,)."""
        return F.pad(F.pad(x, (0, self._rest), value=nothing).flatten(), (self.before, self._behind), value=nothing)

    def _windows(self, keys: Tensor) -> Tensor:
        """(places,) to (blocks, 1, L)."""
        return keys.unfold(0, self.width, self.block).unsqueeze(1)


def _limit(scores: Tensor, distance: Tensor, near: bool) -> None:
    """Hides what is further than one step away, or with `near` False what is no further."""
    sign = 1 if near else -1
    limit = scores.new_full((), sign * 2 * STEP**2)  # no copy from the host
    torch.minimum(scores, torch.addcmul(limit, distance, distance, value=-sign).type_as(scores), out=scores)


def _chunk_numbers(buckets: Tensor, chunk: int) -> Tensor:
    """Numbers (..., T) of the chunks of sorted buckets (..., T), each begun by a bucket's first token or a full chunk.

    The last chunk of a bucket is not just before the first of the next.
    """
    place = torch.arange(buckets.shape[-1], device=buckets.device).expand_as(buckets)
    first = buckets != F.pad(buckets[..., :-1], (1, 0), value=-1)
    start = torch.where(first, place, 0).cummax(-1).values
    begins = (place - start) % chunk == 0
    return (begins.long() + first).cumsum(-1)
