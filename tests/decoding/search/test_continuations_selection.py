"""The best k of many values, ties included."""

import pytest
import torch

from mtkit.decoding.search.continuations import best, best_sums


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


@pytest.mark.parametrize("count", [7, 64, 100, 5003])
@pytest.mark.parametrize("k", [1, 2, 10])
@pytest.mark.parametrize("kinds", [3, 10**6])
def test_the_first_k_of_the_sums(count: int, k: int, kinds: int) -> None:
    values, before = torch.randint(kinds, (6, 3, count)).float(), torch.randint(3, (6, 3)).float()
    values[1], before[2, 1:] = -torch.inf, -torch.inf
    values[3, 1] = torch.nan  # as the log-probabilities of a hypothesis for which the model gives no number
    sums = (values + before[..., None]).nan_to_num(nan=-torch.inf, neginf=-torch.inf).flatten(1)
    expected = sums.sort(dim=1, descending=True, stable=True)
    found, indices = best_sums(values, before, k)
    assert torch.equal(found, expected.values[:, :k])
    real = found > -torch.inf
    assert torch.equal(indices[real], expected.indices[:, :k][real])


def test_no_more_than_there_are() -> None:
    found, indices = best_sums(torch.randn(2, 2, 3), torch.zeros(2, 2), 10)
    assert found.shape == indices.shape == (2, 6)
    assert indices.sort(1).values.tolist() == [list(range(6))] * 2
