"""Rows in bytes against the same by PyTorch, number for number."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mtkit.attention.kernels.cpu.machine_code import ZERO, round_rows, scale_rows


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    whole, units = torch.empty(rows.shape, dtype=torch.uint8), torch.empty(len(rows))
    round_rows(rows.numpy(), whole.numpy(), units.numpy())
    return whole, units


@pytest.mark.parametrize("width", [1, 7, 64, 256, 1023])
def test_each_row_is_rounded_in_its_own_unit(width: int) -> None:
    rows = torch.randn(9, width) * torch.logspace(-20, 20, 9)[:, None]
    rows[4] = torch.arange(width) / 2 - 30  # halves
    rows[4, 0] = 127.0
    whole, units = rounded(rows)
    expected = rows.abs().amax(1) / 127
    assert torch.equal(units, expected)
    assert torch.equal(whole, ((rows / expected[:, None]).round() + ZERO).to(torch.uint8))
    assert (whole.int() - ZERO).abs().amax(1).tolist() == [127] * 9


def test_a_row_of_zeros_stays_one() -> None:
    whole, units = rounded(torch.zeros(2, 5))
    assert (whole == ZERO).all()
    assert (units > 0).all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen_in_the_unit(number: float) -> None:
    rows = torch.randn(3, 40)
    rows[1, 17] = number
    units = rounded(rows)[1]
    assert units.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("width", [1, 7, 300])
def test_sums_are_scaled_row_by_row(width: int) -> None:
    sums, units, bias = torch.randn(4, width), torch.rand(4), torch.randn(width)
    expected = torch.addcmul(bias.double(), sums.double(), units[:, None].double())
    out = torch.empty_like(sums)
    scale_rows(sums.numpy(), units.numpy(), bias.numpy(), out.numpy())
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    scale_rows(sums.numpy(), units.numpy(), bias.numpy(), sums.numpy())
    assert np.array_equal(sums.numpy(), out.numpy())
