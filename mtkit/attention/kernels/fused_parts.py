"""One softmax over keys in several parts by the CPU's fused kernel, whose scores never lie in memory.

Parts are joined by their log-sum-exp. The kernel's backward pass computes weights as exp(score - log-sum-exp) and needs
the outputs besides (Dao et al., "FlashAttention", 2022, arXiv 2205.14135, algorithm 4): given those of all parts
together, it gives the gradients of each part within the whole. Keys that lie beside several blocks of queries have as
many gradients: parts are laid out anew in the backward pass, so that only those of one part are held at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtkit.attention.kernels.dot_product import upcast

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
class FusedPart:
    """Keys in one layout, as several groups of rows.

    joined makes (B, H, T, ...) of the groups' results (N, n, c, ...), laid the groups' rows of (B, H, T, ...).
    """

    groups: Sequence[KernelRows]
    joined: Callable[[list[Tensor]], Tensor]
    laid: Callable[[Tensor], list[Tensor]]


Lay = Callable[[Tensor, Tensor, Tensor], FusedPart]
"""Lays out a part of queries, keys and values."""


def can_fuse(q: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes these: it is the CPU's, and values are as wide as keys."""
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def attend_fused(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Lay], *, scale: float) -> Tensor:
    """The heads' outputs (B, H, T, V) over the keys of all parts, zero where no key is seen.

    q (B, H, T, K), k (B, G, T, K), v (B, G, T, V), of which each of `parts` makes a part; they are called again for the
    backward pass. No key is in two parts of a query.
    """
    with torch.autocast("cpu", enabled=False):
        heads: Tensor = _Fused.apply(parts, scale, q, k, v)  # type: ignore[no-untyped-call]
    return heads


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lays: Sequence[Lay], scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.lays, ctx.scale = lays, scale
        parts = [_attended(lay(q, k, v), scale) for lay in lays]
        log_sums = torch.stack([log_sum for _, log_sum in parts])
        shares, log_sum = log_sums.softmax(0), log_sums.logsumexp(0)
        heads = parts[0][0].mul_(shares[0])
        for (others, _), share in zip(parts[1:], shares[1:], strict=True):
            heads.addcmul_(others, share)
        nothing = log_sum <= torch.finfo(log_sum.dtype).min / 2
        heads.masked_fill_(nothing, 0.0)
        ctx.save_for_backward(q, k, v, heads, log_sum.masked_fill(nothing, torch.finfo(log_sum.dtype).max))
        return heads.to(v.dtype, copy=True) if heads.dtype != v.dtype else heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_heads: Tensor) -> tuple[Any, ...]:
        *given, heads, log_sum = ctx.saved_tensors
        total: tuple[Tensor, ...] = ()
        with torch.autocast("cpu", enabled=False):
            for lay in ctx.lays:
                own = _gradients(lay, given, (d_heads.type_as(heads), heads, log_sum), ctx.scale)
                total = tuple(one + other for one, other in zip(total, own, strict=True)) if total else own
        return None, None, *total


def _attended(part: FusedPart, scale: float) -> tuple[Tensor, Tensor]:
    """The outputs (B, H, T, V) of one part, and the log-sum-exp (B, H, T, 1)."""
    results = []
    for each in part.groups:
        q, k, v = (upcast(x) for x in (each.q, each.k, each.v))
        some = each.visible.any(-1, keepdim=True)
        heads, log_sum = KERNEL(q, k, v, 0.0, False, attn_mask=added(each.visible, some, q), scale=scale)
        results.append((heads, log_sum.unsqueeze(-1).where(some, torch.finfo(heads.dtype).min)))
    heads, log_sum = (part.joined(list(each)) for each in zip(*results, strict=True))
    return heads, log_sum


def _gradients(lay: Lay, given: Sequence[Tensor], whole: Sequence[Tensor], scale: float) -> tuple[Tensor, ...]:
    """What one part adds to the gradients of the given queries, keys and values.

    whole: of all parts together, the gradient of the outputs and the outputs, (B, H, T, V), and the log-sum-exp,
    (B, H, T, 1).
    """
    leaves = [x.detach().requires_grad_() for x in given]
    with torch.enable_grad():
        part = lay(*leaves)
    d_whole, heads, log_sum = (part.laid(x) for x in whole)
    groups = [_gradients_of_group(*each, scale) for each in zip(part.groups, d_whole, heads, log_sum, strict=True)]
    waiting, found = list(zip(*groups, strict=True)), list[Tensor]()
    laid = zip(*((each.q, each.k, each.v) for each in part.groups), strict=True)
    del groups, whole, d_whole, heads, log_sum
    for leaf, rows in zip(leaves, laid, strict=True):
        found += torch.autograd.grad(rows, leaf, waiting.pop(0))  # one at a time, so that each then leaves memory
    return tuple(found)


def _gradients_of_group(
    rows: KernelRows, d_heads: Tensor, heads: Tensor, log_sum: Tensor, scale: float
) -> list[Tensor]:
    """The gradients of a group's queries, keys and values."""
    laid = rows.q, rows.k, rows.v
    q, k, v = (upcast(x) for x in laid)
    some = rows.visible.any(-1, keepdim=True)
    shown = log_sum.where(some, torch.finfo(log_sum.dtype).max)  # exp would overflow for keys that are not seen
    whole = (d_heads * some).contiguous(), q, k, v, heads.contiguous(), shown.squeeze(-1).contiguous()
    found = KERNEL_BACKWARD(*whole, 0.0, False, attn_mask=added(rows.visible, some, q), scale=scale)
    return [d.type_as(x) for d, x in zip(found, laid, strict=True)]


def added(visible: Tensor, some: Tensor, like: Tensor) -> Tensor:
    """What the kernel adds to scores. A row that sees nothing sees all: its result is not read."""
    return torch.zeros((), dtype=like.dtype).where(visible | ~some, float("-inf"))
