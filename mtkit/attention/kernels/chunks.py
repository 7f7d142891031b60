"""Positions sorted by group, for attention inside clusters or buckets, without a T x T table.

Attention inside groups of positions, given the group of every query and key: in chunks, or over chosen keys.

Shapes: q (B, H, T, K), k (B, H, S, K), v (B, H, S, V), groups (B, H, T) and (B, H, S); padding has the group `groups`
or a larger one, which means none.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.fused import fused_attention
from mtkit.attention.kernels.tiled_softmax import FAR, LOG2, RowIndex, Tile, TileProvider, attend_blocks, scores_at_once


def rank_in_group(group: Tensor) -> Tensor:
    """The number of earlier positions in the same group, (..., T) integers, of group (..., T).

    The result is independent of later positions.
    """
    ordered, order = group.sort(dim=-1, stable=True)
    place = torch.arange(group.shape[-1], device=group.device).expand_as(group)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    start = torch.where(first, place, 0).cummax(dim=-1).values  # where the group of each sorted place begins
    return torch.empty_like(place).scatter(-1, order, place - start)


class GroupedBlocks(NamedTuple):
    """Positions laid out group by group in blocks of one size; each group starts a new block."""

    slot: Tensor
    """(..., T): the place of each position in the blocks; 0 for positions that are left out."""
    members: Tensor
    """(..., blocks, size): the position in each place, 0 in an empty place."""
    filled: Tensor
    """(..., blocks, size): whether there is one."""
    first: Tensor
    """(..., groups): the block in which each group begins."""


def in_blocks(group: Tensor, groups: int, size: int) -> GroupedBlocks:
    """The members of each group in order of position, in blocks of `size`; group (..., T), `groups` marks omitted ones.

    The number of blocks is the most that T positions can need, so that it is independent of the groups.
    """
    length = group.shape[-1]
    in_groups = group < groups
    counts = torch.zeros(*group.shape[:-1], groups + 1, dtype=torch.long, device=group.device)
    counts = counts.scatter_add(-1, group, torch.ones_like(group))[..., :groups]
    needed = (counts + size - 1) // size
    first = needed.cumsum(-1) - needed
    blocks = (length + min(groups, length) * (size - 1)) // size
    slot = first.gather(-1, group.clamp(max=groups - 1)) * size + rank_in_group(group)
    place = torch.where(in_groups, slot, blocks * size)  # one place behind all, for those left out
    position = torch.arange(length, device=group.device).expand_as(group)
    members = position.new_full((*group.shape[:-1], blocks * size + 1), -1).scatter(-1, place, position)
    members = members[..., :-1].unflatten(-1, (blocks, size))
    return GroupedBlocks(slot.masked_fill(~in_groups, 0), members.clamp(min=0), members >= 0, first)


def rows_at(x: Tensor, position: Tensor) -> Tensor:
    """Rows (..., blocks, size, K) of x (..., T, K) at positions (..., blocks, size); leading axes are broadcast."""
    leading = x.shape[:-2]
    # indexed among all rows: on CPUs many times faster than `gather`, forward and backward
    first = torch.arange(math.prod(leading), device=x.device).view(*leading, 1, 1) * x.shape[-2]
    index = position + first
    return x.flatten(0, -2).index_select(0, index.flatten()).view(*index.shape, x.shape[-1])


Places = tuple[Tensor, Tensor]
"""Positions (B, H, blocks, n), and which of them are real."""

OWN = FAR * 1e-10
"""Score of a query's own key if it counts only without others: below all scores, above `NOTHING_SEEN`."""


def attend_gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query: Places,
    key: Places,
    *,
    scale: float,
    causal: bool = False,
    shared: bool = False,
    added: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """The outputs (B, H, T, V) of queries over the keys of their block, in float32 at least; zero without a key.

    q (B, H, T, K), k (B, G, S, K), v (B, G, S, V); G divides H. If `added`, a query may be in several blocks and
    gets the sum of its outputs. If causal, queries see no later keys; if `shared`, their own key only without others.
    """
    batch, heads, blocks, _ = query[0].shape
    (queries, real), (keys, there) = (tuple(x.flatten(0, 2) for x in places) for places in (query, key))
    segment, head = torch.arange(batch, device=q.device).unsqueeze(-1), torch.arange(heads, device=q.device)
    group = segment * k.shape[1] + head // (heads // k.shape[1])
    first_query = torch.arange(batch * heads, device=q.device).repeat_interleave(blocks).unsqueeze(-1) * q.shape[2]
    first_key = group.flatten().repeat_interleave(blocks).unsqueeze(-1) * k.shape[2]
    provider = _GatheredBlocks(scale, (queries, real, first_query), (keys, there, first_key), causal, shared, added)
    outputs, _ = attend_blocks(provider, q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2), dropout=dropout)
    return outputs.unflatten(0, q.shape[:3])


class _GatheredBlocks(TileProvider):
    """The blocks of all segments and heads, on one axis of length n.

    Queries: positions (n, t), which of them are real, and the row of position 0 (n, 1) among the rows of all segments
    and heads; likewise keys.
    """

    def __init__(
        self, scale: float, queries: Sequence[Tensor], keys: Sequence[Tensor], causal: bool, shared: bool, added: bool
    ) -> None:
        super().__init__(scale, added)
        if queries[0].device.type == "cpu":  # an accelerator would be waited for
            some = queries[1].any(-1)
            if not some.all():  # blocks without queries are left out
                queries, keys = ([x[some] for x in side] for side in (queries, keys))
        self.queries, self.keys, self.causal, self.shared = queries, keys, causal, shared

    def tiles(self, q: Tensor, k: Tensor, v: Tensor, bias: None) -> Iterator[Tile]:
        (blocks, size), keys = self.queries[0].shape, self.keys[0].shape[1]
        values = keys * max(size, k.shape[1] // 2)  # scores of a block, or half of its keys if these are more
        most = max(scores_at_once(q.device) // max(values, 1), 1)
        for first in range(0, blocks, most):
            some = slice(first, first + most)
            (i, real, first_row), (j, there, first_column) = ([x[some] for x in y] for y in (self.queries, self.keys))
            rows, columns = RowIndex(i + first_row), RowIndex(j + first_column)
            near_q, near_k, near_v = rows.of(q) * (self.scale / LOG2), columns.of(k), columns.of(v)
            scores = upcast(near_q @ near_k.mT)
            i, j = i.unsqueeze(-1), j.unsqueeze(-2)
            if self.shared:
                scores.masked_fill_(i == j, OWN)
            scores += (there.logical_not().type_as(scores) * FAR).unsqueeze(-2)
            if self.causal:
                scores.masked_fill_(j > i, FAR)
            yield Tile(rows, columns, columns, near_q, near_k, near_v, scores, real.unsqueeze(-1))


def others_first(visible: Tensor, own: Tensor) -> Tensor:
    """Visible keys (..., s) without the query's own, unless there is no other."""
    others = visible & ~own
    return torch.where(others.any(-1, keepdim=True), others, visible)


def attend_in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_group: Tensor,
    key_group: Tensor,
    *,
    groups: int,
    window: int,
    scale: float,
    causal: bool,
    shared: bool,
    dropout: float = 0.0,
) -> Tensor:
    """Self-attention in chunks of `window` members of a group: outputs (B, H, T, V), zero at padding.

    The keys of a group, in order of position, are cut into chunks. A query sees the chunk of the last key of its group
    at or before its own position, the chunk before and, unless `causal`, the chunk after. A query without any such key
    sees only itself. With `shared` (one group and one vector for query and key) a query sees its own key only if it
    sees no other.
    """
    if q.shape[2] ** 2 <= 3 * window * (q.shape[2] + groups * window):  # blocks would hold more pairs than there are
        visible = _in_near_chunks(query_group, key_group, groups, window, causal)
        return _attend_short(q, k, v, visible, query_group < groups, scale=scale, shared=shared, dropout=dropout)
    keys = in_blocks(key_group, groups, window)
    count = keys.members.shape[2]
    alone = None
    if shared:
        queries, chunk = keys, torch.arange(count, device=q.device).expand(*q.shape[:2], -1)
    else:
        members = _members_so_far(key_group, groups)
        earlier = members.take_along_dim(query_group.unsqueeze(-1), 3).squeeze(-1)
        visible = earlier if causal else members[:, :, -1].gather(2, query_group)
        alone = (visible == 0) & (query_group < groups)
        chunk = keys.first.gather(2, query_group.clamp(max=groups - 1)) + (earlier - 1).clamp(min=0) // window
        chunk = chunk.masked_fill(alone | (query_group >= groups), count)
        queries = in_blocks(chunk, count, window)
        chunk = _values_at(chunk, queries.members)[..., 0].clamp(max=count - 1)
    near = chunk.unsqueeze(-1) + torch.arange(-1, 1 if causal else 2, device=q.device)
    place = near.clamp(0, count - 1).flatten(2).unsqueeze(-1)
    group = _values_at(key_group, keys.members[..., :1])  # of each chunk
    alike = group.take_along_dim(place, 2).view_as(near) == group.take_along_dim(chunk.unsqueeze(-1), 2)
    alike &= (near >= 0) & (near < count)
    position, there = (x.take_along_dim(place, 2) for x in (keys.members, keys.filled))
    there = there & alike.flatten(2).unsqueeze(-1)
    position, there = (x.unflatten(2, near.shape[2:]).flatten(3) for x in (position, there))
    how: dict[str, Any] = {"scale": scale, "dropout": dropout, "causal": causal, "shared": shared}
    heads = attend_gathered(q, k, v, (queries.members, queries.filled), (position, there), **how).type_as(v)
    return heads if alone is None else torch.where(alone.unsqueeze(-1), v, heads)


def _members_so_far(group: Tensor, groups: int) -> Tensor:
    """Return the number of members in each group up to each position, (B, H, T, groups + 1)."""
    numbers = torch.arange(groups + 1, device=group.device)
    return (group.unsqueeze(-1) == numbers).cumsum(2, dtype=torch.int32)


def _in_near_chunks(query_group: Tensor, key_group: Tensor, groups: int, window: int, causal: bool) -> Tensor:
    """Whether each query sees each key, as a dense mask (B, H, T, T)."""
    members = _members_so_far(key_group, groups)
    chunk = (members.take_along_dim(key_group.unsqueeze(-1), 3) - 1) // window
    last = (members.take_along_dim(query_group.unsqueeze(-1), 3) - 1).clamp(min=0) // window
    back = last - chunk.transpose(-1, -2)
    visible = (query_group.unsqueeze(-1) == key_group.unsqueeze(-2)) & (back <= 1) & (back >= (0 if causal else -1))
    return visible.tril() if causal else visible


def _attend_short(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, real: Tensor, *, scale: float, shared: bool, dropout: float
) -> Tensor:
    """`attend_in_chunks` for sequences that are short relative to the chunks; real (B, H, T) marks real queries."""
    diagonal = torch.eye(q.shape[2], dtype=torch.bool, device=q.device)
    if shared:
        visible = others_first(visible, diagonal)
    some = visible.any(-1, keepdim=True)
    heads = fused_attention(q, k, v, mask=visible | diagonal & ~some, dropout=dropout, scale=scale)
    return torch.where(some, heads, v).masked_fill(~real.unsqueeze(-1), 0.0)


def attend_to_chosen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_group: Tensor,
    key_position: Tensor,
    there: Tensor,
    *,
    window: int,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of each query over the keys chosen for its group: outputs (B, H, T, V), zero if there are none.

    key_position (B, H, groups, w), with a mask of existing positions. Queries are computed in blocks of `window`, or
    all at once.
    """
    queries = in_blocks(query_group, key_position.shape[2], max(min(window, q.shape[2]), 1))
    of_block = _values_at(query_group, queries.members)[..., :1]
    key, there = (x.take_along_dim(of_block, 2) for x in (key_position, there))
    places = queries.members, queries.filled
    return attend_gathered(q, k, v, places, (key, there), scale=scale, dropout=dropout).type_as(v)


def attend_chosen_to_chosen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query: tuple[Tensor, Tensor],
    key: tuple[Tensor, Tensor],
    *,
    scale: float,
    shared: bool,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of the queries chosen for each group over its keys: outputs (B, H, T, V), means over a query's groups.

    Query and key are positions (B, H, groups, w), with a mask of existing positions. A query of no group gets zero.
    """
    sums = attend_gathered(q, k, v, query, key, scale=scale, shared=shared, added=True, dropout=dropout)
    position, taken = (x.flatten(2) for x in query)
    times = sums.new_zeros(sums.shape[:3]).scatter_add(2, position, taken.type_as(sums))
    return (sums / times.clamp(min=1).unsqueeze(-1)).type_as(v)


def attend_beside(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """Outputs (B, H, blocks, t, V) of each block's queries over the keys next to it; zero without a key.

    q (B, H, blocks, t, K), k (B, H, blocks, s, K), v (B, H, blocks, s, V); visible broadcasts to (B, H, blocks, t, s),
    None if all keys are visible.
    """
    leading = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    if visible is None:
        return fused_attention(q, k, v, dropout=dropout, scale=scale).unflatten(0, leading)
    some = visible.any(-1, keepdim=True)
    # some kernels give NaN for a row without any key: it sees all keys, and its output is cleared
    mask = visible | ~some
    mask = (mask if mask.shape[:2] == (1, 1) else mask.expand(*leading, -1, -1, -1)).flatten(0, 1)
    heads = fused_attention(q, k, v, mask=mask, dropout=dropout, scale=scale)
    return heads.unflatten(0, leading).masked_fill(~some, 0.0)


def _values_at(x: Tensor, position: Tensor) -> Tensor:
    """Values (..., blocks, size) of x (..., T) at positions (..., blocks, size)."""
    return rows_at(x.unsqueeze(-1), position).squeeze(-1)
