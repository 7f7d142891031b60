"""Dropout for engines whose backward pass computes the weights again."""

from collections.abc import Callable

import torch
from torch import Tensor


def seeded_dropout(dropout: float, seed: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Dropout that the same seed and sequence of calls repeat exactly."""
    if not dropout:
        return lambda x: x
    generator = torch.Generator(device).manual_seed(seed)
    return lambda x: x * torch.empty_like(x).bernoulli_(1 - dropout, generator=generator).div_(1 - dropout)
