"""Blocks of gathered queries over gathered keys: sums of dense softmaxes, however the blocks are divided into parts."""

import pytest
import torch
from torch import Tensor

from mtkit.attention.kernels import tiled_softmax
from mtkit.attention.kernels.chunks import attend_gathered, others_first
from mtkit.attention.kernels.dot_product import safe_softmax


def _inputs() -> tuple[list[Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Queries, keys and values of 2 segments with 3 heads, and 5 blocks of 4 queries and 6 keys, some of them empty."""
    x = [torch.randn(2, 3, 11, size, dtype=torch.float64, requires_grad=True) for size in (8, 8, 7)]
    places = [(torch.rand(2, 3, 5, 11).argsort(-1)[..., :n], torch.rand(2, 3, 5, n) < 0.6) for n in (4, 6)]
    places[0][1][0, 0, 1], places[1][1][1, 2, 3] = False, False
    return x, places[0], places[1]


@pytest.mark.parametrize("parts", [1, 50, 1 << 18])
@pytest.mark.parametrize(("causal", "shared"), [(False, False), (True, False), (False, True), (True, True)])
def test_outputs_are_sums_of_dense_softmaxes(
    causal: bool, shared: bool, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiled_softmax.SCORES_AT_ONCE, "cpu", parts)
    (q, k, v), query, key = _inputs()
    output = attend_gathered(q, k, v, query, key, scale=0.3, causal=causal, shared=shared, added=True)
    expected = torch.zeros_like(v)
    for block in range(5):
        seen = _pairs(query, key, block)
        seen = seen.tril() if causal else seen
        seen = others_first(seen, torch.eye(11, dtype=torch.bool)) if shared else seen
        expected = expected + safe_softmax(0.3 * q @ k.transpose(-1, -2), seen) @ v
    torch.testing.assert_close(output, expected)
    weight = torch.randn_like(output)
    ours, dense = (torch.autograd.grad((each * weight).sum(), (q, k, v)) for each in (output, expected))
    torch.testing.assert_close(ours, dense)


def _pairs(query: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor], block: int) -> Tensor:
    """Whether each query and key, (2, 3, 11, 11), are together in a block."""
    here, there = (
        torch.zeros(2, 3, 11, dtype=torch.bool).scatter(-1, position[:, :, block], counts[:, :, block])
        for position, counts in (query, key)
    )
    return here.unsqueeze(-1) & there.unsqueeze(-2)


def test_the_backward_pass_repeats_dropout() -> None:
    x, query, key = _inputs()

    def attended(*rows: Tensor) -> Tensor:
        torch.default_generator.manual_seed(3)  # of no accelerator: gradcheck calls it thousands of times
        return attend_gathered(*rows, query, key, scale=0.3, added=True, dropout=0.4)

    assert not torch.allclose(attended(*x), attend_gathered(*x, query, key, scale=0.3))
    torch.autograd.gradcheck(attended, x)
