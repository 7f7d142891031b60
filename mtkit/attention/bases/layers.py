"""Layers inside attentions: linear maps with Xavier's weights, and a norm over the channels of one vector."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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
        self.kind = kind
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., width). The RMS norm is differentiable once."""
        rows = upcast(x)
        weight = self.weight.type_as(rows)
        if self.kind == "layer":
            return F.layer_norm(rows, weight.shape, weight, eps=EPS).type_as(x)
        width = len(weight)
        return (unit(rows, EPS * width) * (weight * width**0.5)).type_as(x)


def unit(x: Tensor, eps: float) -> Tensor:
    """Return vectors x (..., K) divided by the root of their squared length plus `eps`. Differentiable once."""
    if not torch.is_grad_enabled():
        return x * _inverse_length(x, eps)
    y: Tensor = _Unit.apply(x, eps)  # type: ignore[no-untyped-call]
    return y


def _inverse_length(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(|x|² + eps) of vectors x (..., K), (..., 1)."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_().add_(eps).rsqrt_()


class _Unit(torch.autograd.Function):
    """The backward pass takes three operations; PyTorch's own norm takes eight on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        inverse = _inverse_length(x, eps)
        y = x * inverse
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None]:
        y, inverse = ctx.saved_tensors
        along = (y * d_y).sum(-1, keepdim=True)
        return torch.addcmul(d_y, y, along, value=-1).mul_(inverse), None
