"""Sums of the values near a position, under weights that are given and not learned.

Either all queries have the same weights by distance, and blocks of queries share one small matrix (`slide`), or each
query names its window and the weights in it (`sum_windows`). Sums are in float32 at least, also under autocast. The
weights get no gradient, so that nothing is kept for the backward pass but the weights themselves.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.engines.softmax.dot_product import widened

BLOCK = 32
"""Queries that share a matrix, at least: a matrix much narrower than its window would read values over and over."""


def slide(v: Tensor, weights: Tensor, first: int, dropout: float = 0.0) -> Tensor:
    """Sums (B, H, T, V): of v at t + first, t + first + 1, ... under weights (H, n), in O(T n) time and memory.

    v (B, G, T, V), zero beyond its ends, where G divides H; the window holds the query's own position.
    """
    (heads, width), (groups, length) = weights.shape, v.shape[1:3]
    size = max(BLOCK, width)
    blocks = max(-(-length // size), 1)
    with torch.autocast(v.device.type, enabled=False):
        padded = F.pad(widened(v), (0, 0, -first, blocks * size - length + first + width - 1))
        windows = padded.unfold(2, size + width - 1, size)  # (B, G, blocks, V, window)
        matrix = _banded(weights.type_as(padded), size).unflatten(0, (groups, heads // groups))  # (G, R, size, window)
        if dropout:
            every = matrix[:, :, None].expand(len(v), -1, -1, blocks, -1, -1)
            sums = torch.einsum("bgrkim,bgkvm->bgrkiv", F.dropout(every, dropout), windows)
        else:
            sums = torch.einsum("grim,bgkvm->bgrkiv", matrix, windows)
        return sums.flatten(3, 4).flatten(1, 2)[:, :, :length]


def sum_windows(v: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Sums (B, H, T, V) of v (B, G, S, V) at key (B, H, T, n), places in S, under weights (B, H, T, n).

    What lies as (B, S, G, V) in memory, as values do that a projection has just made, is not copied.
    """
    batch, groups, length, width = v.shape
    heads = key.shape[1]
    if not key.shape[3]:
        return widened(v).new_zeros(*key.shape[:3], width)
    segment = torch.arange(batch, device=v.device)[:, None, None, None] * length
    group = torch.arange(heads, device=v.device)[:, None, None] * groups // heads
    place = (segment + key) * groups + group
    with torch.autocast(v.device.type, enabled=False):
        rows = widened(v).transpose(1, 2).reshape(-1, width)
        weights = weights.type_as(rows).flatten(0, 2)
        sums = F.embedding_bag(place.flatten(0, 2), rows, mode="sum", per_sample_weights=weights)
    return sums.view(*key.shape[:3], width)


def _banded(weights: Tensor, size: int) -> Tensor:
    """(H, size, size + n - 1) of weights (H, n): each row holds them one place further than the row before."""
    heads, width = weights.shape
    window = size + width - 1
    rows = F.pad(weights, (0, size)).repeat(1, size)  # rows one longer than the window, which shifts what is cut
    return rows[:, : size * window].view(heads, size, window)
