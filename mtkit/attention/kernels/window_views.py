"""Overlapping windows of positions as views, and the sums of their gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def window(x: Tensor, first: int, last: int, *, step: int, width: int, zeros_before: int) -> Tensor:
    """Windows `first` to `last`, (..., last - first, width, K), of x (..., T, K).

    Window i begins `step` i places into x after `zeros_before` zeros, and continues in zeros. Windows are views, which
    are not to be written to.
    """
    start = first * step - zeros_before
    end, length = start + (last - first - 1) * step + width, x.shape[-2]
    inside = x[..., max(start, 0) : min(end, length), :]
    if start < 0 or end > length:
        inside = F.pad(inside, (0, 0, max(-start, 0), max(end - length, 0)))
    if sum(size > 1 for size in x.shape[:-2]) > 1:  # to merge these axes would copy each window
        inside = inside.contiguous()
    return inside.unfold(-2, width, step).mT


def room(last: int, step: int, width: int) -> int:
    """The number of rows in a total for windows 0 to `last`."""
    return last * step + -(-width // step) * step  # `add_windows` adds whole pieces of `step` rows


def add_windows(total: Tensor, rows: Tensor, first: int, step: int) -> None:
    """Adds windows (..., n, width, K) from the first on to total (..., `room`, K), which counts the zeros before x.

    Piece by piece: autograd itself would add the gradient of overlapping views number by number.
    """
    count, width = rows.shape[-3:-1]
    for offset, piece in zip(range(0, width, step), rows.split(step, -2), strict=True):
        target = total.narrow(-2, first * step + offset, count * step).unflatten(-2, (count, step))
        target[..., : piece.shape[-2], :].add_(piece)


def windows(
    x: Tensor, spans: list[tuple[int, int]], *, step: int, width: int, zeros_before: int, zeros_after: int
) -> tuple[Tensor, ...]:
    """The windows (..., last - first, width, K) of each span (first, last), of x (..., T, K), for autograd.

    Spans follow one another from 0 on; the last window ends `zeros_after` zeros after x. Windows are read-only.
    """
    if width == step and not zeros_before:  # these do not overlap
        padded = F.pad(x, (0, 0, 0, zeros_after)) if zeros_after else x
        return padded.unflatten(-2, (-1, step)).split([last - first for first, last in spans], -3)
    views: tuple[Tensor, ...] = _Windows.apply(x, spans, step, width, zeros_before)  # type: ignore[no-untyped-call]
    return views


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, spans: list[tuple[int, int]], step: int, width: int, zeros_before: int
    ) -> tuple[Tensor, ...]:
        ctx.spans, ctx.step, ctx.width, ctx.zeros_before, ctx.shape = spans, step, width, zeros_before, x.shape
        return tuple(window(x, *span, step=step, width=width, zeros_before=zeros_before) for span in spans)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *leading, length, size = ctx.shape
        rows = max(room(ctx.spans[-1][1], ctx.step, ctx.width), ctx.zeros_before + length)
        total = gradients[0].new_zeros(*leading, rows, size)  # one, not one for each span
        for (first, _), gradient in zip(ctx.spans, gradients, strict=True):
            add_windows(total, gradient, first, ctx.step)
        return total.narrow(-2, ctx.zeros_before, length), None, None, None, None
