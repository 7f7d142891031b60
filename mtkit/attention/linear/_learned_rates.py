"""First values of decays exp(-e^A softplus(w x + b)), as Mamba-2 and its successors draw them."""

import math

import torch
from torch import Tensor


def first_rates(heads: int) -> Tensor:
    """Return A (H,), the logarithms of rates drawn uniformly from 1 to 16."""
    return torch.empty(heads).uniform_(1.0, 16.0).log()


def first_biases(count: int) -> Tensor:
    """Return b (count,) whose softplus is drawn from 0.001 to 0.1, uniformly in its logarithm."""
    steps = torch.empty(count).uniform_(math.log(1e-3), math.log(0.1)).exp()
    return steps + (-torch.expm1(-steps)).log()  # the inverse of softplus
