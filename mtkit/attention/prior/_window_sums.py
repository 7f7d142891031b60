"""Sums of values in a window around each position, under fixed weights."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import upcast

BLOCK = 32
"""Minimum number of queries that share a matrix; a matrix much narrower than its window would read values repeatedly.
"""


def slide(v: Tensor, weights: Tensor, first: int, dropout: float = 0.0) -> Tensor:
    """Return the sums (B, H, T, V) of v at t + first, t + first + 1, ... under fixed weights (H, n); O(T n) time and
    memory.

    v (B, G, T, V), zero beyond its ends, and G divides H; the window includes the query's own position. Sums here and
    in `sum_windows` are in at least float32, and the weights get no gradient.
    """
    (heads, width), (groups, length) = weights.shape, v.shape[1:3]
    size = max(BLOCK, width)
    blocks = max(-(-length // size), 1)
    with torch.autocast(v.device.type, enabled=False):
        padded = F.pad(upcast(v), (0, 0, -first, blocks * size - length + first + width - 1))
        windows = padded.unfold(2, size + width - 1, size)  # (B, G, blocks, V, window)
        matrix = _banded(weights.type_as(padded), size).unflatten(0, (groups, heads // groups))  # (G, R, size, window)
        if dropout:
            per_segment = matrix[:, :, None].expand(len(v), -1, -1, blocks, -1, -1)
            sums = torch.einsum("bgrkim,bgkvm->bgrkiv", F.dropout(per_segment, dropout), windows)
        else:
            sums = torch.einsum("grim,bgkvm->bgrkiv", matrix, windows)
        return sums.flatten(3, 4).flatten(1, 2)[:, :, :length]


def sum_windows(v: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Return the sums (B, H, T, V) of v (B, G, S, V) at key (B, H, T, n), places in S, under weights (B, H, T, n).

    Values that a projection has just made, (B, S, G, V) in memory, are not copied.
    """
    batch, groups, length, width = v.shape
    heads = key.shape[1]
    if not key.shape[3]:
        return upcast(v).new_zeros(*key.shape[:3], width)
    segment = torch.arange(batch, device=v.device)[:, None, None, None] * length
    group = torch.arange(heads, device=v.device)[:, None, None] * groups // heads
    place = (segment + key) * groups + group
    with torch.autocast(v.device.type, enabled=False):
        rows = upcast(v).transpose(1, 2).reshape(-1, width)
        weights = weights.type_as(rows).flatten(0, 2)
        sums = F.embedding_bag(place.flatten(0, 2), rows, mode="sum", per_sample_weights=weights)
    return sums.view(*key.shape[:3], width)


def _banded(weights: Tensor, size: int) -> Tensor:
    """Return (H, size, size + n - 1): each row holds weights (H, n), one place further right than the row before."""
    heads, width = weights.shape
    window = size + width - 1
    rows = F.pad(weights, (0, size)).repeat(1, size)  # one longer than the window, so that each cut is shifted by one
    return rows[:, : size * window].view(heads, size, window)
