"""Attention inside groups of positions, given the group of every query and key: in chunks, or over chosen keys.

Shapes: q (B, H, T, K), k (B, H, S, K), v (B, H, S, V), groups (B, H, T) and (B, H, S); padding has the group `groups`
or a larger one, which stands for none.
"""

from typing import Any

import torch
from torch import Tensor

from mtkit.attention.engines.blocks.block_layout import in_blocks, rows_at
from mtkit.attention.engines.softmax.fused import fused_attention
from mtkit.attention.engines.softmax.gathered import attend_gathered, others_first


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
    """How many members of each group there are up to each position, (B, H, T, groups + 1)."""
    each = torch.arange(groups + 1, device=group.device)
    return (group.unsqueeze(-1) == each).cumsum(2, dtype=torch.int32)


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

    Query and key are positions (B, H, groups, w), with a mask of those that exist. A query of no group gets zero.
    """
    sums = attend_gathered(q, k, v, query, key, scale=scale, shared=shared, dropout=dropout)
    position, taken = (x.flatten(2) for x in query)
    times = sums.new_zeros(sums.shape[:3]).scatter_add(2, position, taken.type_as(sums))
    return (sums / times.clamp(min=1).unsqueeze(-1)).type_as(v)


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


def _values_at(x: Tensor, position: Tensor) -> Tensor:
    """Values (..., blocks, size) of x (..., T) at positions (..., blocks, size)."""
    return rows_at(x.unsqueeze(-1), position).squeeze(-1)
