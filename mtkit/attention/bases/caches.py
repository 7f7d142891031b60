"""Preallocated caches for decoding, written in place and grown by half, so that few steps copy the cache; and sums.

The growth is small because beam search copies whole caches when it moves hypotheses, unused capacity included. Tensors
are (B, N, heads, capacity, width); `count` tokens of them have been written. Mechanisms that need only sums over the
tokens so far have these instead of a cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from mtkit.attention.kernels.dot_product import position_of, upcast
from mtkit.attention.states import State, counted

FIRST_CAPACITY = 8

_exact: ContextVar[bool] = ContextVar("exact", default=False)


@contextmanager
def exact_capacity() -> Iterator[None]:
    """Context in which caches grow by one token at a time, so that they have no more bytes than the tokens written."""
    token = _exact.set(True)
    try:
        yield
    finally:
        _exact.reset(token)


def capacity_for(needed: int, usual: int) -> int:
    """The capacity of a cache that must hold `needed` tokens: `usual`, or `needed` inside `exact_capacity`."""
    return needed if _exact.get() else usual


def start_cache(batch_size: int, hypotheses: int, like: Tensor, **shapes: tuple[int, int]) -> State:
    """An empty cache: a tensor of (heads, width) per name, with the type and device of `like`."""
    capacity = capacity_for(0, FIRST_CAPACITY)
    tensors = {
        name: like.new_zeros(batch_size, hypotheses, heads, capacity, width) for name, (heads, width) in shapes.items()
    }
    return {**tensors, "count": 0}


def append(state: State, *, window: int | None = None, first: int = 0, **rows: Tensor) -> State:
    """The cache with one more token: rows (B, N, heads, width) by name; the first rows may start it.

    With `window`, the cache keeps the `first` tokens, and the rest as a ring: each later token overwrites the one
    `window` positions before it, so that the capacity stays at first + window.
    """
    count = state["count"]
    if isinstance(count, Tensor):
        for name, row in rows.items():
            state[name].index_copy_(3, count[0, :1], row.unsqueeze(3))
        return {**state, "count": count + 1}
    place = ring_place(count, window, first)
    grown = dict(state)
    for name, row in rows.items():
        cache = (
            state[name]
            if name in state
            else row.new_zeros(*row.shape[:3], capacity_for(0, FIRST_CAPACITY), row.shape[3])
        )
        capacity = cache.shape[3]
        if place >= capacity:
            room = capacity_for(place + 1, capacity + max(capacity // 2, FIRST_CAPACITY))
            room = room if window is None else min(room, first + window)
            wider = row.new_empty(*cache.shape[:3], room, cache.shape[4])
            wider[:, :, :, :capacity], wider[:, :, :, capacity:] = cache, 0
            cache = wider
        elif cache.dtype != row.dtype:
            cache = cache.to(row.dtype)  # the first step under autocast shows the actual type of the keys
        cache[:, :, :, place] = row
        grown[name] = cache
    grown["count"] = count + 1
    return grown


def ring_place(position: int, window: int | None, first: int = 0) -> int:
    """The place at which the token of that position is written."""
    return position if window is None or position < first else first + (position - first) % window


def written(state: State, name: str, *, window: int | None = None, first: int = 0) -> Tensor:
    """The rows written under `name`, (B, N, heads, length, width); a ring's rows in the order of its places."""
    cache: Tensor = state[name]
    if isinstance(state["count"], Tensor):
        return cache
    length = state["count"] if window is None else min(state["count"], first + window)
    return cache[:, :, :, :length]


def with_room(state: State, steps: int, *names: str) -> State:
    """The state with room for `steps` more tokens in the caches of these names, and "count" as a tensor (B, N).

    `append` then writes to these caches without changing their shapes, and `written` gives them whole: what is not yet
    written is zero.
    """
    count = int(position_of(state["count"], state[names[0]].device))
    after = counted(state, state[names[0]].shape[1])
    for name in names:
        cache = state[name]
        after[name] = cache.new_zeros(*cache.shape[:3], count + steps, cache.shape[4])
        after[name][:, :, :, :count] = cache[:, :, :, :count]
    return after


def picked(cache: Tensor, place: Tensor) -> Tensor:
    """Rows of a cache (B, N, G, capacity, K) at places (L,), the same for all heads: (B, N, G, L, K).

    If heads differ, places are (B or 1, h, L) or (B, N, h, L) for h heads in G groups of neighbours, and rows
    are (B, N, h, L, K).
    """
    if place.dim() == 1:
        return cache.index_select(3, place)
    place = place if place.dim() == 4 else place.unsqueeze(1)
    heads = place.shape[2]
    segment, hypothesis, head = (torch.arange(n, device=place.device) for n in (*cache.shape[:2], heads))
    group = head * cache.shape[2] // heads
    return cache[segment[:, None, None, None], hypothesis[:, None, None], group[:, None], place]


def places_in_blocks(blocks: Tensor, size: int, length: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The places (B, ..., n * size) of the tokens in blocks (B, ..., n), and which exist: below `length`, and `valid`.

    valid (B, length). Places beyond the end are replaced by the last one.
    """
    place = (blocks.unsqueeze(-1) * size + torch.arange(size, device=blocks.device)).flatten(-2)
    exists, place = place < length, place.clamp(max=length - 1)
    if valid is not None:
        exists &= valid.gather(1, place.flatten(1)).view_as(place)
    return place, exists


def prefix_means(x: Tensor) -> Tensor:
    """Means (..., T, X) of x over each prefix, in float32 at least; padding on the right reaches no real position."""
    count = torch.arange(1, x.shape[-2] + 1, device=x.device).unsqueeze(-1)  # (T, 1)
    return upcast(x).cumsum(-2) / count


def start_sums(*names: str) -> State:
    """Sums over no tokens, by name, and their "count"; the given rows state shapes and type."""
    return {**dict.fromkeys(names, 0.0), "count": 0}


def add_rows(state: State, **rows: Tensor | tuple[Tensor, Tensor]) -> State:
    """The sums with the rows (B, N, ...) of one more token added, by name, in place and in float32 at least.

    A row may be a product of two factors, which broadcast. The state keeps sums, not means, because a mean updated in
    place drifts.
    """
    after = {**state, "count": state["count"] + 1}
    begun = isinstance(state["count"], Tensor) or state["count"]
    for name, row in rows.items():
        if isinstance(row, tuple):
            after[name] = state[name].addcmul_(*row) if begun else upcast(row[0] * row[1])
        else:
            after[name] = state[name].add_(row) if begun else upcast(row).clone()
    return after
