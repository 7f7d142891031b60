"""Blocks of keys that each query chooses, by the CPU's flash-attention kernel.

Pairs of a query and a block are sorted by block, and the queries that chose a block read it together, `TOGETHER` at a
time (Lu et al., "MoBA", 2025, arXiv 2502.13189, algorithm 1). A query's results are then gathered and added up.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.flash.parts import KERNEL, KERNEL_BACKWARD, position_rows

TOGETHER = 64
"""Queries that read a block together: more of them waste products with rows that are not filled."""
PAIRS_AT_ONCE = 1 << 15
"""Pairs of queries and blocks whose results are held at a time, if a head has no more."""
ROWS_AT_ONCE = 1 << 12
"""Rows of queries that the kernel gets at a time."""


class ChosenPart:
    """The keys of chosen blocks."""

    def __init__(self, chosen: Tensor, size: int, keys: int, valid: Tensor | None) -> None:
        """Store choices (B, C, T, n) of blocks of `size` of the `keys` keys; the number of all blocks means none.

        valid (B, keys).
        """
        self._size, self._blocks, self._hidden = size, -(-keys // size), None
        self._rest = self._blocks * size - keys
        if self._rest or valid is not None:
            seen = torch.ones(len(chosen), keys, dtype=torch.bool) if valid is None else valid
            hidden = ~F.pad(seen, (0, self._rest)).unflatten(1, (self._blocks, size))
            without = F.pad(hidden.all(-1), (0, 1), value=True)  # the kernel needs a key for each query
            empty = without.gather(1, chosen.flatten(1)).view_as(chosen)
            chosen, self._hidden = chosen.masked_fill(empty, self._blocks), hidden.flatten(0, 1)
        self._chosen = chosen
        self._layouts: list[_Layout] = []

    def attended(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        heads, log_sum = position_rows(v, *q.shape[1:3]), position_rows(v[..., :1], *q.shape[1:3])
        q_rows, key_blocks, value_blocks = _rows(q), self._in_blocks(k), self._in_blocks(v)
        self._layouts = list(self._lay_out(q, k.shape[1]))
        for layout in self._layouts:
            outputs, sums = (q_rows.new_empty(*layout.queries.shape, width) for width in (v.shape[-1], 1))
            for some in layout.parts():
                index, block = layout.queries[some], layout.block[some]
                rows = _gathered(q_rows, index), _gathered(key_blocks, block), _gathered(value_blocks, block)
                out, log = KERNEL(*rows, 0.0, False, attn_mask=self._mask(layout, some, q_rows), scale=scale)
                outputs[some], sums[some] = out[0], log[0].unsqueeze(-1)
            layout.join(outputs, sums, heads, log_sum)
        return heads, log_sum

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, d_heads: Tensor, heads: Tensor, log_sum: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        d_q, q_rows, d_rows, out_rows = position_rows(q, *q.shape[1:3]), _rows(q), _rows(d_heads), _rows(heads)
        # weights relative to the greatest number are zero: places without a query add nothing
        sums = F.pad(_rows(log_sum), (0, 0, 0, 1), value=torch.finfo(log_sum.dtype).max)
        key_blocks, value_blocks = self._in_blocks(k), self._in_blocks(v)
        d_keys, d_values = torch.zeros_like(key_blocks), torch.zeros_like(value_blocks)
        for layout in self._layouts:
            d_queries = q_rows.new_empty(*layout.queries.shape, q.shape[-1])
            for some in layout.parts():
                index, block = layout.queries[some], layout.block[some]
                pairs = _gathered(q_rows, index), _gathered(key_blocks, block), _gathered(value_blocks, block)
                out, sum_rows = _gathered(out_rows, index), _gathered(sums, index).squeeze(-1)
                known = _gathered(d_rows, index), *pairs, out, sum_rows, 0.0, False
                mask = self._mask(layout, some, q_rows)
                d, d_k, d_v = KERNEL_BACKWARD(*known, attn_mask=mask, scale=scale)
                d_queries[some] = d[0]
                for total, more in ((d_keys, d_k), (d_values, d_v)):
                    total.flatten(1).index_add_(0, block, more[0].flatten(1))
            layout.put(d_q, layout.added(d_queries, None))
        d_k, d_v = (x.view(*k.shape[:2], -1, k.shape[-1])[:, :, : k.shape[2]] for x in (d_keys, d_values))
        return d_q, d_k, d_v

    def _in_blocks(self, x: Tensor) -> Tensor:
        """Return the blocks (B * G * M, size, K) of keys (B, G, S, K), in float32 at least."""
        return F.pad(upcast(x), (0, 0, 0, self._rest)).reshape(-1, self._size, x.shape[-1])

    def _mask(self, layout: "_Layout", some: slice, like: Tensor) -> Tensor | None:
        """Return what is added to the scores of some rows of blocks, (1, n, 1, size); None if all keys are real."""
        if self._hidden is None:
            return None
        hidden = self._hidden[layout.hidden[some]]
        if not hidden.any():
            return None
        return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, float("-inf"))[None, :, None]

    def _lay_out(self, q: Tensor, groups: int) -> Iterator["_Layout"]:
        """Yield layouts of several segments, or of some heads of one segment."""
        batch, heads, length, _ = q.shape
        pairs = length * self._chosen.shape[-1]
        some_segments = max(PAIRS_AT_ONCE // (heads * pairs), 1)
        some_heads = heads if heads * pairs <= PAIRS_AT_ONCE else max(PAIRS_AT_ONCE // pairs, 1)
        rows = torch.arange(batch * length * heads, dtype=torch.int32).view(batch, length, heads, 1)
        for segment in range(0, batch, some_segments):
            for head in range(0, heads, some_heads):
                of = slice(segment, min(segment + some_segments, batch)), slice(head, min(head + some_heads, heads))
                head_number = torch.arange(of[1].start, of[1].stop)
                chosen = self._chosen[of[0], head_number * self._chosen.shape[1] // heads].transpose(1, 2)
                first = torch.arange(of[0].start, of[0].stop).view(-1, 1, 1, 1) * groups
                first = (first + (head_number * groups // heads).unsqueeze(-1)) * self._blocks
                yield _layout(of, chosen, rows[of[0], :, of[1]], first, self._blocks, groups)


@dataclass(frozen=True)
class _Layout:
    """Pairs of queries, from some segments and heads, with blocks, sorted by block."""

    of: tuple[slice, slice]
    """Segments and heads."""
    is_pair: Tensor
    """(b, T, h, n): which choices are pairs."""
    place: Tensor
    """(pairs,): the place of each pair among the queries laid out."""
    first: Tensor
    """(b * T * h,): the first pair of each query."""
    queries: Tensor
    """(rows, c): the query in each place, by its number in (B, T, H); B * T * H if there is none."""
    block: Tensor
    """(rows,): the number of the block that a row of queries reads, of (B, G, M)."""
    hidden: Tensor
    """(rows,): the same, of (B, M)."""

    def parts(self) -> Iterator[slice]:
        """Yield a few rows at a time."""
        count, most = len(self.block), max(ROWS_AT_ONCE // self.queries.shape[1], 1)
        for row in range(0, count, most):
            yield slice(row, min(row + most, count))

    def join(self, outputs: Tensor, sums: Tensor, heads: Tensor, log_sum: Tensor) -> None:
        """Write the softmax over each query's blocks, from outputs (rows, c, V) and log-sum-exp (rows, c, 1)."""
        nothing = torch.finfo(sums.dtype).min
        by_query = sums.new_full(self.is_pair.shape, nothing)
        by_query[self.is_pair] = sums.flatten().index_select(0, self.place)
        total = by_query.logsumexp(-1, keepdim=True)
        self.put(heads, self.added(outputs, (by_query - total).exp_()[self.is_pair]))
        self.put(log_sum, total)

    def added(self, x: Tensor, weights: Tensor | None) -> Tensor:
        """Return the sums (b * T * h, X) over each query's pairs of x (rows, c, X), times weights (pairs,)."""
        if not len(self.place):
            return x.new_zeros(len(self.first), x.shape[-1])
        rows = x.flatten(0, 1)
        return F.embedding_bag(self.place, rows, self.first, mode="sum", per_sample_weights=weights)

    def put(self, total: Tensor, x: Tensor) -> None:
        """Write the rows x of these segments and heads, (b * T * h, X) or (b, T, h, X), to total (B, H, T, X)."""
        total[self.of].copy_(x.view(*self.is_pair.shape[:3], -1).transpose(1, 2))


def _layout(of: tuple[slice, slice], chosen: Tensor, query: Tensor, first: Tensor, blocks: int, groups: int) -> _Layout:
    """Sort the pairs of queries, numbers (b, T, h, 1), with chosen (b, T, h, n) of M blocks, `first` the first one."""
    is_pair = chosen < blocks
    block = (chosen + first)[is_pair]
    block, order = block.int().sort(stable=True)
    numbers, counts = block.unique_consecutive(return_counts=True)
    width = max(min(TOGETHER, len(block)), 1)
    rows = (counts + width - 1) // width
    start = (rows.cumsum(0) - rows) * width - (counts.cumsum(0) - counts)  # less the pairs before
    sorted_place = torch.arange(len(block)) + start.repeat_interleave(counts)
    place = torch.empty(len(block), dtype=torch.int32)
    place[order] = sorted_place.int()
    queries = query.new_full((int(rows.sum()) * width,), torch.iinfo(torch.int32).max)
    queries[sorted_place] = query.expand_as(is_pair)[is_pair][order]
    number = numbers.repeat_interleave(rows).long()
    hidden = number // (groups * blocks) * blocks + number % blocks
    pairs = is_pair.sum(-1).flatten()
    first_pair = (pairs.cumsum(0) - pairs).int()
    return _Layout(of, is_pair, place, first_pair, queries.view(-1, width), number, hidden)


def _rows(x: Tensor) -> Tensor:
    """Return the rows (B * T * H, X) of x (B, H, T, X), in float32 at least; a view if heads lie side by side."""
    return upcast(x).transpose(1, 2).reshape(-1, x.shape[-1])


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """Return x (R, ...) at index (n, ...), as (1, n, ...); numbers beyond the last row mean the last."""
    return x.index_select(0, index.flatten().clamp(max=len(x) - 1)).view(1, *index.shape, *x.shape[1:])
