"""Random numbers as functions of their purpose, independent of the time and the order of the draws."""

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the constants as signed 64-bit integers, whose products wrap around
GAMMA = 0x9E3779B97F4A7C15 - 2**64
FIRST = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64


def uniform(seed: int, keys: Tensor, hypotheses: int, step: int) -> Tensor:
    """Uniform numbers in [0, 1), (B, N) float64: functions of the seed, the segment's key, the hypothesis and the step.

    keys (B,) int64, one per segment.
    """
    hypothesis = torch.arange(hypotheses, device=keys.device)
    mixed = _mix(keys[:, None] ^ _mix(torch.full_like(keys, _signed(seed)))[:, None])
    mixed = _mix(_mix(mixed ^ hypothesis) ^ step)  # (B, N)
    return _shift(mixed, 11).double() * 2.0**-53


def _mix(number: Tensor) -> Tensor:
    number = number + GAMMA
    number = (number ^ _shift(number, 30)) * FIRST
    number = (number ^ _shift(number, 27)) * SECOND
    return number ^ _shift(number, 31)


def _shift(number: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros."""
    return (number >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The 64-bit integer with the same last 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
