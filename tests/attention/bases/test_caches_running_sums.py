"""Sums over the tokens so far, step by step, against those over whole sequences."""

import pytest
import torch

from mtkit.attention.bases.caches import add_rows, prefix_means, start_sums
from mtkit.attention.contract import reorder


@pytest.mark.parametrize("length", [1, 2, 9])
def test_steps_are_the_means_over_each_prefix(length: int) -> None:
    x = torch.randn(2, 3, length, 4, dtype=torch.float64)
    given, state = x.clone(), start_sums("x")
    for t in range(length):
        state = add_rows(state, x=given[:, :, t])
        torch.testing.assert_close(state["x"] / state["count"], x[:, :, : t + 1].mean(2))
        torch.testing.assert_close(prefix_means(x)[:, :, t], x[:, :, : t + 1].mean(2))
    assert torch.equal(given, x)  # what was added is not written to


def test_sums_go_with_their_hypotheses_also_before_the_first_row() -> None:
    x, order = torch.randn(2, 3, 4, 5), torch.tensor([[2, 0], [1, 1]])
    state = reorder(start_sums("x"), torch.tensor([[0, 1, 2], [0, 1, 2]]))
    for t in range(2):
        state = add_rows(state, x=x[:, :, t])
    state = reorder(state, order)
    rows = x.take_along_dim(order[:, :, None, None], dim=1)
    for t in range(2, 4):
        state = add_rows(state, x=rows[:, :, t])
    torch.testing.assert_close(state["x"], rows.sum(2))


def test_sums_are_in_float32() -> None:
    """A count of 600 in bfloat16 would stop at 256."""
    ones = torch.ones(1, 1, 600, 1, dtype=torch.bfloat16)
    state = start_sums("ones")
    for t in range(600):
        state = add_rows(state, ones=ones[:, :, t])
    assert state["ones"].item() == 600
    assert torch.equal(prefix_means(ones), ones.float())
