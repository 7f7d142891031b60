"""A few keys for each query against the scores of all pairs."""

import torch

from mtkit.attention.kernels.dot_product import attend
from mtkit.attention.sparse.star import attend_few


def test_each_query_weighs_its_own_keys() -> None:
    q, k, v, k_all, v_all = (torch.randn(2, heads, n, 6) for heads, n in ((4, 5), (2, 5), (2, 5), (2, 1), (2, 1)))
    seen = torch.arange(5) > torch.tensor([[0], [3]])  # (2, 5)
    heads = attend_few(q, [(k, v, seen), (k_all, v_all, None)], scale=0.3)
    for i in range(5):
        keys, values = (torch.cat([own[:, :, i : i + 1], every], 2) for own, every in ((k, k_all), (v, v_all)))
        valid = torch.stack([seen[:, i], torch.ones(2, dtype=torch.bool)], dim=1)
        wanted, _ = attend(q[:, :, i : i + 1], keys, values, scale=0.3, valid=valid)
        torch.testing.assert_close(heads[:, :, i : i + 1], wanted)


def test_a_query_that_sees_nothing_gets_zero() -> None:
    q, k, v = (torch.randn(1, 2, 4, 6) for _ in range(3))
    heads = attend_few(q, [(k, v, torch.zeros(1, 4, dtype=torch.bool))], scale=0.3)
    assert heads.abs().max() == 0
