"""Activations recomputed in the backward pass: `torch.utils.checkpoint` in both its forms changes no result."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.contract.cases import Case, each, once, small
from tests.contract.stack import Stack, apart, make, memory_for, tokens


def gradients(stack: Stack, query: Tensor, memory: Tensor | None, **checkpointing: Any) -> list[Tensor | None]:
    """The output, and the gradients of query, memory and every parameter; checkpointed if `checkpointing` says how."""
    given = [x.detach().clone().requires_grad_() for x in (query, memory) if x is not None]
    output = checkpoint(stack, *given, **checkpointing) if checkpointing else stack(*given)
    wanted = [*given, *stack.parameters()]
    stack.zero_grad()
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    return [output, *(x.grad for x in wanted)]


@each(lambda case: small(case) and once(case))
def test_checkpoints_change_neither_outputs_nor_gradients(case: Case) -> None:
    stack = make(case, dropout=0.2).train()
    query, memory = tokens(2, 9), memory_for(case, 2, 7)
    results = []
    for checkpointing in ({}, {"use_reentrant": False}, {"use_reentrant": True}):
        torch.manual_seed(4)
        with torch.no_grad():
            for parameter in stack.parameters():
                parameter.mul_(1.0)  # as an update does: what a mechanism has kept of the former values is out of date
        results.append(gradients(stack, query, memory, **checkpointing))
    for plain, *others in zip(*results, strict=True):
        for recomputed in others:
            assert (plain is None) == (recomputed is None)
            assert plain is None or apart(recomputed, plain) < 1e-6
    assert any(gradient is not None and gradient.any() for gradient in results[0][1:])
