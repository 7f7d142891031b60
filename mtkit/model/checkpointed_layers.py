"""Activation checkpointing: the backward pass computes a layer again from its input, and only inputs are kept.

Paper: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174.
Dropout is the same in both computations, and so are the discrete choices of attentions (buckets, clusters, edges).
"""

from copy import copy
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mtkit.attention.kernels.reproducible import with_recorded_choices
from mtkit.model.layers import StackPass


def run_checkpointed(layer: nn.Module, x: Tensor, stack_pass: StackPass, *args: Any, **inputs: Any) -> Tensor:
    """The layer's output for x (B, T, D), with gradients; it writes into `stack_pass`, which gathers no weights."""
    before = copy(stack_pass)

    def run(x: Tensor) -> tuple[Tensor, StackPass]:
        after = copy(before)  # the second computation writes into another one
        after.losses = dict(before.losses or {})
        return layer(x, after, *args, **inputs), after

    output: tuple[Tensor, StackPass] = checkpoint(with_recorded_choices(run), x, use_reentrant=False)
    x, after = output
    vars(stack_pass).update(vars(after))
    return x
