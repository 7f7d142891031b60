"""Recurrences and prefix products against loops over positions."""

import pytest
import torch
from torch import Tensor

from mtkit.attention.kernels import recurrence
from mtkit.attention.kernels.recurrence import Factors, Part, prefix_products, recur
from tests.contract.counting import saved_tensors


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
    x, y, w = numbers(12)
    first = torch.zeros(5, 1, 2).double()
    saved = saved_tensors(lambda: recur(step, [x, y], [first], constants=[w], chunk=4))
    assert [each.shape for each in saved] == [x.shape, y.shape, w.shape, *[(5, 1, 2)] * 3]


def test_one_part_is_computed_once() -> None:
    """The backward pass of a longer sequence computes its parts again."""
    calls: list[bool] = []

    def counting(part: Part, *given: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        calls.append(part.is_whole)
        return step(part, *given)

    for length, expected in ((4, [True]), (5, [False] * 4)):
        calls.clear()
        x, y, w = numbers(length)
        outputs, _ = recur(counting, [x, y], [torch.zeros(5, 1, 2).double()], constants=[w], chunk=4)
        outputs.sum().backward()
        assert calls == expected


def part_inputs(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("part", [1, 4, 5, 11, 64])
def test_parts_one_after_the_other_are_the_products_of_every_prefix(part: int) -> None:
    x, y, z = part_inputs(3, 11, 5), part_inputs(3, 11, 5), part_inputs(3, 11, 2)
    sums, rows = torch.zeros(3, 5, 2, dtype=torch.float64), []
    for own in zip(*(each.split(part, 1) for each in (x, y, z)), strict=True):
        made, sums = prefix_products(*own, sums)
        rows.append(made)
    expected = [x[:, t : t + 1] @ y[:, : t + 1].mT @ z[:, : t + 1] for t in range(11)]
    torch.testing.assert_close(torch.cat(rows, 1), torch.cat(expected, 1))
    torch.testing.assert_close(sums, y.mT @ z)


@pytest.mark.parametrize("scaled", [False, True])
def test_queries_follow_one_another_and_gradients_are_those_of_the_products(scaled: bool) -> None:
    x, y, z, sums = part_inputs(2, 6, 4), part_inputs(2, 3, 4), part_inputs(2, 3, 3), part_inputs(2, 4, 3)
    factors = None
    if scaled:
        pairs = torch.rand(2, 6, 3, dtype=torch.float64) * torch.ones(3, 3).tril().repeat(2, 1)
        factors = Factors(pairs, *(torch.rand(2, n, 1, dtype=torch.float64) for n in (6, 1, 3)))
    rows, after = prefix_products(x, y, z, sums, factors)
    for query in range(2):
        own = slice(3 * query, 3 * query + 3)
        for t in range(3):
            read, added, kept = 1.0, torch.ones(2, 3, 1), 1.0
            pairs = torch.ones(2, 3)
            if factors is not None:
                read, added, kept, pairs = (
                    factors.read[:, own][:, t],
                    factors.added,
                    factors.kept,
                    factors.pairs[:, own][:, t],
                )
            seen = (y[:, : t + 1] * pairs[:, : t + 1, None]).mT @ z[:, : t + 1]
            expected = read * (x[:, own][:, t, None] @ sums)[:, 0] + (x[:, own][:, t, None] @ seen)[:, 0]
            torch.testing.assert_close(rows[:, own][:, t], expected)
    torch.testing.assert_close(after, kept * sums + y.mT @ (z * added))
    assert torch.autograd.gradcheck(lambda *inputs: prefix_products(*inputs, factors), (x, y, z, sums))
    if factors is not None:
        learned = [each.requires_grad_() for each in factors]
        assert torch.autograd.gradcheck(
            lambda *inputs: prefix_products(*inputs[:4], Factors(*inputs[4:])), (x, y, z, sums, *learned)
        )
