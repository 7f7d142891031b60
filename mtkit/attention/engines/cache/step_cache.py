"""Preallocated caches for decoding: written in place, grown by half, so that a step seldom copies what it has seen.

Beam search copies whole caches when it moves hypotheses, so room that is not used yet costs time as well.

Tensors are (B, N, heads, capacity, width); `count` tokens have been written.
"""

import torch
from torch import Tensor

from mtkit.attention.contract import State

FIRST_CAPACITY = 8


def start_cache(batch_size: int, hypotheses: int, like: Tensor, **shapes: tuple[int, int]) -> State:
    """An empty cache: a tensor for each name, of (heads, width), in the type and place of `like`."""
    tensors = {
        name: like.new_zeros(batch_size, hypotheses, heads, FIRST_CAPACITY, width)
        for name, (heads, width) in shapes.items()
    }
    return {**tensors, "count": 0}


def append(state: State, *, window: int | None = None, first: int = 0, **rows: Tensor) -> State:
    """The cache with one more token: rows (B, N, heads, width) by name; the first ones may begin it.

    With `window`, a ring behind the `first` tokens, which stay: each later one takes the place of the one `window`
    before it, so that capacity stays at both together.
    """
    count = state["count"]
    place = ring_place(count, window, first)
    grown = dict(state)
    for name, row in rows.items():
        cache = state[name] if name in state else row.new_zeros(*row.shape[:3], FIRST_CAPACITY, row.shape[3])
        capacity = cache.shape[3]
        if place >= capacity:
            room = capacity + max(capacity // 2, FIRST_CAPACITY)
            room = room if window is None else min(room, first + window)
            wider = row.new_zeros(*cache.shape[:3], room, cache.shape[4])
            wider[:, :, :, :capacity] = cache
            cache = wider
        elif cache.dtype != row.dtype:
            cache = cache.to(row.dtype)  # the first step under autocast shows which type the keys really have
        cache[:, :, :, place] = row
        grown[name] = cache
    grown["count"] = count + 1
    return grown


def ring_place(position: int, window: int | None, first: int = 0) -> int:
    """Where the token of that position is written."""
    return position if window is None or position < first else first + (position - first) % window


def written(state: State, name: str, *, window: int | None = None, first: int = 0) -> Tensor:
    """What has been written under `name`, (B, N, heads, length, width); a ring's in the order of its places."""
    length = state["count"] if window is None else min(state["count"], first + window)
    cache: Tensor = state[name]
    return cache[:, :, :, :length]


def picked(cache: Tensor, place: Tensor) -> Tensor:
    """Rows of a cache (B, N, G, capacity, K): (B, N, G, L, K) at places (L,), the same for all heads.

    Where heads differ, at places (B or 1, h, L) or (B, N, h, L), those of h heads, in G groups of neighbours:
    (B, N, h, L, K).
    """
    if place.dim() == 1:
        return cache.index_select(3, place)
    place = place if place.dim() == 4 else place.unsqueeze(1)
    heads = place.shape[2]
    segment, hypothesis, head = (torch.arange(n, device=place.device) for n in (*cache.shape[:2], heads))
    group = head * cache.shape[2] // heads
    return cache[segment[:, None, None, None], hypothesis[:, None, None], group[:, None], place]
