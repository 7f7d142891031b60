"""Norms inside attentions."""

import pytest
import torch

from mtkit.attention.bases.layers import ChannelNorm, unit


@pytest.mark.parametrize("shape", [(5,), (3, 7, 5), (2, 0, 5), (2, 3, 9, 4)])
def test_vectors_of_length_1_and_their_gradients(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    torch.testing.assert_close(unit(x, 0.1), x / (x.square().sum(-1, keepdim=True) + 0.1).sqrt())
    assert torch.autograd.gradcheck(lambda x: unit(x, 0.1), x)
    if x.dim() == 4:  # heads that lie beside each other in memory
        assert torch.autograd.gradcheck(lambda x: unit(x.transpose(1, 2), 0.1).transpose(1, 2), x)
    unit(x, 0.1).sum().backward()  # a gradient without memory of its own


def test_the_rms_norm_is_pytorchs() -> None:
    norm, x = ChannelNorm(6), torch.randn(2, 3, 6)
    with torch.no_grad():
        norm.weight.uniform_(-1, 1)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (6,), norm.weight, 1e-5))
