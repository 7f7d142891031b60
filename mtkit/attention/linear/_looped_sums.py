"""Decayed sums, also under the delta rule, by compiled loops: float32 on the CPU, with one decay for each head."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtkit.attention.kernels.cpu.threads import LARGEST, by_token, has_blas, in_ranges, loops_take


def loops_sum(chunk: int, k: Tensor, v: Tensor, decay: Tensor, *others: Tensor) -> bool:
    """Return whether the loops compute with these terms (B, H, T, ...)."""
    small = min(chunk, k.shape[2]) * k.shape[3] * v.shape[3] <= LARGEST and k.numel() > 0 and v.numel() > 0
    return small and decay.shape[3] == 1 and loops_take(k, v, decay, *others) and has_blas()


class LoopedSums(torch.autograd.Function):
    """The outputs (B, H, T, V) of `corrected_reads`, or of `decayed_reads` in one direction."""

    @staticmethod
    def forward(ctx: Any, from_end: bool, chunk: int, *terms: Tensor) -> Tensor:
        from mtkit.attention.kernels.cpu.blas.decay_loops import write_reads

        """Return the outputs of q, k, v, decay and, if values are corrected, beta."""
        q, k, v, decay, *others = (by_token(x) for x in terms)
        beta = others[0] if others else decay[..., :0].contiguous()
        batch, length, heads, width = k.shape
        chunk = min(chunk, length)
        ctx.how = from_end, chunk
        z, outputs = torch.empty_like(v) if others else v, torch.empty_like(v)
        states = k.new_empty(batch * heads, -(-length // chunk), width, v.shape[3])
        _run(write_reads, ctx.how, [q, k, v, decay, beta, z, states, outputs], batch * heads)
        ctx.save_for_backward(q, k, decay, beta, z, states)
        return outputs.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        from mtkit.attention.kernels.cpu.blas.decay_loops import write_gradients

        q, k, decay, beta, z, states = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (q, k, z, decay, beta)]
        _run(write_gradients, ctx.how, [q, k, decay, beta, z, states, by_token(d_outputs), *gradients], len(states))
        several = 5 if beta.numel() else 4
        return None, None, *(x.transpose(1, 2) for x in gradients[:several])


def _run(loop: Callable[..., None], how: tuple[bool, int], tensors: list[Tensor], streams: int) -> None:
    in_ranges(partial(loop, *how, *(x.numpy() for x in tensors)), streams)
