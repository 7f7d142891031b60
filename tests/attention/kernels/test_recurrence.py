"""Recurrences in parts: what they give, their gradients, and what they keep for the backward pass."""

import pytest
import torch
from torch import Tensor

from mtkit.attention.kernels import recurrence
from mtkit.attention.kernels.recurrence import Part, recur


def step(
    part: Part, sequences: list[Tensor], constants: list[Tensor], state: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """s_t = s_t-1 + w x_t y_t, the output is the sine of it."""
    x, y = sequences
    sums = state[0] + (constants[0] * x * y).cumsum(-2)
    return sums.sin(), [sums[:, -1:]]


def whole(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    sums = (w * x * y).cumsum(-2)
    return sums.sin(), sums[:, -1:]


def numbers(length: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (5, length, 2), (5, length, 2), (5, 1, 2)
    x, y, w = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return x, y, w


@pytest.mark.parametrize("at_once", [1, 4, 1000])
@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (4, 4), (11, 4), (11, 1), (11, 64)])
def test_parts_are_the_recurrence_and_so_are_the_gradients(
    monkeypatch: pytest.MonkeyPatch, length: int, chunk: int, at_once: int
) -> None:
    monkeypatch.setitem(recurrence.NUMBERS_AT_ONCE, "cpu", at_once)
    x, y, w = inputs = numbers(length)
    outputs, (after,) = recur(step, [x, y], [torch.zeros(5, 1, 2).double()], constants=[w], chunk=chunk)
    wanted = whole(x, y, w)
    torch.testing.assert_close((outputs, after), wanted)
    directions = torch.randn_like(outputs), torch.randn_like(after)
    torch.testing.assert_close(
        torch.autograd.grad((outputs, after), inputs, directions), torch.autograd.grad(wanted, inputs, directions)
    )


def test_what_needs_no_gradient_gets_none() -> None:
    x, y, w = numbers(7)
    outputs, _ = recur(step, [x, y.detach()], [torch.zeros(5, 1, 2).double()], constants=[w.detach()], chunk=3)
    outputs.sum().backward()
    assert x.grad is not None
    assert y.grad is w.grad is None


def test_kept_are_the_inputs_and_a_state_for_each_part() -> None:
    kept: list[torch.Size] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.shape)
        return x

    x, y, w = numbers(12)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        recur(step, [x, y], [torch.zeros(5, 1, 2).double()], constants=[w], chunk=4)
    assert kept == [x.shape, y.shape, w.shape, *[(5, 1, 2)] * 3]


def test_one_part_is_computed_once() -> None:
    """The backward pass of a longer sequence computes its parts again."""
    calls: list[bool] = []

    def counting(part: Part, *given: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        calls.append(part.whole)
        return step(part, *given)

    for length, expected in ((4, [True]), (5, [False] * 4)):
        calls.clear()
        x, y, w = numbers(length)
        outputs, _ = recur(counting, [x, y], [torch.zeros(5, 1, 2).double()], constants=[w], chunk=4)
        outputs.sum().backward()
        assert calls == expected
