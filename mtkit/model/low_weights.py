"""Weights in bfloat16 for passes on the CPU, beside float32 ones that are trained.

Autocast alone rounds the factors of each product, but what passes between products stays in float32, is rounded again
by every product that reads it, and takes twice the room in the cache. With matrices in
bfloat16 the tokens' vectors are so from the embedding on (Micikevicius et al., "Mixed Precision Training", ICLR 2018,
section 3.1, has float32 master weights beside low ones). What has one axis, as biases and norms, stays in float32, and
so do buffers and the weights of attentions that must not round (`unrounded`); where a mechanism sums in float32,
autocast rounds what it hands on.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mtkit.attention.contract import unrounded_parts


class LowWeights:
    """Copies of a model's matrices in bfloat16, for its passes under autocast in that type."""

    def __init__(self, model: nn.Module) -> None:
        unrounded = {each for part in unrounded_parts(model) for each in part.parameters()}
        matrices = [each for each in model.parameters() if each.dim() >= 2 and each.dtype == torch.float32]
        self._parameters = [each for each in matrices if each not in unrounded]
        self._copies: list[Tensor] = []

    def refresh(self) -> None:
        """Round the weights, anew after they have changed."""
        if not self._copies:
            self._copies = [torch.empty_like(each, dtype=torch.bfloat16) for each in self._parameters]
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            copy.copy_(parameter.detach())

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
            found = [each.grad for each in self._parameters]
            for parameter, weight in zip(self._parameters, weights, strict=True):
                parameter.grad, parameter.data = None, weight
            for parameter, *parts in zip(self._parameters, before, found, strict=True):
                parameter.grad = _sum(*parts)


def _sum(before: Tensor | None, found: Tensor | None) -> Tensor | None:
    if found is None:
        return before
    return found.float() if before is None else before.add_(found)
