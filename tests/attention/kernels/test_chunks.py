"""Queries in blocks over keys beside them: the softmax of each block, under masks of any of the shapes they come in."""

import pytest
import torch

from mtkit.attention.kernels.chunks import attend_beside
from mtkit.attention.kernels.dot_product import safe_softmax


@pytest.mark.parametrize("shape", [None, (1, 1, 5, 4, 6), (2, 1, 5, 1, 6), (2, 3, 5, 4, 6), (1, 3, 1, 4, 6)], ids=str)
def test_blocks_beside_keys_are_dense_softmaxes(shape: tuple[int, ...] | None) -> None:
    q, k = (torch.randn(2, 3, 5, size, 8, dtype=torch.float64, requires_grad=True) for size in (4, 6))
    v = torch.randn(2, 3, 5, 6, 7, dtype=torch.float64, requires_grad=True)
    visible = None if shape is None else torch.rand(shape) < 0.4  # some rows see nothing
    output = attend_beside(q, k, v, visible, scale=0.3)
    expected = safe_softmax(0.3 * q @ k.transpose(-1, -2), visible) @ v
    torch.testing.assert_close(output, expected)
    weight = torch.randn_like(output)
    ours, dense = (torch.autograd.grad((each * weight).sum(), (q, k, v)) for each in (output, expected))
    torch.testing.assert_close(ours, dense)
