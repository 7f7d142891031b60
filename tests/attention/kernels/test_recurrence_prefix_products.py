"""Products with sums over every prefix, from part to part, and their gradients."""

import pytest
import torch
from torch import Tensor

from mtkit.attention.kernels.recurrence import Factors, prefix_products


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("part", [1, 4, 5, 11, 64])
def test_parts_one_after_the_other_are_the_products_of_every_prefix(part: int) -> None:
    x, y, z = numbers(3, 11, 5), numbers(3, 11, 5), numbers(3, 11, 2)
    sums, rows = torch.zeros(3, 5, 2, dtype=torch.float64), []
    for own in zip(*(each.split(part, 1) for each in (x, y, z)), strict=True):
        made, sums = prefix_products(*own, sums)
        rows.append(made)
    expected = [x[:, t : t + 1] @ y[:, : t + 1].mT @ z[:, : t + 1] for t in range(11)]
    torch.testing.assert_close(torch.cat(rows, 1), torch.cat(expected, 1))
    torch.testing.assert_close(sums, y.mT @ z)


@pytest.mark.parametrize("scaled", [False, True])
def test_queries_follow_one_another_and_gradients_are_those_of_the_products(scaled: bool) -> None:
    x, y, z, sums = numbers(2, 6, 4), numbers(2, 3, 4), numbers(2, 3, 3), numbers(2, 4, 3)
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
