"""Copies of a model's weights in bfloat16, for passes under autocast; the weights themselves stay in float32."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mtkit.attention.contract import unrounded_parts
from mtkit.model.sublayers import LayerNorm


class LowWeights:
    """Copies of a model's matrices, linear biases and norms in bfloat16, for passes under autocast in that type.

    Autocast only rounds the factors of each product; the tensors between products stay in float32 and are rounded again
    by every product that reads them. With bfloat16 matrices, the tokens' vectors are bfloat16 from the embedding on
    (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1: float32 master weights and low copies).
    Biases of linear layers are copied too, because a product has one type for matrix and bias, and on CUDA, whose norms
    have one type for input and weights, the norms between sub-layers. Other vectors stay in float32, and so do buffers
    and the weights of attentions that must not round (`unrounded`).
    """

    def __init__(self, model: nn.Module) -> None:
        unrounded = {parameter for part in unrounded_parts(model) for parameter in part.parameters()}
        vectors = {module.bias for module in model.modules() if isinstance(module, nn.Linear)}
        norms = [module for module in model.modules() if isinstance(module, LayerNorm)]
        vectors |= {vector for norm in norms if norm.weight.is_cuda for vector in norm.parameters()}
        self._parameters = [
            parameter
            for parameter in model.parameters()
            if (parameter.dim() >= 2 or parameter in vectors)
            and parameter.dtype == torch.float32
            and parameter not in unrounded
        ]
        self._copies: list[Tensor] = []

    def refresh(self) -> None:
        """Copy the weights again after they have changed."""
        if not self._copies and self._parameters:
            self._copies = _side_by_side(self._parameters)
        if self._copies:
            torch._foreach_copy_(self._copies, [parameter.detach() for parameter in self._parameters])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the parameters hold the copies; afterwards the float32 weights, and float32 gradients.

        Gradients of the passes inside are then added to the earlier ones. Only one thread may use it at a time.
        """
        if not self._copies:
            self.refresh()
        weights = [parameter.data for parameter in self._parameters]
        earlier = [parameter.grad for parameter in self._parameters]
        try:
            for parameter, copy in zip(self._parameters, self._copies, strict=True):
                parameter.grad, parameter.data = None, copy
            yield
        finally:
            low = [parameter.grad for parameter in self._parameters]
            for parameter, weight in zip(self._parameters, weights, strict=True):
                parameter.grad, parameter.data = None, weight
            _add_gradients(self._parameters, earlier, low)


ALIGNED = 64
"""Copies begin at multiples of this many numbers, so that products read them fast."""


def _side_by_side(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like the parameters, in bfloat16: matrices that follow each other do so in memory, and so do vectors.

    The maps of queries, keys and values can then be one factor of a product.
    """
    sizes = [-(-parameter.numel() // ALIGNED) * ALIGNED for parameter in parameters]
    memory, place = parameters[0].new_empty(sum(sizes), dtype=torch.bfloat16), 0
    copies: dict[int, Tensor] = {}
    for number in sorted(range(len(parameters)), key=lambda number: parameters[number].dim() < 2):
        parameter = parameters[number]
        copies[number] = memory[place : place + parameter.numel()].view(parameter.shape)
        place += sizes[number]
    return [copies[number] for number in range(len(parameters))]


def _add_gradients(
    parameters: Sequence[nn.Parameter], earlier: Sequence[Tensor | None], low: Sequence[Tensor | None]
) -> None:
    """Set each parameter's gradient to the float32 sum of its earlier gradient and the bfloat16 one."""
    first: list[tuple[Tensor, Tensor]] = []
    for parameter, total, gradient in zip(parameters, earlier, low, strict=True):
        parameter.grad = total
        if gradient is None:
            continue
        if total is None:
            parameter.grad = torch.empty_like(parameter)
            first.append((parameter.grad, gradient))
        else:
            total.add_(gradient)
    # one call for all: a GPU needs longer to start a kernel than to run it
    if first:
        torch._foreach_copy_([total for total, _ in first], [gradient for _, gradient in first])
