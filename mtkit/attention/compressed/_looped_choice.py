"""Attention to compressed blocks, and the importance of token blocks in them, by compiled loops on the CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtkit.attention.kernels.cpu.threads import by_token, has_blas, in_ranges, loops_take

WIDEST = 64
"""Width of keys and values up to which BLAS starts no threads of its own."""
NUMBERS_AT_ONCE = 1 << 21
"""Importances of blocks that are held at a time."""
KEYS_TOGETHER = 64
"""Keys of a product."""


class How(NamedTuple):
    """Arguments of the loops other than tensors."""

    spans: tuple[int, int, int, int]
    """Size and stride of compressed blocks, the stride 0 if queries see all; strides per block of tokens, and per
    compressed block."""
    scale: float
    blocks: int
    seen: Tensor
    """(N,): the number of keys in each stream."""
    select: Callable[[int, Tensor], None]
    """Called with the first of some queries, and the importance (N, queries, blocks) of blocks for these."""


def loops_choose(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the loops compute with these."""
    fits = 0 < q.shape[-1] <= WIDEST and 0 < v.shape[-1] <= WIDEST
    return fits and q.numel() > 0 and loops_take(q, k, v) and has_blas()


def looped_choice(how: How, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the outputs (B, H, T, V) of q (B, H, T, K) over k (N, P, K) and v (N, P, V), with N a multiple of B."""
    outputs: Tensor = _LoopedSoftmax.apply(how, q, k, v)  # type: ignore[no-untyped-call]
    return outputs


class _LoopedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: How, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from mtkit.attention.kernels.cpu.blas.compressed_loops import write_reads

        ctx.how, ctx.keys, rest = how, k.shape[1], -k.shape[1] % KEYS_TOGETHER
        q, k, v = by_token(q), *(F.pad(x.detach(), (0, 0, 0, rest)).contiguous() for x in (k, v))
        batch, length, heads, _ = q.shape
        out, log_sum = (q.new_empty(batch, length, heads, width) for width in (v.shape[2], 1))
        several = max(NUMBERS_AT_ONCE // (len(k) * how.blocks) // KEYS_TOGETHER, 1) * KEYS_TOGETHER
        for begin in range(0, length, several):
            end = min(begin + several, length)
            importance = q.new_empty(len(k), end - begin, how.blocks)
            _run(write_reads, [q, k, v, how.seen], how, begin, end, tensors=[out, log_sum, importance])
            how.select(begin, importance)
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        from mtkit.attention.kernels.cpu.blas.compressed_loops import write_gradients

        q, k, v, out, log_sum = ctx.saved_tensors
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        rest = [out, log_sum, by_token(d_outputs), d_q, d_k, d_v]
        _run(write_gradients, [q, k, v, ctx.how.seen], ctx.how, tensors=rest)
        return None, d_q.transpose(1, 2), d_k[:, : ctx.keys], d_v[:, : ctx.keys]


def _run(loop: Callable[..., None], terms: list[Tensor], how: How, *places: int, tensors: list[Tensor]) -> None:
    given, rest = ([x.numpy() for x in some] for some in (terms, tensors))
    in_ranges(partial(loop, *given, how.spans, how.scale, *places, *rest), len(how.seen))
