"""Products of queries with sums over all positions up to theirs, in O(T) time and memory."""

from typing import Any

import torch
from torch import Tensor


def prefix_products(x: Tensor, y: Tensor, z: Tensor, chunk: int) -> Tensor:
    """x_t sum_{j<=t} y_j^T z_j for all t, (..., T, Z), from x and y (..., T, Y) and z (..., T, Z).

    Inside a chunk the products of x and y are written out under the triangle; what lies before it comes from one
    running sum (..., Y, Z), which the backward pass builds up a second time rather than keep it for every chunk.
    """
    rows: Tensor = _PrefixProducts.apply(  # type: ignore[no-untyped-call]
        *(each.flatten(0, -3) for each in (x, y, z)), chunk
    )
    return rows.view(*x.shape[:-1], z.shape[-1])


class _PrefixProducts(torch.autograd.Function):
    """Of x and y (N, T, Y) and z (N, T, Z)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, z: Tensor, chunk: int) -> Tensor:
        ctx.save_for_backward(x, y, z)
        ctx.chunk = chunk
        result, sums = torch.empty_like(z), z.new_zeros(len(x), y.shape[-1], z.shape[-1])
        for out, x_own, y_own, z_own in zip(*(each.split(chunk, 1) for each in (result, x, y, z)), strict=True):
            torch.bmm((x_own @ y_own.mT).tril_(), z_own, out=out)
            _add_product(out, x_own, sums)
            _add_product(sums, y_own.mT, z_own)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        with torch.autocast(gradient.device.type, enabled=False):  # a caller's own must not change the types in here
            return _PrefixProducts._gradients(ctx, gradient)

    @staticmethod
    def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, y, z = ctx.saved_tensors
        d_x, d_y, d_z = (torch.empty_like(each) for each in (x, y, z))
        sums = z.new_zeros(len(x), y.shape[-1], z.shape[-1])
        chunks = list(zip(*(each.split(ctx.chunk, 1) for each in (gradient, x, y, z, d_x, d_y, d_z)), strict=True))
        inside = []
        for d, _, y, z, d_x_out, _, _ in chunks:
            inside.append((d @ z.mT).tril_())
            torch.bmm(inside[-1], y, out=d_x_out)
            _add_product(d_x_out, d, sums.mT)
            _add_product(sums, y.mT, z)
        later = sums.zero_()
        for d, x, y, z, _, d_y_out, d_z_out in reversed(chunks):
            torch.bmm(inside.pop().mT, x, out=d_y_out)
            _add_product(d_y_out, z, later.mT)
            torch.bmm((x @ y.mT).tril_().mT, d, out=d_z_out)
            _add_product(d_z_out, y, later)
            _add_product(later, x.mT, d)
        return d_x, d_y, d_z, None


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    torch.baddbmm(total, x, y, out=total)
