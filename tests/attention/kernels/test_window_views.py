"""Overlapping windows and their gradients, against the same windows cut out one by one."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.window_views import windows


@pytest.mark.parametrize(
    ("spans", "step", "width", "before", "behind"),
    [
        ([(0, 1)], 9, 9, 0, 0),
        ([(0, 2), (2, 3)], 3, 3, 0, 0),
        ([(0, 1), (1, 4)], 3, 3, 0, 3),
        ([(0, 1), (1, 2), (2, 3)], 3, 9, 3, 3),
        ([(0, 1), (1, 5)], 2, 5, 2, 2),
        ([(0, 3)], 2, 5, 0, 0),
        ([(0, 2)], 4, 6, 1, 0),
    ],
)
def test_windows_and_gradients_are_those_of_slices(
    spans: list[tuple[int, int]], step: int, width: int, before: int, behind: int
) -> None:
    x = torch.randn(2, 3, 9, 4, dtype=torch.float64, requires_grad=True)

    def made(x: Tensor) -> tuple[Tensor, ...]:
        return windows(x, spans, step=step, width=width, zeros_before=before, zeros_after=behind)

    def cut(x: Tensor) -> tuple[Tensor, ...]:
        padded = F.pad(x, (0, 0, before, behind))
        each = [padded[..., i * step : i * step + width, :] for i in range(spans[-1][1])]
        return tuple(torch.stack(each[first:last], -3) for first, last in spans)

    got, wanted = made(x), cut(x)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    directions = [torch.randn_like(each) for each in got]
    torch.testing.assert_close(torch.autograd.grad(got, x, directions), torch.autograd.grad(wanted, x, directions))


def test_what_needs_no_gradient_is_cut_without_a_copy() -> None:
    x = torch.randn(1, 1, 12, 2)
    (made,) = windows(x, [(0, 3)], step=3, width=6, zeros_before=0, zeros_after=0)
    assert made.data_ptr() == x.data_ptr()
