"""The running softmax against one softmax for each prefix."""

import pytest
import torch

from mtkit.attention.engines.softmax.running_softmax import CHUNK, running_softmax


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_every_prefix_has_its_own_softmax(length: int) -> None:
    scores = (4 * torch.randn(2, 3, length, dtype=torch.float64)).requires_grad_()
    values = torch.randn(2, 3, length, 5, dtype=torch.float64, requires_grad=True)
    means = running_softmax(scores, values)
    wanted = torch.stack(
        [(scores[..., :t].softmax(-1).unsqueeze(-2) @ values[..., :t, :]).squeeze(-2) for t in range(1, length + 1)], -2
    )
    torch.testing.assert_close(means, wanted)
    weight = torch.randn_like(wanted)
    for one, other in zip(
        *(torch.autograd.grad((each * weight).sum(), [scores, values]) for each in (means, wanted)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_scores_of_any_size_stay_finite() -> None:
    scores = torch.tensor([-1e4, 1e4, 0.0] * 50)
    means = running_softmax(scores[None, None], torch.randn(1, 1, 150, 2))
    assert means.isfinite().all()
