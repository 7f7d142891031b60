"""Sinkhorn's weights: balanced, causal without later rows, row by row; and rows mixed slot by slot."""

import pytest
import torch

from mtkit.attention.content._block_sorting import (
    block_means,
    next_order_weights,
    order_weights,
    sorted_rows,
    sums_to_blocks,
)


def test_iterations_lead_to_sums_of_one_in_rows_and_columns() -> None:
    scores = torch.randn(2, 3, 6, 6).double()
    errors = []
    for iterations in (0, 1, 4, 30):
        weights = order_weights(scores, None, iterations, causal=False)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 6).double())
        errors.append((weights.sum(-2) - 1).abs().max().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6


def test_a_permutation_stands_out_of_large_scores() -> None:
    order = torch.randperm(7)
    weights = order_weights(50 * torch.eye(7)[order][None, None], None, 5, causal=False)
    torch.testing.assert_close(weights[0, 0], torch.eye(7)[order])


def test_what_is_not_visible_has_no_weight_and_no_say() -> None:
    scores = torch.randn(2, 1, 5, 5)
    visible = torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    visible[0, :, :3, :3] = True  # the other segment has nothing
    scores[0, :, 3:] = 1e4
    scores.requires_grad_()
    weights = order_weights(scores, visible, 3, causal=False)
    torch.testing.assert_close(weights[:1, :, :3, :3], order_weights(scores[:1, :, :3, :3], None, 3, causal=False))
    assert weights[~visible].abs().max() == 0
    weights[0, 0, 0, 0].backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_causal_weights_row_by_row(iterations: int) -> None:
    """The weights of a row are independent of later rows, and each follows from the sums of those before."""
    scores = torch.randn(2, 3, 6, 6).double()
    visible = torch.ones(6, 6, dtype=torch.bool).tril(-1)
    weights = order_weights(scores, visible, iterations, causal=True)
    assert weights.triu().abs().max() == 0
    fewer = order_weights(scores[..., :4, :4], visible[:4, :4], iterations, causal=True)
    torch.testing.assert_close(fewer, weights[..., :4, :4])
    columns = scores.new_zeros(2, 3, iterations, 0)
    for row in range(1, 6):
        one, columns = next_order_weights(scores[:, :, row, :row], columns)
        torch.testing.assert_close(one, weights[:, :, row, :row])


def test_causal_balance_draws_to_the_block_before() -> None:
    """Whatever the scores are: a triangular matrix whose rows and columns all sum to 1 is a diagonal."""
    torch.manual_seed(0)
    scores = torch.randn(200, 1, 12, 12)
    visible = torch.ones(12, 12, dtype=torch.bool).tril(-1)
    masses = [
        order_weights(scores, visible, iterations, causal=True).diagonal(-1, -2, -1).mean().item()
        for iterations in (0, 1, 2, 5, 20)
    ]
    assert masses == sorted(masses)
    assert masses[0] < 0.4
    assert masses[-1] > 0.9


def test_rows_are_mixed_over_the_blocks_that_have_their_slot() -> None:
    """Three blocks of 4 of which the last has 2 real rows; slot 3 of a block that reads the last alone is not there."""
    x = torch.randn(1, 1, 12, 5)
    valid = (torch.arange(12) < 10)[None]
    x[0, 0, 10:] = 1e4
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]])[None, None]
    mixed, there = sorted_rows(weights, x, 4, valid)
    rows = x[0, 0]
    torch.testing.assert_close(mixed[0, 0, 0, 1], 0.5 * rows[1] + 0.25 * rows[5] + 0.25 * rows[9])
    torch.testing.assert_close(mixed[0, 0, 0, 3], (0.5 * rows[3] + 0.25 * rows[7]) / 0.75)
    torch.testing.assert_close(mixed[0, 0, 1, :2], rows[8:10])
    assert there is not None
    assert there[0, 0].tolist() == [[True] * 4, [True, True, False, False]]
    short, there_too = sorted_rows(weights, x[:, :, :10], 4)
    torch.testing.assert_close(short, mixed)
    assert there_too is not None
    assert torch.equal(there_too, there)
    assert sorted_rows(weights, x, 4)[1] is None


def test_sums_and_means_of_blocks() -> None:
    x = torch.randn(2, 3, 10, 5)
    valid = torch.arange(10) < torch.tensor([[10], [5]])
    means, sums = block_means(x, 4, valid), sums_to_blocks(x, 4)
    torch.testing.assert_close(means[0, :, 2], x[0, :, 8:].mean(1))
    torch.testing.assert_close(means[1, :, 1], x[1, :, 4])
    assert means[1, :, 2].abs().max() == 0
    torch.testing.assert_close(sums[:, :, 2], x[:, :, :9].sum(2))
    torch.testing.assert_close(block_means(x, 4)[:, :, 2], x[:, :, 8:].mean(2))
