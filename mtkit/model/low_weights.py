"""Copies of the float32 weights in bfloat16, with which the passes of training compute.

Autocast alone rounds the factors of each product, but what passes between products stays in float32 and is rounded
again by every product that reads it. If the matrices are bfloat16, so are the tokens' vectors from the embedding on
(Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1: float32 master weights and low copies).
The biases of linear layers are copied too: a product has one type for matrix and bias. Other vectors, such as norms,
stay in float32, and so do buffers and the weights of attentions that must not round (`unrounded`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from mtkit.attention.contract import unrounded_parts


class LowWeights:
    """Copies of a model's matrices and linear biases in bfloat16, for its passes under autocast in that type."""

    def __init__(self, model: nn.Module) -> None:
        unrounded = {each for part in unrounded_parts(model) for each in part.parameters()}
        biases = {each.bias for each in model.modules() if isinstance(each, nn.Linear)}
        self._parameters = [
            each
            for each in model.parameters()
            if (each.dim() >= 2 or each in biases) and each.dtype == torch.float32 and each not in unrounded
        ]
        self._copies: list[Tensor] = []

    def refresh(self) -> None:
        """Round the weights, anew after they have changed."""
        if not self._copies:
            self._copies = [torch.empty_like(each, dtype=torch.bfloat16) for each in self._parameters]
        if self._copies:
            torch._foreach_copy_(self._copies, [each.detach() for each in self._parameters])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the parameters hold the copies; afterwards the float32 weights, and float32 gradients.

        Gradients that passes made inside have then been added to those from before. For one thread at a time.
        """
        if not self._copies:
            self.refresh()
        weights, before = [each.data for each in self._parameters], [each.grad for each in self._parameters]
        try:
            for parameter, copy in zip(self._parameters, self._copies, strict=True):
                parameter.grad, parameter.data = None, copy
            yield
        finally:
            passes = [each.grad for each in self._parameters]
            for parameter, weight in zip(self._parameters, weights, strict=True):
                parameter.grad, parameter.data = None, weight
            _add_gradients(self._parameters, before, passes)


def _add_gradients(
    parameters: Sequence[nn.Parameter], before: Sequence[Tensor | None], passes: Sequence[Tensor | None]
) -> None:
    """Sets each parameter's gradient to the sum in float32 of the one `before` and the one of the `passes`."""
    for parameter, total in zip(parameters, before, strict=True):
        parameter.grad = total
    reached = [(each, low) for each, low in zip(parameters, passes, strict=True) if low is not None]
    first = [(each, low) for each, low in reached if each.grad is None]
    again = [(each.grad, low) for each, low in reached if each.grad is not None]
    for parameter, _ in first:
        parameter.grad = torch.empty_like(parameter)
    # one call for all: a GPU needs longer to start a kernel than to run it
    if first:
        torch._foreach_copy_([cast(Tensor, each.grad) for each, _ in first], [low for _, low in first])
    for total, low in again:
        total.add_(low)
