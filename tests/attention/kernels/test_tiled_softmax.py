"""A learned bias on the scores of blocks: the dense softmax and its gradients, however the blocks are divided."""

import pytest
import torch
from torch import Tensor

from mtkit.attention.kernels import tiled_softmax
from mtkit.attention.kernels.dot_product import safe_softmax
from mtkit.attention.kernels.tiled_softmax import attend_biased


def _rows() -> list[Tensor]:
    """Queries, keys and values of 3 streams with 5 blocks of 4 queries and 6 keys."""
    sizes = (4, 8), (6, 8), (6, 7)
    return [torch.randn(3, 5, *size, dtype=torch.float64, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("parts", [1, 50, 250, 1 << 18])
@pytest.mark.parametrize("shape", [(3, 5, 4, 6), (3, 1, 4, 6), (1, 5, 4, 6), (1, 1, 4, 6), (1, 1, 1, 6)], ids=str)
def test_outputs_and_gradients_are_those_of_dense_softmaxes(
    shape: tuple[int, ...], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiled_softmax.SCORES_AT_ONCE, "cpu", parts)
    q, k, v = _rows()
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    visible = torch.rand(shape) < 0.6
    visible[..., 2] = True
    output = attend_biased(q, k, v, bias.masked_fill(~visible, float("-inf")), scale=0.3)
    expected = safe_softmax(0.3 * q @ k.transpose(-1, -2) + bias, visible) @ v
    torch.testing.assert_close(output, expected)
    weight = torch.randn_like(output)
    ours, dense = (torch.autograd.grad((each * weight).sum(), (q, k, v, bias)) for each in (output, expected))
    torch.testing.assert_close(ours, dense)


def test_the_backward_pass_repeats_dropout() -> None:
    x = [*_rows(), torch.randn(1, 5, 4, 6, dtype=torch.float64, requires_grad=True)]

    def attended(*given: Tensor) -> Tensor:
        torch.default_generator.manual_seed(3)  # of no accelerator: gradcheck calls it thousands of times
        return attend_biased(*given, scale=0.3, dropout=0.4)

    assert not torch.allclose(attended(*x), attend_biased(*x, scale=0.3))
    torch.autograd.gradcheck(attended, x)
