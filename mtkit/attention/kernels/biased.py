"""Softmax attention of blocks of queries with a learned bias on scores, whose memory is that of the rows and the bias.

PyTorch's fused kernel for the CPU has no gradient for what is added to scores: without this, all scores would be kept.
A few blocks are computed at a time, so that their scores stay in the cache of the processor. The backward pass computes
the scores again, as in `blocks/windowed_rows`. Scores are in units of log 2, because powers of two are the fastest to
compute, most of all where they are next to nothing.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.reproducible import seeded_dropout
from mtkit.attention.kernels.windowed_rows import scores_at_once


def attend_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
    """softmax(q k^T scale + bias) v, (N, n, c, V); each query sees at least one key.

    q (N, n, c, K), k (N, n, L, K) and v (N, n, L, V) may be views that overlap; bias broadcasts to (N, n, c, L), and is
    minus infinity where a key is hidden.
    """
    seed = int(torch.randint(1 << 31, ())) if dropout else 0
    with torch.autocast(q.device.type, enabled=False):
        heads: Tensor = _Biased.apply(q, k, v, bias, scale, dropout, seed)  # type: ignore[no-untyped-call]
    return heads


class _Part(NamedTuple):
    """Blocks of some streams as one axis: queries (b, c, K) in units of scores, keys, values and weights (b, c, L)."""

    at: tuple[slice, slice]
    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, dropout: float, seed: int
    ) -> Tensor:
        ctx.scale, ctx.dropout, ctx.seed = scale, dropout, seed
        bias = bias / math.log(2)
        heads = v.new_empty(*q.shape[:3], v.shape[-1])
        noise = seeded_dropout(dropout, seed, q.device)
        for part in _parts(q, k, v, bias, scale):
            _put(heads, part, noise(part.weights).type_as(v) @ part.v)
        ctx.save_for_backward(q, k, v, bias)
        return heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_heads.device.type, enabled=False):  # a caller's own must not change the types in here
            return _Biased._gradients(ctx, d_heads)

    @staticmethod
    def _gradients(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias = ctx.saved_tensors
        d_q, d_k, d_v = (x.new_empty(x.shape) for x in (q, k, v))
        d_bias = torch.zeros_like(bias)
        noise, again = (seeded_dropout(ctx.dropout, ctx.seed, q.device) for _ in range(2))
        for part in _parts(q, k, v, bias, ctx.scale):
            d_out = d_heads[part.at].flatten(0, 1)
            _put(d_v, part, noise(part.weights).type_as(v).transpose(1, 2) @ d_out)
            d_scores = again(upcast(d_out @ part.v.transpose(1, 2))).mul_(part.weights)
            d_scores.addcmul_(part.weights, d_scores.sum(-1, keepdim=True), value=-1)
            own = _of(d_bias, part.at)
            own += d_scores.unflatten(0, d_heads[part.at].shape[:2]).sum_to_size(own.shape)
            d_scores = d_scores.type_as(q)
            _put(d_q, part, (d_scores @ part.k) * ctx.scale)
            _put(d_k, part, d_scores.transpose(1, 2) @ (part.q * math.log(2)))
        return d_q, d_k, d_v, d_bias, None, None, None


def _parts(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Iterator[_Part]:
    """All streams and blocks, in parts of limited size."""
    streams, blocks, size = q.shape[:3]
    most = max(scores_at_once(q.device) // (size * k.shape[2]), 1)
    several = max(most // blocks, 1)
    for first in range(0, streams, several):
        for block in range(0, blocks, most):
            at = slice(first, min(first + several, streams)), slice(block, min(block + most, blocks))
            near_q, near_k, near_v = q[at] * (scale / math.log(2)), k[at], v[at]
            scores = upcast(near_q @ near_k.transpose(-1, -2)).add_(_of(bias, at))
            weights = scores.sub_(scores.amax(-1, keepdim=True)).exp2_()
            weights.div_(weights.sum(-1, keepdim=True))
            yield _Part(at, *(x.flatten(0, 1) for x in (near_q, near_k, near_v, weights)))


def _of(bias: Tensor, at: tuple[slice, slice]) -> Tensor:
    """The bias of a part, which broadcasts."""
    streams, blocks = (some if size > 1 else slice(None) for some, size in zip(at, bias.shape, strict=False))
    return bias[streams, blocks]


def _put(total: Tensor, part: _Part, rows: Tensor) -> None:
    """Writes rows (b, n, ...) of a part into total (N, n, ...)."""
    own = total[part.at]
    own.copy_(rows.view(own.shape))
