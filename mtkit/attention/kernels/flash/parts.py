"""One softmax by the CPU's flash-attention kernel over keys in several parts, in O(T) memory.

The parts of a softmax are joined by their log-sum-exp. The kernel's backward pass computes weights as
exp(score - log-sum-exp) and also needs the outputs (Dao et al., "FlashAttention", 2022, arXiv 2205.14135, algorithm 4):
from the outputs over all parts, it computes each part's share of the gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtkit.attention.kernels.dot_product import upcast

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Part(Protocol):
    """Some keys of each query; no key is in two parts of a query."""

    def attended(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return new outputs (B, H, T, V) over these keys, and their log-sum-exp (B, H, T, 1), in float32 at least.

        The log-sum-exp of a query that sees none of these keys is the least number; its output is not read.
        """

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, d_heads: Tensor, heads: Tensor, log_sum: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this part's share in the gradients of q, k and v.

        d_heads, heads and log_sum belong to the softmax over all parts. The log-sum-exp of a query that sees no key is
        the greatest number.
        """


def can_fuse(q: Tensor, v: Tensor) -> bool:
    """Return whether the kernel supports these: it is the CPU's, and values are as wide as keys."""
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def attend_parts(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], *, scale: float) -> Tensor:
    """Return the heads' outputs (B, H, T, V) over the keys of all parts, zero if no key is seen.

    q (B, H, T, K), k (B, G, S, K), v (B, G, S, V); G divides H.
    """
    with torch.autocast("cpu", enabled=False):
        heads: Tensor = _Parts.apply(parts, scale, q, k, v)  # type: ignore[no-untyped-call]
    return heads


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Sequence[Part], scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.parts, ctx.scale = parts, scale
        heads, log_sum = parts[0].attended(q, k, v, scale)
        for part in parts[1:]:
            others, sums = part.attended(q, k, v, scale)
            heads.lerp_(others, (sums - log_sum).sigmoid_())
            log_sum = torch.logaddexp(log_sum, sums)
        nothing = log_sum <= torch.finfo(log_sum.dtype).min / 2
        if nothing.any():
            heads.masked_fill_(nothing, 0.0)
            log_sum.masked_fill_(nothing, torch.finfo(log_sum.dtype).max)
        heads = heads.type_as(v)
        ctx.save_for_backward(q, k, v, heads, log_sum)
        return heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_heads: Tensor) -> tuple[Any, ...]:
        q, k, v, heads, log_sum = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):  # a caller's own must not change the types in here
            total, *shares = (part.gradients(q, k, v, d_heads, heads, log_sum, ctx.scale) for part in ctx.parts)
        for share in shares:
            total = tuple(d.add_(more) for d, more in zip(total, share, strict=True))
        return None, None, *(d.type_as(x) for d, x in zip(total, (q, k, v), strict=True))


@dataclass(frozen=True)
class KernelRows:
    """Queries (N, n, c, K), keys (N, n, L, K) and values (N, n, L, K) in the kernel's four axes.

    visible broadcasts to (N, n, c, L).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor


@dataclass(frozen=True)
class Laid:
    """Keys in one layout, as several groups of rows.

    join_blocks makes (B, H, T, ...) of the groups' results (N, n, c, ...), split_blocks the groups' rows of
    (B, H, T, ...).
    """

    groups: Sequence[KernelRows]
    join_blocks: Callable[[list[Tensor]], Tensor]
    split_blocks: Callable[[Tensor], list[Tensor]]


class LaidPart:
    """A part that a function lays out, again for the backward pass, so that only one part's key gradients are held."""

    def __init__(self, lay: Callable[[Tensor, Tensor, Tensor], Laid]) -> None:
        self._lay = lay

    def attended(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        laid, results = self._lay(q, k, v), []
        for group in laid.groups:
            rows = [upcast(x) for x in (group.q, group.k, group.v)]
            some = group.visible.any(-1, keepdim=True)
            heads, log_sum = KERNEL(*rows, 0.0, False, attn_mask=added(group.visible, some, rows[0]), scale=scale)
            results.append((heads, log_sum.unsqueeze(-1).where(some, torch.finfo(heads.dtype).min)))
        heads, log_sum = (laid.join_blocks(list(blocks)) for blocks in zip(*results, strict=True))
        return heads, log_sum

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, d_heads: Tensor, heads: Tensor, log_sum: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            laid = self._lay(*leaves)
        d_out, out, sums = (laid.split_blocks(upcast(x)) for x in (d_heads, heads, log_sum))
        groups = [_gradients(*x, scale) for x in zip(laid.groups, d_out, out, sums, strict=True)]
        waiting = list(zip(*groups, strict=True))
        rows = list(zip(*((group.q, group.k, group.v) for group in laid.groups), strict=True))
        del laid, groups, d_out, out, sums
        # one at a time, so that each then leaves memory
        d_q, d_k, d_v = (torch.autograd.grad(rows.pop(0), leaf, waiting.pop(0))[0] for leaf in leaves)
        return d_q, d_k, d_v


def _gradients(rows: KernelRows, d_heads: Tensor, heads: Tensor, log_sum: Tensor, scale: float) -> list[Tensor]:
    """Return the gradients of a group's queries, keys and values."""
    laid = rows.q, rows.k, rows.v
    q, k, v = (upcast(x) for x in laid)
    some = rows.visible.any(-1, keepdim=True)
    shown = log_sum.where(some, torch.finfo(log_sum.dtype).max)  # exp would overflow for keys that are not seen
    known = (d_heads * some).contiguous(), q, k, v, heads.contiguous(), shown.squeeze(-1).contiguous()
    gradients = KERNEL_BACKWARD(*known, 0.0, False, attn_mask=added(rows.visible, some, q), scale=scale)
    return [d.type_as(x) for d, x in zip(gradients, laid, strict=True)]


def added(visible: Tensor, some: Tensor, like: Tensor) -> Tensor:
    """Return what the kernel adds to scores. A row that sees nothing sees all: its result is not read."""
    return torch.zeros((), dtype=like.dtype).where(visible | ~some, float("-inf"))


def position_rows(like: Tensor, heads: int, length: int) -> Tensor:
    """Return room for (B, heads, length, K), in float32 at least; the heads of a position lie side by side."""
    return like.new_empty(len(like), length, heads, like.shape[-1], dtype=upcast(like[:0]).dtype).transpose(1, 2)
