"""Loops of sines and cosines, and of additive scores, against PyTorch in float64."""

import numpy as np
import pytest
import torch

from mtkit.attention.kernels.cached_rows import rows_of
from mtkit.attention.kernels.cpu.function_loops import write_additive_scores, write_waves


@pytest.mark.parametrize("size", [1.0, 100.0, 1e6, 1e9])
def test_waves_are_sines_and_cosines(size: float) -> None:
    rows = torch.cat([size * torch.randn(7, 33), torch.zeros(1, 33)])
    waves = torch.empty(8, 66)
    write_waves(rows.numpy(), waves.numpy(), np.float32(0.5))
    expected = torch.cat([rows.double().sin(), rows.double().cos()], 1) / 2
    torch.testing.assert_close(waves.double(), expected, rtol=0, atol=1.5e-7)


def test_a_number_that_is_not_finite_has_no_wave() -> None:
    rows, waves = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0]]), torch.empty(1, 8)
    write_waves(rows.numpy(), waves.numpy(), np.float32(1))
    assert waves.isnan().tolist() == [[True, True, True, False] * 2]


@pytest.mark.parametrize("layout", ["plain", "heads last", "room"])
def test_scores_are_those_of_a_hidden_layer(layout: str) -> None:
    q, k, v = 3 * torch.randn(3, 4, 5, 9), 3 * torch.randn(3, 4, 7, 9), torch.randn(4, 9)
    q[0, 0, 0], k[0, 0, 0] = 0.0, 0.0
    if layout == "heads last":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    if layout == "room":
        k = torch.cat([k, torch.full_like(k, torch.nan)], 2)[:, :, :7]
    scores = torch.full((3, 4, 5, 7), torch.nan)
    rows = *rows_of(q.unsqueeze(1)), *rows_of(k.unsqueeze(1))
    write_additive_scores(*rows, v.numpy(), scores.numpy(), 1, 3)
    assert scores[0].isnan().all()
    write_additive_scores(*rows, v.numpy(), scores.numpy(), 0, 1)
    hidden = (q.unsqueeze(3) + k.unsqueeze(2)).double().tanh()
    torch.testing.assert_close(scores.double(), torch.einsum("bhtsa,ha->bhts", hidden, v.double()), rtol=0, atol=5e-6)
