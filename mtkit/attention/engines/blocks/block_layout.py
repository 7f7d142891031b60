"""Positions sorted by group, for attention inside clusters or buckets, without a T x T table."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


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
    """(..., T): where each position lies in the blocks; 0 for those left out."""
    members: Tensor
    """(..., blocks, size): the position in each place, 0 in those that stay empty."""
    filled: Tensor
    """(..., blocks, size): whether there is one."""
    first: Tensor
    """(..., groups): the block in which each group begins."""


def in_blocks(group: Tensor, groups: int, size: int) -> GroupedBlocks:
    """The members of each group in order of position, in blocks of `size`; group (..., T), `groups` marks omitted ones.

    The number of blocks is the most that T positions can need, so that it is independent of the groups.
    """
    length = group.shape[-1]
    kept = group < groups
    counts = torch.zeros(*group.shape[:-1], groups + 1, dtype=torch.long, device=group.device)
    counts = counts.scatter_add(-1, group, torch.ones_like(group))[..., :groups]
    needed = (counts + size - 1) // size
    first = needed.cumsum(-1) - needed
    blocks = (length + min(groups, length) * (size - 1)) // size
    slot = first.gather(-1, group.clamp(max=groups - 1)) * size + rank_in_group(group)
    place = torch.where(kept, slot, blocks * size)  # one place behind all, for those left out
    position = torch.arange(length, device=group.device).expand_as(group)
    members = position.new_full((*group.shape[:-1], blocks * size + 1), -1).scatter(-1, place, position)
    members = members[..., :-1].unflatten(-1, (blocks, size))
    return GroupedBlocks(slot.masked_fill(~kept, 0), members.clamp(min=0), members >= 0, first)


def rows_at(x: Tensor, position: Tensor) -> Tensor:
    """Rows (..., blocks, size, K) of x (..., T, K) at positions (..., blocks, size); leading axes are broadcast."""
    leading = x.shape[:-2]
    # indexed among all rows: on CPUs many times faster than `gather`, forward and backward
    first = torch.arange(math.prod(leading), device=x.device).view(*leading, 1, 1) * x.shape[-2]
    index = position + first
    return x.flatten(0, -2).index_select(0, index.flatten()).view(*index.shape, x.shape[-1])
