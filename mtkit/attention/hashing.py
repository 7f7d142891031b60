"""The seeded hash: pseudo-random numbers as pure functions of their inputs."""

from functools import reduce

import torch
from torch import Tensor


def random_key(*parts: int) -> int:
    """One 32-bit number from several: seed, role, layer."""
    return reduce(lambda key, part: int(hashed(torch.tensor(key + part))), parts, 0)


def hashed(x: Tensor) -> Tensor:
    """The finaliser of MurmurHash3: 32 well-mixed bits of integers, the same on every device."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
