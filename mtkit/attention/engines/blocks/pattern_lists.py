"""A position pattern as lists of keys beside blocks of queries, for the listed engine (`attend_listed`)."""

from functools import lru_cache

import torch

from mtkit.attention.engines.blocks.listed import Lists
from mtkit.attention.engines.blocks.pattern import Pattern, Rows
from mtkit.device import to_device

BLOCK = 32
"""Queries that share a list."""
SEEN, HIDDEN = 0, 1
"""The labels: the table of `attend_listed` has one column, (B, H, T, 1)."""


@lru_cache(maxsize=4)  # takes one byte per listed pair
@torch.inference_mode(False)  # what is kept here serves training too
def pattern_lists(pattern: Pattern, length: int, causal: bool, device: torch.device) -> Lists:
    """The keys beside each block of `length` queries, in ascending order; label 0 if the pattern shows one, else 1.

    The result is a function of the arguments alone, so that all layers share one.

    Raises: ValueError for `Rows`, which would make the list of each block as long as the sequence, and for a pattern
    that differs from head to head.
    """
    if any(isinstance(member, Rows) for member in pattern.members):
        raise ValueError("rows see all keys: leave them out of the lists, and attend with these queries by themselves")
    blocks = [range(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]
    beside = [pattern.keys(block, block.stop if causal else length) for block in blocks]
    if any(len(heads) > 1 for heads in beside):
        raise ValueError("lists are the same for all heads, and this pattern is not")
    width = max(1, *(len(keys) for [keys] in beside))
    rows = [[*sorted(keys), *[-1] * (width - len(keys))] for [keys] in beside]
    j = to_device(torch.tensor(rows), device).unsqueeze(1)  # (blocks, 1, L)
    i = torch.arange(len(rows) * BLOCK, device=device).view(-1, BLOCK, 1)
    seen = pattern.sees(i, j)
    seen = seen.view(*seen.shape[-3:]) & (j >= 0)  # one that is drawn for a single head has axes for segments and heads
    if causal:
        seen = seen & (j <= i)
    return Lists(j.squeeze(1).clamp(min=0), torch.where(seen, SEEN, HIDDEN).to(torch.uint8))
