"""Random numbers by what they are for."""

import torch

from mtkit.decoding.search.sampling import uniform


def test_numbers_are_uniform_and_independent() -> None:
    drawn = uniform(1, torch.arange(2000), 20, 3)
    assert drawn.shape == (2000, 20)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    shares = torch.histc(drawn.flatten(), 20, 0, 1) / drawn.numel()
    assert (shares - 0.05).abs().max() < 0.005
    correlation = torch.corrcoef(drawn.T) - torch.eye(20)
    assert correlation.abs().max() < 0.1
    assert drawn.unique().numel() == drawn.numel()


def test_each_argument_matters_and_the_batch_does_not() -> None:
    keys = torch.tensor([5, 9, 2**40])
    drawn = uniform(1, keys, 4, 0)
    assert torch.equal(uniform(1, keys[1:2], 2, 0), drawn[1:2, :2])
    for other in (uniform(2, keys, 4, 0), uniform(1, keys + 1, 4, 0), uniform(1, keys, 4, 1)):
        assert not (other == drawn).any()
    assert uniform(-(2**70), keys, 4, 0).shape == (3, 4)
