"""How far the attention of a query is from uniform, measured on a sample of its keys, and what such a measure decides.

A query with n keys samples U(n) = min(c ceil(ln n), n) of them, and one at least. The keys are cut into U stretches of
equal length, and one key is drawn from each, so that none is drawn twice. The draw is a hash of head, query and slot:
the same in training, evaluation and decoding, and in any batch.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.hashing import hashed
from mtkit.attention.kernels.chunks import rows_at
from mtkit.attention.kernels.dot_product import scores_of, spread

CHUNK = 64
"""Queries whose samples are held at a time."""
MOST_KEYS = 128
"""Keys up to which the sample is taken from all scores, where copies of keys for each query would take longer."""


class Samples:
    """The keys that each query of each head samples; c is `factor`."""

    def __init__(self, heads: int, factor: int, key: int) -> None:
        """`key`: a number for seed, role and layer, from `random_key`."""
        self.heads, self.factor, self.key = heads, factor, key

    def most(self, keys: int) -> int:
        """U(n) of a number."""
        return max(min(self.factor * math.ceil(math.log(keys)), keys), 1)

    def size(self, keys: Tensor) -> Tensor:
        """U(n) of each of several numbers n; 1 of zero."""
        return (self.factor * keys.clamp(min=1).double().log().ceil().long()).minimum(keys).clamp(min=1)

    def picks(self, i: Tensor, keys: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """The keys sampled, (B or 1, H, c, slots), for queries at i (c,), and which of the slots there are.

        keys (B or 1, 1, c or 1): how many keys each query has, from the first on.
        """
        head, slot = (torch.arange(count, device=i.device) for count in (self.heads, slots))
        draw = hashed(hashed(hashed(head + self.key).unsqueeze(-1) + i).unsqueeze(-1) + slot)  # (H, c, slots)
        keys = keys.unsqueeze(-1)
        size = self.size(keys)
        first = slot * keys // size
        width = (slot + 1) * keys // size - first
        there = (slot < size).expand(-1, *draw.shape)
        return (first + (draw * width >> 32)).masked_fill(~there, 0), there

    @torch.no_grad()
    def measures(self, q: Tensor, k: Tensor, keys: Tensor) -> Tensor:
        """`spikiness` (B, H, T) of queries (B, H, T, K) at positions from 0, on their samples of k (B, G, S, K).

        keys (B or 1, 1, T or 1), as in `picks`.
        """
        parts = []
        k = k if k.shape[2] <= MOST_KEYS else spread(k, self.heads).contiguous()  # once, not for each part
        every = torch.arange(q.shape[2], device=q.device)
        for i, rows in zip(every.split(CHUNK), q.split(CHUNK, dim=2), strict=True):
            own = keys if keys.shape[2] == 1 else keys[:, :, i]
            picks, there = self.picks(i, own, self.most(k.shape[2]))
            if k.shape[2] <= MOST_KEYS:
                scores = scores_of(rows, k, 1.0).gather(-1, picks.expand(len(q), -1, -1, -1))
            else:
                scores = (rows_at(k, picks) @ rows.unsqueeze(-1)).squeeze(-1)
            parts.append(spikiness(scores, there))
        return torch.cat(parts, dim=-1)


def spikiness(scores: Tensor, there: Tensor) -> Tensor:
    """max - mean over the last axis, of the scores that are there."""
    largest = scores.masked_fill(~there, -torch.inf).amax(-1)
    return largest - scores.masked_fill(~there, 0.0).sum(-1) / there.sum(-1)


def earlier_larger(x: Tensor) -> Tensor:
    """How many earlier numbers are larger than each, (..., T) of x (..., T), in O(T log² T).

    Blocks of 1, 2, 4, ... are paired: each number is looked up among the sorted numbers of the block to its left.
    """
    length, size = x.shape[-1], 1
    whole = 1 << (length - 1).bit_length()
    x = F.pad(x, (0, whole - length), value=-torch.inf)
    counts = torch.zeros_like(x, dtype=torch.long)
    while size < whole:
        left, right = x.unflatten(-1, (-1, 2, size)).unbind(-2)
        not_larger = torch.searchsorted(left.sort(dim=-1).values, right.contiguous(), right=True)
        counts.unflatten(-1, (-1, 2, size))[..., 1, :] += size - not_larger
        size *= 2
    return counts[..., :length]
