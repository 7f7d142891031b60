"""Layers inside attentions: linear maps with Xavier's weights, and a norm over the channels of one vector."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import upcast

EPS = 1e-5


def xavier_linear(inputs: int, outputs: int, bias: float | None = 0.0) -> nn.Linear:
    """Return a linear map whose biases all begin at `bias`; None: without a bias."""
    linear = nn.Linear(inputs, outputs, bias=bias is not None)
    nn.init.xavier_uniform_(linear.weight)
    if bias is not None:
        nn.init.constant_(linear.bias, bias)
    return linear


class ChannelNorm(nn.Module):
    """RMS or layer norm over the last axis with a weight and no bias, so that a zero vector stays zero.

    rms: x / sqrt(mean(x²) + 1e-5) * weight (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv
    1910.07467). layer: the same of x minus its mean. Computed in float32 at least.
    """

    def __init__(self, width: int, kind: str = "rms") -> None:
        super().__init__()
        self.norm = F.rms_norm if kind == "rms" else F.layer_norm
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., width)."""
        normed = self.norm(upcast(x), self.weight.shape, upcast(self.weight), eps=EPS)
        return normed.type_as(x)
