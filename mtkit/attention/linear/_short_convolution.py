"""Short depthwise convolution along a sequence, before queries, keys and values."""

import torch
from torch import Tensor, nn

from mtkit.attention.kernels.dot_product import upcast


class ShortConvolution(nn.Module):
    """y_t = sum of w_i x_{t - i}, i from 0 to taps - 1, with weights of its own for each channel."""

    def __init__(self, channels: int, taps: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(taps, channels).uniform_(-(taps**-0.5), taps**-0.5))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-(taps**-0.5), taps**-0.5)) if bias else None

    def forward(self, x: Tensor, before: Tensor | None = None, *, reverse: bool = False) -> Tensor:
        """Map x (B, T, C) to (B, T, C), in float32 at least.

        before: the taps - 1 inputs before x, zeros if None. reverse: convolve from the end, with the inputs after t.
        """
        x, weight = upcast(x), upcast(self.weight)
        if before is None:
            before = x.new_zeros(len(x), len(weight) - 1, x.shape[2])
        padded = torch.cat([x, before] if reverse else [before, x], dim=1)
        length = x.shape[1]
        y = torch.zeros_like(x) if self.bias is None else self.bias.type_as(x)
        for place, tap in enumerate(weight if reverse else weight.flip(0)):
            y = torch.addcmul(y, padded[:, place : place + length], tap)
        return y
