"""Picked blocks: dropout, and parts of any size; the patterns' tests compare them with dense masks."""

import pytest
import torch

from mtkit.attention.kernels.picked_blocks import attend_picked
from mtkit.attention.kernels.tiled_softmax import SCORES_AT_ONCE

PICKS = torch.tensor([[-1, 0, 3], [0, 1, 2], [-1, -1, 2], [0, 1, 3]])[None, None]


def inputs(length: int, width: int = 4) -> list[torch.Tensor]:
    return [torch.randn(2, 2, length, width, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def test_gradients_are_those_of_the_weights_that_dropout_left() -> None:
    valid = torch.arange(15) < torch.tensor([[15], [9]])

    def attend(*heads: torch.Tensor) -> torch.Tensor:
        torch.default_generator.manual_seed(4)  # of no accelerator: gradcheck calls it thousands of times
        return attend_picked(*heads, PICKS, 4, scale=0.5, valid=valid, dropout=0.4)

    assert torch.autograd.gradcheck(attend, inputs(15))


def test_parts_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 blocks of queries at a time, so that parts end inside segments and heads; memory holds the scores of one."""
    tokens, results = inputs(16), []
    for most in (1 << 18, 5 * 4 * 12):
        monkeypatch.setitem(SCORES_AT_ONCE, "cpu", most)
        output = attend_picked(*tokens, PICKS, 4, scale=0.5)
        results.append([output, *torch.autograd.grad(output.square().sum(), tokens)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
