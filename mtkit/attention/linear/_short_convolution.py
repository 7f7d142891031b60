"""Short depthwise convolution along a sequence, before queries, keys and values."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import upcast

NUMBERS_AT_ONCE = {"cpu": 1 << 19}
"""Numbers worked on at a time, so that they stay in the processor's cache, by kind of device; all on others."""


class ShortConvolution(nn.Module):
    """SiLU of y_t = sum of w_i x_{t - i}, i from 0 to taps - 1, with weights of its own for each channel."""

    def __init__(self, channels: int, taps: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(taps, channels).uniform_(-(taps**-0.5), taps**-0.5))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-(taps**-0.5), taps**-0.5)) if bias else None

    def forward(self, x: Tensor, before: Tensor | None = None, *, reverse: bool = False) -> Tensor:
        """Map x (B, T, C) to (B, T, C), in float32 at least. Differentiable once.

        before: the taps - 1 inputs before x, zeros if None. reverse: convolve from the end, with the inputs after t.
        """
        x, weight = upcast(x), upcast(self.weight)
        bias = x.new_zeros(x.shape[2]) if self.bias is None else self.bias.type_as(x)
        if before is not None:
            x = torch.cat([before, x], dim=1)
        y: Tensor = _Convolution.apply(x, weight.type_as(x), bias, reverse)  # type: ignore[no-untyped-call]
        return y if before is None else y[:, before.shape[1] :]


class _Convolution(torch.autograd.Function):
    """SiLU of the convolution of x (B, T, C) with zeros around it; the backward pass convolves again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, reverse: bool) -> Tensor:
        ctx.reverse = reverse
        ctx.save_for_backward(x, weight, bias)
        y = torch.empty_like(x)
        for first, last in _parts(x):
            y[:, first:last] = F.silu(_convolved(x, weight, bias, first, last, reverse), inplace=True)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        d_x, d_weight, d_bias = torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
        for first, last in _parts(x):
            d_sums = torch.ops.aten.silu_backward(
                d_y[:, first:last], _convolved(x, weight, bias, first, last, ctx.reverse)
            )
            d_bias += d_sums.sum((0, 1))
            for tap, (here, there) in enumerate(_shifted(first, last, x.shape[1], len(weight), ctx.reverse)):
                d_x[:, there].addcmul_(d_sums[:, here], weight[tap])
                d_weight[tap] += (d_sums[:, here] * x[:, there]).sum((0, 1))
        return d_x, d_weight, d_bias, None


def _convolved(x: Tensor, weight: Tensor, bias: Tensor, first: int, last: int, reverse: bool) -> Tensor:
    """Return the sums at positions first to last - 1."""
    sums = bias.expand(len(x), last - first, -1).clone(memory_format=torch.contiguous_format)
    for tap, (here, there) in zip(weight, _shifted(first, last, x.shape[1], len(weight), reverse), strict=True):
        sums[:, here].addcmul_(x[:, there], tap)
    return sums


def _shifted(first: int, last: int, length: int, taps: int, reverse: bool) -> Iterator[tuple[slice, slice]]:
    """Yield for each tap the rows of a part that read an input, counted from `first`, and the inputs' positions."""
    for tap in range(taps):
        begin, end = (first, max(first, min(last, length - tap))) if reverse else (min(last, max(first, tap)), last)
        shift = tap if reverse else -tap
        yield slice(begin - first, end - first), slice(begin + shift, end + shift)


def _parts(x: Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of positions of x (B, T, C)."""
    length = x.shape[1]
    several = max(NUMBERS_AT_ONCE.get(x.device.type, x.numel()) // (x.shape[0] * x.shape[2]), 1)
    for first in range(0, length, several):
        yield first, min(first + several, length)
