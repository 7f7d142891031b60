"""Attention in rows of sentences is attention over the whole batch under a mask, with its gradients."""

import pytest
import torch
from torch import Tensor

from mtkit.attention.kernels.dot_product import attend
from mtkit.attention.kernels.sentence_rows import attend_within


def numbers(batch: int, length: int, share: float) -> Tensor:
    """Sentence numbers (B, T); each token begins a sentence with this probability, so that a text may lack number 0."""
    return (torch.rand(batch, length) < share).long().cumsum(1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.7, 1.0])
def test_rows_are_a_mask(causal: bool, share: float) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        batch, length, source = (int(torch.randint(1, most, ())) for most in (4, 40, 40))
        source = length if causal else source
        key = numbers(batch, source, share)
        own = key if causal else numbers(batch, length, share / 2)
        key_valid = torch.arange(source) < torch.randint(0, source + 1, (batch, 1))
        query_valid = key_valid if causal else torch.arange(length) < torch.randint(0, length + 1, (batch, 1))
        q = torch.randn(batch, 4, length, 8, dtype=torch.double, requires_grad=True)
        k, v = (
            torch.randn(batch, heads, source, width, dtype=torch.double, requires_grad=True)
            for heads, width in ((2, 8), (4, 6))
        )
        outputs = attend_within(q, k, v, own, key, query_valid, key_valid, scale=0.3, causal=causal)
        seen = (own.unsqueeze(2) == key.unsqueeze(1)) & key_valid.unsqueeze(1)
        expected = attend(q, k, v, scale=0.3, causal=causal, valid=seen)[0] * query_valid[:, None, :, None]
        torch.testing.assert_close(outputs, expected)
        upstream = torch.randn_like(outputs)
        found, wanted = (torch.autograd.grad(each, (q, k, v), upstream) for each in (outputs, expected))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("real", [True, False])
def test_rows_take_no_memory_for_large_numbers(real: bool) -> None:
    """A table of all numbers would be too large, both of real sentences and of padding, whose numbers are arbitrary."""
    own, key, x = numbers(3, 9, 0.3), numbers(3, 7, 0.3), torch.randn(3, 2, 9, 8)
    valid = torch.arange(9) < torch.tensor([[9], [0], [5]])
    how = {"query_valid": valid, "key_valid": valid[:, :7], "scale": 0.3, "causal": False}
    expected = attend_within(x, x[:, :, :7], x[:, :, :7], own, key, **how)
    larger = (each + 2**40 if real else each.where(mask, 2**62) for each, mask in ((own, valid), (key, valid[:, :7])))
    torch.testing.assert_close(attend_within(x, x[:, :, :7], x[:, :, :7], *larger, **how), expected)
