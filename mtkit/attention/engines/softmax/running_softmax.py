"""The running softmax: what a query that does not depend on position reads from every prefix, in linear time.

A softmax over a prefix is kept as its mean and the log of its sum; two of them over disjoint keys join exactly.
"""

import torch
from torch import Tensor

from mtkit.attention.engines.softmax.dot_product import safe_softmax, widened
from mtkit.attention.engines.softmax.joining import join

CHUNK = 64


def running_softmax(scores: Tensor, values: Tensor) -> Tensor:
    """Means (..., T, V) of values (..., T, V) under the softmax of scores (..., T) over each prefix, in float32."""
    scores, values = widened(scores), widened(values)
    means: list[Tensor] = []
    log_sum = scores.new_empty(0)
    for s, v in zip(scores.split(CHUNK, -1), values.split(CHUNK, -2), strict=True):
        earlier = torch.ones(s.shape[-1], s.shape[-1], dtype=torch.bool, device=s.device).tril()
        own_mean = safe_softmax(s.unsqueeze(-2).expand(*s.shape[:-1], *earlier.shape), earlier) @ v
        own_sum = s.logcumsumexp(-1)
        if means:
            own_sum, own_mean = join(log_sum[..., -1:], means[-1][..., -1:, :], own_sum, own_mean)
        log_sum = own_sum
        means.append(own_mean)
    return torch.cat(means, dim=-2)
