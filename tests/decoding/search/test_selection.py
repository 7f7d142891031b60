"""The best k of many values, ties included."""

import pytest
import torch

from mtkit.decoding.search.selection import best


@pytest.mark.parametrize("count", [7, 64, 640, 641, 5000, 5003])
@pytest.mark.parametrize("k", [1, 2, 10])
@pytest.mark.parametrize("kinds", [3, 40, 10**6])
def test_the_first_k_of_a_stable_sort(count: int, k: int, kinds: int) -> None:
    """`kinds` different values: with 3 of them nearly everything is a tie."""
    values = torch.randint(kinds, (6, count)).float()
    values[1] = -torch.inf
    values[2, : count - 1] = -torch.inf
    values[3, count // 2 :] = -torch.inf
    expected = values.sort(dim=1, descending=True, stable=True)
    found, indices = best(values, k)
    assert torch.equal(found, expected.values[:, :k])
    assert torch.equal(indices, expected.indices[:, :k])
