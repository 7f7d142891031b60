"""Attention over few keys on a GPU: one kernel for the forward pass, and one for the backward pass.

PyTorch's kernels divide queries and keys into tiles, keep sums for each, and add gradients of several tiles. A sentence
is one tile, over which all is computed from queries, keys and values at once (`short_kernels`). Scores and softmax are
in float32, the factors of products in the type of the inputs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtkit.device import runs_kernels

LONGEST = 64
"""Most queries and keys."""

WIDEST = 128
"""Most numbers of a key or value."""


def attends_short(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend_short` takes q (B, H, T, K), k (B, H, S, K), v (B, H, S, V), of 16 bits on a GPU.

    Not in inference mode, whose shapes change too often to compile for; without gradients it takes them, because a pass
    that is run again with gradients must be the same.
    """
    return (
        q.is_cuda
        and not torch.is_inference_mode_enabled()
        and q.dtype != torch.float32
        and max(q.shape[2], k.shape[2]) <= LONGEST
        and max(q.shape[3], v.shape[3]) <= WIDEST
        and q.shape[1] == k.shape[1] == v.shape[1]
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
        and runs_kernels(q, k, v)
    )


def attend_short(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, *, scale: float, causal: bool) -> Tensor:
    """softmax(q k^T scale) v (B, H, T, V) over keys of valid (B, S), up to the query's position if causal.

    A query that sees no key gets zero.
    """
    heads: Tensor = _Short.apply(q, k, v, valid, scale, causal)  # type: ignore[no-untyped-call]
    return heads


class _Short(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, scale: float, causal: bool) -> Tensor:
        valid = None if valid is None else valid.contiguous().view(torch.uint8)
        out = _by_position(v, q.shape[2])
        _run("attend", q, k, v, valid, (out,), scale, causal)
        ctx.save_for_backward(q, k, v, valid)
        ctx.how = scale, causal
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, valid = ctx.saved_tensors
        if upstream.stride(3) != 1:
            upstream = upstream.contiguous()
        gradients = [_by_position(x, x.shape[2]) for x in (q, k, v)]
        _run("attend_backward", q, k, v, valid, (upstream, *gradients), *ctx.how, upstream)
        return *(gradient.transpose(1, 2) for gradient in gradients), None, None, None


def _by_position(x: Tensor, length: int) -> Tensor:
    """A new tensor (B, length, H, K) like x (B, H, ..., K): the joined heads of a position lie side by side."""
    return x.new_empty(x.shape[0], length, x.shape[1], x.shape[3])


def _run(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    others: tuple[Tensor, ...],
    scale: float,
    causal: bool,
    *strided: Tensor,
) -> None:
    """Run a kernel in a program for each head of each segment."""
    from mtkit.attention.kernels.gpu import short_kernels

    batch, heads, queries, width = q.shape
    longest = max(queries, k.shape[2])
    side = 32 if longest <= 32 else 64 if longest <= 64 else 128
    strides = [stride for x in (q, k, v, *strided) for stride in x.stride()[:3]]
    getattr(short_kernels, name)[(batch * heads,)](
        *(q, k, v, q if valid is None else valid, *others),
        *(queries, k.shape[2], heads, scale, *strides),
        KEY=width,
        VALUE=v.shape[3],
        KEYS=_power(width),
        VALUES=_power(v.shape[3]),
        SIDE=side,
        CAUSAL=causal,
        MASKED=valid is not None,
        num_warps=8 if side == 128 else 4,
    )


def _power(width: int) -> int:
    """The least power of 2 that is no less and that tensor cores take."""
    return max(16, 1 << (width - 1).bit_length())
