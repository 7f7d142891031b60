"""Short depthwise convolution along a sequence, before queries, keys and values."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtkit.attention.kernels.cpu.threads import array_of_parameter, in_ranges, loops_take
from mtkit.attention.kernels.dot_product import upcast

NUMBERS_AT_ONCE = {"cpu": 1 << 17}
"""Numbers worked on at a time, so that they stay in the processor's cache, by kind of device; all on others."""
CHANNELS = 64
"""Fewest channels whose gradients a thread computes."""


class ShortConvolution(nn.Module):
    """SiLU of y_t = sum of w_i x_{t - i}, i from 0 to taps - 1, with weights of its own for each channel."""

    def __init__(self, channels: int, taps: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(taps, channels).uniform_(-(taps**-0.5), taps**-0.5))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-(taps**-0.5), taps**-0.5)) if bias else None

    def forward(self, x: Tensor, *, first: int = 0, reverse: bool = False) -> Tensor:
        """Map the channels x (B, T, C) from `first` on to (B, T, C), in float32 at least. Differentiable once.

        reverse: convolve from the end, with the inputs after t.
        """
        x, channels = upcast(x), slice(first, first + x.shape[2])
        weight = self.weight[:, channels].type_as(x)
        bias = x.new_zeros(x.shape[2]) if self.bias is None else self.bias[channels].type_as(x)
        y: Tensor = _Convolution.apply(x, weight, bias, reverse)  # type: ignore[no-untyped-call]
        return y

    def newest(self, earlier: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map one more input x (B, 1, C) to its output (B, 1, C); return also the inputs before the next one.

        earlier (B, taps - 1, C) are the inputs before x; the tensor may be written in place.
        """
        parameters = (self.weight,) if self.bias is None else (self.weight, self.bias)
        if torch.is_inference_mode_enabled() and loops_take(earlier, x, *parameters) and earlier.is_contiguous():
            from mtkit.attention.kernels.cpu.convolution_loops import write_newest

            y = torch.empty(x.shape)
            bias = x.new_zeros(x.shape[2]) if self.bias is None else self.bias
            rows, outputs = (tensor.squeeze(1).numpy() for tensor in (x.contiguous(), y))
            write_newest(earlier.numpy(), rows, array_of_parameter(self.weight), array_of_parameter(bias), outputs)
            return y, earlier
        window = torch.cat([earlier, x], dim=1)
        sums = (window * self.weight.type_as(window).flip(0)).sum(1, keepdim=True)
        return F.silu(sums if self.bias is None else sums + self.bias.type_as(window)), window[:, 1:]


class _Convolution(torch.autograd.Function):
    """SiLU of the convolution of x (B, T, C) with zeros around it; the backward pass convolves again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, reverse: bool) -> Tensor:
        ctx.reverse = reverse
        ctx.save_for_backward(x, weight, bias)
        return F.silu(_convolved(x, weight, bias, reverse))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        if loops_take(x, weight, bias, d_y):
            return *_gradients(x, weight, bias, ctx.reverse, d_y), None
        d_sums = torch.ops.aten.silu_backward(d_y, _convolved(x, weight, bias, ctx.reverse))
        d_weight, d_bias = torch.zeros_like(weight), torch.zeros_like(bias)
        for first, last in _parts(x):
            d_bias += d_sums[:, first:last].sum((0, 1))
            for tap, (here, there) in enumerate(_shifted(first, last, x.shape[1], len(weight), ctx.reverse)):
                d_weight[tap] += (d_sums[:, here] * x[:, there]).sum((0, 1))
        return _convolved(d_sums, weight, None, not ctx.reverse), d_weight, d_bias, None


def _gradients(x: Tensor, weight: Tensor, bias: Tensor, reverse: bool, d_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias by a compiled loop, in one pass over memory."""
    from mtkit.attention.kernels.cpu.convolution_loops import write_gradients

    d_x, d_weight, d_bias = (torch.zeros(y.shape, device=y.device) for y in (x, weight, bias))
    parameters = (array_of_parameter(y) for y in (weight, bias))
    inputs, *gradients = (y.detach().contiguous().numpy() for y in (x, d_y, d_x, d_weight, d_bias))
    terms = (inputs, *parameters, *gradients)
    loop: Callable[..., None] = write_gradients
    in_ranges(partial(loop, reverse, *terms), len(bias), CHANNELS)
    return d_x, d_weight, d_bias


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool) -> Tensor:
    """Return the sums (B, T, C), by a convolution of images of height 1 with channels last in memory."""
    taps, image = len(weight), x.contiguous().transpose(1, 2).unsqueeze(2)
    kernel = (weight if reverse else weight.flip(0)).t()[:, None, None]
    with torch.autocast(x.device.type, enabled=False):
        sums = F.conv2d(image, kernel, bias, padding=(0, taps - 1), groups=x.shape[2]).squeeze(2).transpose(1, 2)
    return sums[:, taps - 1 :] if reverse else sums[:, : x.shape[1]]


def _shifted(first: int, last: int, length: int, taps: int, reverse: bool) -> Iterator[tuple[slice, slice]]:
    """Yield for each tap the positions from `first` to `last` that read an input, and the inputs' positions."""
    for tap in range(taps):
        begin, end = (first, max(first, min(last, length - tap))) if reverse else (min(last, max(first, tap)), last)
        shift = tap if reverse else -tap
        yield slice(begin, end), slice(begin + shift, end + shift)


def _parts(x: Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of positions in x (B, T, C)."""
    length = x.shape[1]
    several = max(NUMBERS_AT_ONCE.get(x.device.type, x.numel()) // (x.shape[0] * x.shape[2]), 1)
    for first in range(0, length, several):
        yield first, min(first + several, length)
