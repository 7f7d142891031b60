"""Products with running sums: those of every prefix, at any chunk, and their gradients."""

import pytest
import torch

from mtkit.attention.prefix_products import prefix_products


@pytest.mark.parametrize("chunk", [1, 4, 5, 11, 64])
def test_products_in_chunks_are_those_of_every_prefix(chunk: int) -> None:
    x, y, z = (torch.randn(2, 3, 11, width, dtype=torch.float64) for width in (5, 5, 2))
    expected = torch.cat([x[..., t : t + 1, :] @ y[..., : t + 1, :].mT @ z[..., : t + 1, :] for t in range(11)], dim=-2)
    torch.testing.assert_close(prefix_products(x, y, z, chunk), expected)


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_the_gradients_are_those_of_the_products(chunk: int) -> None:
    inputs = [torch.randn(2, 1, 7, width, dtype=torch.float64, requires_grad=True) for width in (4, 4, 3)]
    assert torch.autograd.gradcheck(lambda x, y, z: prefix_products(x, y, z, chunk), inputs)


def test_nothing_is_kept_for_the_backward_pass_but_the_inputs() -> None:
    kept: list[torch.Size] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.shape)
        return x

    x, y, z = (torch.randn(1, 2, 40, width, requires_grad=True) for width in (4, 4, 3))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        prefix_products(x, y, z, 4)
    assert kept == [each.shape[1:] for each in (x, y, z)]
