"""Sinkhorn attention as loops over the blocks and slots of one segment, for the tests of both mechanisms."""

from typing import Any

import torch
from torch import Tensor

LEAST = 1e-6


def order(scores: Tensor, temperature: float, iterations: int, *, causal: bool) -> Tensor:
    """S (N, N): exponentials divided by row sums, then by column sums; row n sees blocks before n alone if causal."""
    count = len(scores)
    rows = [
        [torch.exp(scores[n, m] / temperature) if m < n or not causal else scores.new_zeros(()) for m in range(count)]
        for n in range(count)
    ]
    for _ in range(iterations):
        rows = [[each / sum(row) if not causal or n else each for each in row] for n, row in enumerate(rows)]
        columns = [[rows[n][m] for n in range(count)] for m in range(count)]
        rows = [
            [
                each / sum(columns[m][: n + 1] if causal else columns[m]) if m < n or not causal else each
                for m, each in enumerate(row)
            ]
            for n, row in enumerate(rows)
        ]
    return torch.stack([torch.stack(row) for row in rows])


def scores_of(attention: Any, x: Tensor, q: Tensor, k: Tensor, head: int, size: int, *, causal: bool) -> Tensor:
    """R (N, N) of one head, from the tokens (T, D), its queries and keys (T, K)."""
    starts = range(0, len(x), size)
    spans = [slice(0, start + 1) if causal else slice(start, start + size) for start in starts]
    if hasattr(attention, "place_proj"):
        summed = torch.stack([x[span].sum(0) for span in spans])
        every = torch.relu(attention.place_proj(torch.relu(attention.block_proj(summed))))
        places = every.shape[-1] // attention.site.heads
        return every[:, head * places : head * places + len(starts)]
    asking = torch.stack([q[span].mean(0) for span in spans])
    asked = torch.stack([k[start : start + size].mean(0) for start in starts])
    return asking @ asked.T / k.shape[-1] ** 0.5


def sorted_block(weights: Tensor, x: Tensor, size: int) -> dict[int, Tensor]:
    """The slots of one sorted block of x (T, K), {slot: row}, from its row of S (N,)."""
    slots = {}
    for slot in range(size):
        has = [(weight, x[m * size + slot]) for m, weight in enumerate(weights) if m * size + slot < len(x)]
        share = sum(weight for weight, _ in has)
        if has and share >= LEAST:
            slots[slot] = sum(weight * row for weight, row in has) / share
    return slots


def softmax_over(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One query (K,) over a list of keys; zero without any."""
    if not keys:
        return torch.zeros_like(query)
    exponentials = [torch.exp(query @ key / len(query) ** 0.5) for key in keys]
    return sum(e * value for e, value in zip(exponentials, values, strict=True)) / sum(exponentials)
