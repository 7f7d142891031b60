"""Blocks of keys that each query chooses, by compiled loops in float32 on the CPU."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels.cpu.threads import LARGEST, by_token, has_blas, in_ranges, loops_take

QUERIES = 64
"""Queries of a product."""


def loops_read(q: Tensor, k: Tensor, v: Tensor, size: int) -> bool:
    """Return whether the loops compute with these, and with blocks of `size` keys."""
    product = size * max(k.shape[-1], v.shape[-1]) * QUERIES
    return product <= LARGEST and q.numel() > 0 and loops_take(q, k, v) and has_blas()


class LoopedPart:
    """The keys of chosen blocks."""

    def __init__(self, chosen: Tensor, size: int, keys: int, valid: Tensor | None, causal: bool) -> None:
        """Store choices (B, C, T, n) of blocks of `size` of the `keys` keys; the number of all blocks means none.

        valid (B, keys). If causal, keys after a query in its own block are hidden.
        """
        self._size, self._causal, self._rest = size, causal, -keys % size
        self._chosen, self._hidden = chosen.contiguous(), torch.empty(0, size, dtype=torch.bool)
        if self._rest or valid is not None:
            seen = torch.ones(len(chosen), keys, dtype=torch.bool) if valid is None else valid
            self._hidden = ~F.pad(seen, (0, self._rest)).reshape(-1, size)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        heads, log_sum = (q.new_zeros(len(q), *q.shape[2:0:-1], width) for width in (v.shape[-1], 1))
        log_sum.fill_(torch.finfo(log_sum.dtype).min)
        self._run("write_reads", q, k, v, scale, heads, log_sum)
        return heads.transpose(1, 2), log_sum.transpose(1, 2)

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, d_heads: Tensor, heads: Tensor, log_sum: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        d_q, d_k, d_v = torch.zeros_like(by_token(q)), *(torch.zeros_like(self._in_blocks(x)) for x in (k, v))
        self._run("write_gradients", q, k, v, scale, *(by_token(x) for x in (heads, log_sum, d_heads)), d_q, d_k, d_v)
        d_k, d_v = (d.view(*x.shape[:2], -1, x.shape[-1])[:, :, : x.shape[2]] for d, x in ((d_k, k), (d_v, v)))
        return d_q.transpose(1, 2), d_k, d_v

    def _run(self, loop: str, q: Tensor, k: Tensor, v: Tensor, scale: float, *tensors: Tensor) -> None:
        from mtkit.attention.kernels.cpu.blas import chosen_loops

        terms = (by_token(q), self._in_blocks(k), self._in_blocks(v), self._chosen, self._hidden)
        arrays, more = ([x.numpy() for x in some] for some in (terms, tensors))
        in_ranges(
            partial(getattr(chosen_loops, loop), self._causal, *arrays, k.shape[1], scale, *more), len(k) * k.shape[1]
        )

    def _in_blocks(self, x: Tensor) -> Tensor:
        """Return the blocks (B * G * M, size, K) of keys (B, G, S, K)."""
        return F.pad(x.detach(), (0, 0, 0, self._rest)).reshape(-1, self._size, x.shape[-1]).contiguous()
