"""Products of queries with sums over all positions up to theirs: one part of a sequence, from the sums before it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Factors(NamedTuple):
    """What keeps exponentials in range: each row and each sum is relative to a number of its own. No gradient."""

    pairs: Tensor
    """(N, R, C) of what row t reads of position j; zero where j comes after t."""
    read: Tensor
    """(N, R, 1) of what row t reads of the sums before."""
    kept: Tensor
    """(N, 1, 1) of the sums before in the sums after."""
    added: Tensor
    """(N, C, 1) of position j in the sums after."""


def prefix_products(
    x: Tensor, y: Tensor, z: Tensor, sums: Tensor, factors: Factors | None = None
) -> tuple[Tensor, Tensor]:
    """x_t (sums + sum_{j<=t} y_j^T z_j) for all t, (N, R, Z), and sums + sum_j y_j^T z_j, (N, Y, Z), after the part.

    y (N, C, Y), z (N, C, Z), x (N, R, Y) where R is C, or a multiple of it: then the rows of several queries follow
    one another, C of each. Products inside the part are written out under the triangle.
    """
    rows, after = _PrefixProducts.apply(x, y, z, sums, factors)  # type: ignore[no-untyped-call]
    return rows, after


class _PrefixProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, z: Tensor, sums: Tensor, factors: Factors | None
    ) -> tuple[Tensor, Tensor]:
        pairs = _under_triangle(torch.bmm(x, y.mT), factors)
        ctx.save_for_backward(x, y, z, sums, pairs)
        ctx.factors = factors
        rows = torch.bmm(x, sums)
        if factors is None:
            return rows.baddbmm_(pairs, z), torch.baddbmm(sums, y.mT, z)
        after = (sums * factors.kept).baddbmm_(y.mT, z * factors.added)
        return rows.mul_(factors.read).baddbmm_(pairs, z), after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
        x, y, z, sums, pairs = ctx.saved_tensors
        factors: Factors | None = ctx.factors
        d_pairs = _under_triangle(torch.bmm(d_rows, z.mT), factors)
        d_z = torch.bmm(y, d_after)
        if factors is None:
            d_read, written = d_rows, z
            d_sums = torch.baddbmm(d_after, x.mT, d_rows)
        else:
            d_read, written = d_rows * factors.read, z * factors.added
            d_z.mul_(factors.added)
            d_sums = (d_after * factors.kept).baddbmm_(x.mT, d_read)
        d_x = torch.bmm(d_read, sums.mT).baddbmm_(d_pairs, y)
        d_y = torch.bmm(written, d_after.mT).baddbmm_(d_pairs.mT, x)
        return d_x, d_y, d_z.baddbmm_(pairs.mT, d_rows), d_sums, None


def _under_triangle(products: Tensor, factors: Factors | None) -> Tensor:
    """Products (N, R, C) of rows with positions, zero where the position comes after the row's."""
    if factors is None:
        products.unflatten(1, (-1, products.shape[-1])).tril_()
        return products
    return products.mul_(factors.pairs)
