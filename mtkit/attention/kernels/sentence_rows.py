"""Attention within the sentences of documents, at O(T L) for sentences of up to L tokens.

All tokens of a batch form one sequence, which is cut between sentences into rows: a row has the sentences that begin
within the same L positions, so at most 2 L - 1 tokens. Queries are in the row of their sentence's keys. A mask (rows,
T', S') separates the sentences of a row. The sizes depend on the data: an accelerator would make the host wait.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import attend


def attend_within(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own: Tensor,
    key: Tensor,
    query_valid: Tensor | None = None,
    key_valid: Tensor | None = None,
    *,
    scale: float,
    causal: bool,
    dropout: float = 0.0,
) -> Tensor:
    """Return the heads' outputs (B, H, T, V) of queries that see the real keys with the number of their sentence.

    q (B, H, T, K), k (B, G, S, K), v (B, G', S, V); own (B, T) and key (B, S) are the sentence numbers, which do not
    decrease; query_valid (B, T), key_valid (B, S). Causal queries and keys are the same tokens. The output of padding,
    and of a query without keys, is 0.
    """
    own, key = (x if valid is None else x.where(valid, 0) for x, valid in ((own, query_valid), (key, key_valid)))
    most = torch.maximum(own.max(), key.max()) + 1
    offset = most * torch.arange(len(q), device=q.device).unsqueeze(1)  # no two documents share a number
    (queries, own), (keys, key) = _real(own + offset, query_valid), _real(key + offset, key_valid)
    place = _since_change(key)
    longest = int(place.amax()) + 1 if len(key) else 1
    row = (torch.arange(len(key), device=q.device) - place) // longest
    earlier = torch.searchsorted(key, own, right=True)  # number of keys in the query's sentence or before it
    own_row = F.pad(row, (1, 0))[earlier]  # a query without keys is in the row of the key before it
    count = len(key) // longest + 1
    query_rows, key_rows = _Rows.of(queries, own, own_row, count), _Rows.of(keys, key, row, count)
    same = query_rows.number.unsqueeze(2) == key_rows.number.unsqueeze(1)
    heads, _ = attend(
        query_rows.gather(q),
        key_rows.gather(k),
        key_rows.gather(v),
        scale=scale,
        causal=causal,
        valid=same,
        dropout=dropout,
    )
    return query_rows.scatter(heads, q)


class _Rows(NamedTuple):
    """Tokens arranged in rows of equal width."""

    token: Tensor
    """(rows, width) the token of each cell, counted over the batch; 0 in an empty cell."""
    number: Tensor
    """(rows, width) the number of its sentence; -1 in an empty cell."""
    tokens: Tensor
    """(n,) the real tokens."""
    cell: Tensor
    """(n,) the cells of the real tokens."""

    @classmethod
    def of(cls, tokens: Tensor, number: Tensor, row: Tensor, count: int) -> "_Rows":
        """Place tokens (n,) with the number of their sentence in their row; rows (n,) do not decrease."""
        column = _since_change(row)
        width = int(column.amax()) + 1 if len(column) else 1
        cell = row * width + column
        token = row.new_zeros(count * width).index_put((cell,), tokens)
        numbers = row.new_full((count * width,), -1).index_put((cell,), number)
        return cls(token.view(count, width), numbers.view(count, width), tokens, cell)

    def gather(self, x: Tensor) -> Tensor:
        """Return x (B, H, T, K) in rows, (rows, H, width, K)."""
        cells = x.transpose(1, 2).flatten(0, 1).index_select(0, self.token.flatten())
        return cells.unflatten(0, self.token.shape).transpose(1, 2)

    def scatter(self, rows: Tensor, like: Tensor) -> Tensor:
        """Return rows (rows, H, width, V) as sequences (B, H, T, V), as many as in `like`; padding is 0."""
        cells = rows.transpose(1, 2).flatten(0, 1).index_select(0, self.cell)
        batch, heads, length, _ = like.shape
        x = cells.new_zeros(batch * length, heads, rows.shape[-1]).index_copy(0, self.tokens, cells)
        return x.unflatten(0, (batch, length)).transpose(1, 2)


def _real(number: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the real tokens (n,), counted over the batch, and the numbers (n,) of their sentences."""
    if valid is None:
        return torch.arange(number.numel(), device=number.device), number.flatten()
    tokens = valid.flatten().nonzero().squeeze(1)
    return tokens, number.flatten()[tokens]


def _since_change(x: Tensor) -> Tensor:
    """Return the number of elements in x (n,) since the last change, for each element: 0 at a change."""
    index = torch.arange(len(x), device=x.device)
    changed = F.pad(x[1:] != x[:-1], (1, 0))
    return index - (index * changed).cummax(0).values
