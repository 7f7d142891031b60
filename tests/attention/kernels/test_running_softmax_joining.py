"""Softmax in parts against one softmax over all keys."""

import torch
from torch.nn import functional as F

from mtkit.attention.kernels.running_softmax import attend_part, join, join_parts


def test_parts_join_in_one_softmax() -> None:
    shapes = (2, 4, 50, 6), (2, 2, 50, 6), (2, 2, 50, 5), (2, 2, 7, 6), (2, 2, 7, 5)
    q, k, v, far_keys, far_values = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    seen, there = torch.rand(2, 1, 50, 50) < 0.5, torch.rand(2, 1, 50, 7) < 0.5
    bias = torch.randn(4, 50, 7, dtype=torch.float64)
    near = attend_part(q, k, v, scale=0.3, visible=seen)
    far = attend_part(q, far_keys, far_values, scale=0.3, visible=there, bias=bias)
    heads, log_sum = join_parts([near, far])
    k, v = (torch.cat(pair, dim=2).repeat_interleave(2, 1) for pair in ((k, far_keys), (v, far_values)))
    scores = 0.3 * q @ k.transpose(-1, -2) + F.pad(bias, (50, 0))
    scores = scores.masked_fill(~torch.cat([seen, there], dim=-1), float("-inf"))
    torch.testing.assert_close(heads, scores.softmax(-1) @ v)
    torch.testing.assert_close(log_sum, scores.logsumexp(-1, keepdim=True))


def test_joining_nothing_changes_nothing() -> None:
    log_sum, mean = torch.randn(3), torch.randn(3, 4)
    joined = join(torch.full((3,), float("-inf")), torch.zeros(3, 4), log_sum, mean)
    torch.testing.assert_close(joined, (log_sum, mean))
