"""Sums of values in windows, against the same sums position by position."""

import pytest
import torch
from torch import Tensor

from mtkit.attention.prior._window_sums import slide, sum_windows


def summed(v: Tensor, weights: Tensor, first: int) -> Tensor:
    """Position by position; v (B, G, T, V), weights (H, n)."""
    heads = []
    for head, row in enumerate(weights):
        own = v[:, head * v.shape[1] // len(weights)]
        sums = torch.zeros_like(own)
        for t in range(v.shape[2]):
            for number, weight in enumerate(row):
                if 0 <= t + first + number < v.shape[2]:
                    sums[:, t] += weight * own[:, t + first + number]
        heads.append(sums)
    return torch.stack(heads, 1)


@pytest.mark.parametrize("length", [1, 5, 32, 33, 70])
@pytest.mark.parametrize("first", [-6, -2, 0])
def test_blocks_share_a_matrix(length: int, first: int) -> None:
    v, weights = torch.randn(2, 2, length, 3, dtype=torch.float64), torch.randn(4, 7, dtype=torch.float64)
    torch.testing.assert_close(slide(v, weights, first), summed(v, weights, first))


def test_a_window_wider_than_a_block() -> None:
    v, weights = torch.randn(1, 1, 90, 2, dtype=torch.float64), torch.randn(2, 77, dtype=torch.float64)
    torch.testing.assert_close(slide(v, weights, -40), summed(v, weights, -40))


def test_dropout_leaves_out_weights_of_each_query_and_scales_up_the_rest() -> None:
    v, weights = torch.ones(3, 2, 50, 1), torch.ones(2, 4)
    sums = slide(v, weights, 0, dropout=0.5)[:, :, :-3]
    assert set(sums.unique().tolist()) == {0.0, 2.0, 4.0, 6.0, 8.0}
    assert not torch.equal(sums[0], sums[1])
    assert sums.mean() == pytest.approx(4.0, abs=0.5)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_windows_are_places_of_the_segment_and_of_the_group(groups: int) -> None:
    v = torch.randn(3, 9, groups, 5, dtype=torch.float64).transpose(1, 2).requires_grad_()
    key, weights = torch.randint(9, (3, 4, 6, 2)), torch.randn(3, 4, 6, 2, dtype=torch.float64)
    sums = sum_windows(v, key, weights)
    rows = v.repeat_interleave(4 // groups, 1).unsqueeze(2).expand(-1, -1, 6, -1, -1)
    expected = (rows.take_along_dim(key.unsqueeze(-1), 3) * weights.unsqueeze(-1)).sum(3)
    torch.testing.assert_close(sums, expected)
    upstream = torch.randn_like(sums)
    gradients = [torch.autograd.grad(each, v, upstream)[0] for each in (sums, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("form", ["slide", "windows"])
def test_sums_are_in_float32_under_autocast(form: str) -> None:
    v = torch.ones(1, 1, 400, 1, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if form == "slide":
            sums = slide(v, torch.ones(1, 400), -399)
        else:
            sums = sum_windows(v, torch.arange(400).view(1, 1, 1, -1), torch.ones(1, 1, 1, 400))
    assert sums.dtype == torch.float32
    assert sums[0, 0, -1] == 400
