"""Softmax attention of blocks of queries over windows of keys beside them, in O(T) memory.

Some blocks are worked on at a time, so that their scores stay in the cache; the backward pass computes them anew, as in
Dao et al., "FlashAttention", 2022, arXiv 2205.14135, algorithm 4.
"""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor

from mtkit.attention.dot_product import widened

Part = tuple[slice, slice]
"""Some streams, and some of their blocks."""
SCORES_AT_ONCE = {"cpu": 1 << 18}
"""Scores worked on at a time, by kind of device; 2^26 on others."""
FAR = -1e30
"""Added to scores that are hidden: on CPUs faster than putting something else in their place."""
NOTHING_SEEN = FAR / 10
"""A log-sum-exp below this is that of no key."""


def attend_windows(
    q: Tensor, k: Tensor, v: Tensor, hidden: Callable[[Part], Tensor], *, scale: float, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The outputs (N, blocks, c, V), zero where no key is seen, and the log-sum-exp (N, blocks, c, 1), in float32.

    q (N, blocks, c, K), k (N, S, K), v (N, S, V): block b sees the L = S - (blocks - 1) c keys from b c on, L a
    multiple of c. `hidden` gives 0 for keys that the queries of a part see, 1 or more for others; it broadcasts to
    (N, blocks, c, L).
    """
    seed = int(torch.randint(1 << 31, ())) if dropout else 0
    with torch.autocast(q.device.type, enabled=False):
        heads, log_sum = _Windows.apply(q, k, v, hidden, scale, dropout, seed)  # type: ignore[no-untyped-call]
    return heads, log_sum


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden: Callable[[Part], Tensor],
        scale: float,
        dropout: float,
        seed: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.hidden, ctx.scale, ctx.dropout, ctx.seed = hidden, scale, dropout, seed
        near_k, near_v = _beside(k, q), _beside(v, q)
        heads = v.new_empty(*q.shape[:3], v.shape[-1])
        log_sum = widened(q).new_empty(*q.shape[:3], 1)
        noise = _noise(dropout, seed, q.device)
        for part in _parts(q, near_k.shape[2]):
            scores = _scores(q[part], near_k[part], scale, hidden(part))
            weights = scores.softmax(-1)
            top, share = scores.amax(-1, keepdim=True), weights.amax(-1, keepdim=True)
            seen = top > NOTHING_SEEN
            heads[part] = (noise(weights).type_as(v) @ near_v[part]) * seen
            log_sum[part] = torch.where(seen, top - share.log(), FAR)
        ctx.save_for_backward(q, k, v, heads, log_sum)
        return heads, log_sum

    @staticmethod
    def backward(ctx: Any, d_heads: Tensor, d_log_sum: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_heads.device.type, enabled=False):  # a caller's own must not change the types in here
            return _Windows._gradients(ctx, d_heads, d_log_sum)

    @staticmethod
    def _gradients(ctx: Any, d_heads: Tensor, d_log_sum: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, heads, log_sum = ctx.saved_tensors
        near_k, near_v, block = _beside(k, q), _beside(v, q), q.shape[2]
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(widened(k)), torch.zeros_like(widened(v))
        noise, again = (_noise(ctx.dropout, ctx.seed, q.device) for _ in range(2))
        for part in _parts(q, near_k.shape[2]):
            weights = _scores(q[part], near_k[part], ctx.scale, ctx.hidden(part)).softmax(-1)
            seen = log_sum[part] > NOTHING_SEEN
            d_out = d_heads[part] * seen
            mean = (widened(d_out) * heads[part]).sum(-1, keepdim=True) - d_log_sum[part] * seen
            _add(d_v, noise(weights).type_as(v).transpose(-1, -2) @ d_out, block, part)
            d_weights = again(widened(d_out @ near_v[part].transpose(-1, -2)))
            d_scores = d_weights.sub_(mean).mul_(weights).type_as(q)
            d_q[part] = (d_scores @ near_k[part]) * ctx.scale
            _add(d_k, d_scores.transpose(-1, -2) @ (q[part] * ctx.scale), block, part)
        return d_q, d_k.type_as(k), d_v.type_as(v), None, None, None, None


def _parts(q: Tensor, width: int) -> Iterator[Part]:
    """All streams and blocks, few enough at a time."""
    streams, blocks, block = q.shape[:3]
    most = max(SCORES_AT_ONCE.get(q.device.type, 1 << 26) // (block * width), 1)
    several = max(most // blocks, 1)
    for stream in range(0, streams, several):
        for first in range(0, blocks, most):
            yield slice(stream, stream + several), slice(first, first + most)


def _beside(x: Tensor, q: Tensor) -> Tensor:
    """The windows (N, blocks, L, K) of x (N, S, K), overlapping views."""
    blocks, block = q.shape[1:3]
    return x.unfold(1, x.shape[1] - (blocks - 1) * block, block).transpose(-1, -2)


def _scores(q: Tensor, k: Tensor, scale: float, hidden: Tensor) -> Tensor:
    return widened((q * scale) @ k.transpose(-1, -2)).add_(hidden, alpha=FAR)


def _add(total: Tensor, windows: Tensor, block: int, part: Part) -> None:
    """Adds windows (n, b, L, K) of a part to total (N, S, K), piece by piece, for they overlap."""
    streams, blocks = part
    for start, piece in zip(count(blocks.start * block, block), windows.split(block, dim=2), strict=False):
        total[streams, start : start + windows.shape[1] * block].unflatten(1, (-1, block)).add_(piece)


def _noise(dropout: float, seed: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Dropout that is the same again for the same seed and calls."""
    if not dropout:
        return lambda x: x
    generator = torch.Generator(device).manual_seed(seed)
    return lambda x: x * torch.empty_like(x).bernoulli_(1 - dropout, generator=generator).div_(1 - dropout)
