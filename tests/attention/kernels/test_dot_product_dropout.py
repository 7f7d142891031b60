"""Dropout that a backward pass draws again."""

import torch

from mtkit.attention.kernels.dot_product import seeded_dropout


def test_noise_is_the_same_for_the_same_seed_and_keeps_the_mean() -> None:
    x = torch.ones(1000)
    first, again = (seeded_dropout(0.25, 7, x.device) for _ in range(2))
    one = first(x)
    assert torch.equal(one, again(x))
    assert not torch.equal(one, first(x))
    assert set(one.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert seeded_dropout(0.0, 7, x.device)(x) is x
