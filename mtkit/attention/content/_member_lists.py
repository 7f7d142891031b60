"""Lists of the latest members of each group, in which a decoding step finds the tokens of its own group."""

import torch
from torch import Tensor

from mtkit.attention.contract import State


def start_lists(batch_size: int, hypotheses: int, heads: int, groups: int, like: Tensor) -> State:
    """Empty lists of the latest members of each group."""
    shape = (batch_size, hypotheses, heads, groups)
    count = torch.zeros(shape, dtype=torch.long, device=like.device)
    return {"members": count.new_zeros(*shape, 1), "count": count}


def enlist(lists: State, group: Tensor, position: int, most: int) -> State:
    """The lists with `position` appended to that of its group (B, N, H); each keeps its last `most` members."""
    members, count = lists["members"], lists["count"]
    room = members.shape[-1]
    if position >= room and room < most:
        wider = members.new_zeros(*members.shape[:-1], min(2 * room, most))
        wider[..., :room] = members
        members = wider
    place = count.take_along_dim(group.unsqueeze(-1), 3) % members.shape[-1]
    index = group.unsqueeze(-1) * members.shape[-1] + place
    members.view(*count.shape[:-1], -1).scatter_(3, index, position)
    count.scatter_add_(3, group.unsqueeze(-1), torch.ones_like(index))
    return {"members": members, "count": count}


def enlisted(lists: State, group: Tensor) -> tuple[Tensor, Tensor]:
    """The latest members of each group (B, N, H) and their ranks in it, both (B, N, H, places); rank < 0: no member."""
    members = lists["members"].take_along_dim(group[..., None, None], 3).squeeze(3)
    last = lists["count"].take_along_dim(group.unsqueeze(-1), 3) - 1
    place = torch.arange(members.shape[-1], device=members.device)
    return members, last - (last - place) % members.shape[-1]
