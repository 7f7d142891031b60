"""Promise 1: padding changes nothing, neither by being there nor by what it holds."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attended, Attention, Inputs, Site
from tests.contract.cases import Case, each, small, valid_mask
from tests.contract.stack import Stack, apart, heads_of_zero, make, memory_for, tokens

CLOSE = 1e-5


def check_close(stack: Stack, got: Tensor, x: Tensor, alone: Tensor, what: str) -> None:
    """Asks that `got` is the output of x alone, up to 1e-5 or four times that output's own error in float32.

    A norm of a read near zero multiplies rounding errors by up to 300.
    """
    difference = apart(got, alone)
    if difference >= CLOSE:
        exact = run(deepcopy(stack).double(), x.double(), None)
        assert difference < 4 * apart(alone.double(), exact), what


def ragged_lengths(case: Case) -> list[int]:
    """1, 2, an odd one, and around every block."""
    around = {length for block in case.blocks for length in (block - 1, block, block + 1)}
    if case.small:
        around |= {2 * block + 1 for block in case.blocks} | {32, 33}
    return sorted({1, 2, 7, case.long} | {length for length in around if length > 0})


def run(stack: Stack, x: Tensor, valid: Tensor | None) -> Tensor:
    """In the self roles x is the query, in the cross role the memory of a query of four tokens."""
    if stack.site.role == "cross":
        query = torch.linspace(-2, 2, 4 * 32, dtype=x.dtype).view(1, 4, 32).expand(len(x), 4, 32)
        return stack(query, x, memory_valid=valid)
    return stack(x, query_valid=valid)


def real(stack: Stack, output: Tensor, length: int) -> Tensor:
    """The rows that are compared."""
    return output if stack.site.role == "cross" else output[:, :length]


def check_padding(stack: Stack, x: Tensor, pads: list[int]) -> None:
    """Appends padding of huge values to x (B, T, D) and asks for the same result."""
    length = x.shape[1]
    expected = run(stack, x, None)
    all_real = run(stack, x, torch.ones(x.shape[:2], dtype=torch.bool))
    assert apart(all_real, expected) < CLOSE, "without a mask all tokens are real"
    for pad in pads:
        longer = torch.cat([x, 1e4 * torch.randn(len(x), pad, x.shape[2])], dim=1)
        output = run(stack, longer, valid_mask([length] * len(x), length + pad))
        assert output.isfinite().all()
        check_close(stack, real(stack, output, length), x, expected, f"{pad} of padding")


def check_ragged(stack: Stack, lengths: list[int], width: int) -> None:
    """Asks each segment of a batch, with padding of huge values, for what it gives alone."""
    x, valid = tokens(len(lengths), max(lengths), width=width), valid_mask(lengths, max(lengths))
    together = run(stack, x.where(valid.unsqueeze(2), 1e4 * torch.randn_like(x)), valid)
    assert together.isfinite().all()
    for row, length in enumerate(lengths):
        segment = x[row : row + 1, :length]
        got = real(stack, together[row : row + 1], length)
        check_close(stack, got, segment, run(stack, segment, None), f"length {length}")


@each()
@torch.no_grad()
def test_padding_changes_nothing_and_a_segment_gives_in_a_batch_what_it_gives_alone(case: Case) -> None:
    stack, block, width = make(case), max(case.blocks, default=4), case.memory_width or 32
    check_ragged(stack, ragged_lengths(case), width)
    check_padding(stack, tokens(2, 7, width=width), [1, block, 3 * block] if case.small else [1])


def check_nothing_to_see(case: Case, stack: Stack) -> None:
    """Asks a layer of the cross role for zero before `out_proj` where all of the memory is padding."""
    attention = stack.layers[0]
    query, memory = tokens(2, 5).requires_grad_(), memory_for(case, 2, 6)
    output = attention(query, memory, memory_valid=valid_mask([0, 6], 6)).output
    with heads_of_zero(attention):
        nothing = attention(query, memory).output
    assert apart(output[0], nothing[0]) < CLOSE
    assert apart(output[1], nothing[1]) > 1e-3
    output.square().sum().backward()
    assert all(each.grad is None or each.grad.isfinite().all() for each in [query, *attention.parameters()])


@each(lambda case: small(case) or case.role == "cross")
def test_a_segment_of_padding_alone_gives_no_nan_and_a_memory_of_it_zero_before_out_proj(case: Case) -> None:
    stack = make(case)
    if case.role == "cross":
        check_nothing_to_see(case, stack)
        stack.zero_grad()
    x = tokens(2, 6, width=case.memory_width or 32).requires_grad_()
    output = run(stack, x, valid_mask([0, 6], 6))
    assert output.isfinite().all()
    output.square().sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in stack.parameters())]
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)


def test_the_checks_catch_a_mean_over_padding() -> None:
    class Mean(Attention):
        def attend(self, inputs: Inputs) -> Attended:
            return Attended(inputs.query.mean(dim=1, keepdim=True).expand_as(inputs.query))

    stack = Stack([Mean(Site("encoder", 32, 4))])
    with pytest.raises(AssertionError, match="of padding"):
        check_padding(stack, tokens(2, 7), [1])
    with pytest.raises(AssertionError, match="length 1"):
        check_ragged(stack, [1, 9], 32)
