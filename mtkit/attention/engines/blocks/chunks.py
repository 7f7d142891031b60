"""Attention inside groups of positions, given the group of every query and key: in chunks, or over chosen keys.

Shapes: q (B, H, T, K), k (B, H, S, K), v (B, H, S, V), groups (B, H, T) and (B, H, S); padding has the group `groups`
or a larger one, which stands for none.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.engines.blocks.block_layout import in_blocks, rows_at
from mtkit.attention.engines.softmax.dot_product import widened
from mtkit.attention.engines.softmax.fused import fused_attention


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
    sees itself alone. With `shared` (one group and one vector for query and key) a query sees its own key only where it
    sees no other.
    """
    if q.shape[2] ** 2 <= 3 * window * (q.shape[2] + groups * window):  # blocks would hold more pairs than there are
        visible = _in_near_chunks(query_group, key_group, groups, window, causal)
        return _attend_short(q, k, v, visible, query_group < groups, scale=scale, shared=shared, dropout=dropout)
    keys = in_blocks(key_group, groups, window)
    count = keys.members.shape[2]
    if shared:
        queries, chunk = keys, torch.arange(count, device=q.device).expand(*q.shape[:2], -1)
    else:
        earlier = F.one_hot(key_group, groups + 1).cumsum(2).take_along_dim(query_group.unsqueeze(-1), 3).squeeze(-1)
        chunk = keys.first.gather(2, query_group.clamp(max=groups - 1)) + (earlier - 1).clamp(min=0) // window
        chunk = chunk.clamp(max=count - 1).masked_fill(query_group >= groups, count)
        queries = in_blocks(chunk, count, window)
        chunk = _values_at(chunk, queries.members)[..., 0].clamp(max=count - 1)
    near = chunk.unsqueeze(-1) + torch.arange(-1, 1 if causal else 2, device=q.device)
    place = near.clamp(0, count - 1).flatten(2).unsqueeze(-1)
    outside = ((near < 0) | (near >= count)).flatten(2).unsqueeze(-1)
    position = keys.members.take_along_dim(place, 2)
    group = _values_at(key_group, position).masked_fill(outside | ~keys.filled.take_along_dim(place, 2), -1)
    position, group = (x.unflatten(2, near.shape[2:]).flatten(3) for x in (position, group))
    here = queries.members.unsqueeze(-1)
    visible = (
        group.unsqueeze(-2) == _values_at(query_group, queries.members).unsqueeze(-1)
    ) & queries.filled.unsqueeze(-1)
    if causal:
        visible = visible & (position.unsqueeze(-2) <= here)
    if shared:
        visible = others_first(visible, position.unsqueeze(-2) == here)
    heads = attend_in_blocks(q, k, v, queries.members, position, visible, scale=scale, dropout=dropout).flatten(2, 3)
    place = queries.slot.unsqueeze(-1)
    alone = ~visible.any(-1).flatten(2).unsqueeze(-1).take_along_dim(place, 2)
    heads = torch.where(alone, v.type_as(heads), rows_at(heads, place).squeeze(3))
    return heads.masked_fill((query_group >= groups).unsqueeze(-1), 0.0)


def _in_near_chunks(query_group: Tensor, key_group: Tensor, groups: int, window: int, causal: bool) -> Tensor:
    """Whether each query sees each key, as a dense mask (B, H, T, T)."""
    members = F.one_hot(key_group, groups + 1).cumsum(2)  # (B, H, T, groups + 1), of each group up to each position
    chunk = (members.take_along_dim(key_group.unsqueeze(-1), 3) - 1) // window
    last = (members.take_along_dim(query_group.unsqueeze(-1), 3) - 1).clamp(min=0) // window
    back = last - chunk.transpose(-1, -2)
    visible = (query_group.unsqueeze(-1) == key_group.unsqueeze(-2)) & (back <= 1) & (back >= (0 if causal else -1))
    return visible.tril() if causal else visible


def _attend_short(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, real: Tensor, *, scale: float, shared: bool, dropout: float
) -> Tensor:
    """`attend_in_chunks` for sequences that are short relative to the chunks; real (B, H, T) marks real queries."""
    own = torch.eye(q.shape[2], dtype=torch.bool, device=q.device)
    if shared:
        visible = others_first(visible, own)
    some = visible.any(-1, keepdim=True)
    heads = fused_attention(q, k, v, mask=visible | own & ~some, dropout=dropout, scale=scale)
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
    """Attention of each query over the keys chosen for its group: outputs (B, H, T, V), zero where there are none.

    key_position (B, H, groups, w), with a mask of those that exist. Queries are computed in blocks of `window`, or all
    at once.
    """
    queries = in_blocks(query_group, key_position.shape[2], max(min(window, q.shape[2]), 1))
    of_block = _values_at(query_group, queries.members)[..., :1]
    key, there = (x.take_along_dim(of_block, 2) for x in (key_position, there))
    visible = queries.filled.unsqueeze(-1) & there.unsqueeze(-2)
    heads = attend_in_blocks(q, k, v, queries.members, key, visible, scale=scale, dropout=dropout)
    return rows_at(heads.flatten(2, 3), queries.slot.unsqueeze(-1)).squeeze(3)


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

    Query and key are positions (B, H, groups, w), with a mask of those that exist. A query of no group gets zero.
    """
    (query_position, taken), (key_position, there) = query, key
    visible = taken.unsqueeze(-1) & there.unsqueeze(-2)
    if shared:
        visible = others_first(visible, query_position.unsqueeze(-1) == key_position.unsqueeze(-2))
    heads = attend_in_blocks(q, k, v, query_position, key_position, visible, scale=scale, dropout=dropout)
    rows = widened(heads).flatten(2, 3)
    once = taken.flatten(2).unsqueeze(-1).type_as(rows)
    place = query_position.flatten(2).unsqueeze(-1)
    sums = rows.new_zeros(*q.shape[:3], v.shape[-1]).scatter_add(2, place.expand_as(rows), rows * once)
    times = rows.new_zeros(*q.shape[:3], 1).scatter_add(2, place, once)
    return (sums / times.clamp(min=1)).type_as(heads)


def attend_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_position: Tensor,
    key_position: Tensor,
    visible: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Outputs (B, H, blocks, t, V) of the queries of each block over the keys gathered for it; zero without a key.

    q (B, H, T, K), k (B, H, S, K), v (B, H, S, V), query_position (B, H, blocks, t), key_position (B, H, blocks, s),
    visible (B, H, blocks, t, s).
    """
    q, k, v = (rows_at(x, at) for x, at in ((q, query_position), (k, key_position), (v, key_position)))
    return attend_beside(q, k, v, visible, scale=scale, dropout=dropout)


def attend_beside(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """Outputs (B, H, blocks, t, V) of the queries of each block over the keys beside it; zero without a key.

    q (B, H, blocks, t, K), k (B, H, blocks, s, K), v (B, H, blocks, s, V); visible broadcasts to (B, H, blocks, t, s),
    None where all are.
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


def others_first(visible: Tensor, own: Tensor) -> Tensor:
    """Visible keys (..., s) without the query's own, except where there is no other."""
    others = visible & ~own
    return torch.where(others.any(-1, keepdim=True), others, visible)


def _values_at(x: Tensor, position: Tensor) -> Tensor:
    """Values (..., blocks, size) of x (..., T) at positions (..., blocks, size)."""
    return rows_at(x.unsqueeze(-1), position).squeeze(-1)
