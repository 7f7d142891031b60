"""Products of queries with prefix sums, for one part of a sequence, given the sums before it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Factors(NamedTuple):
    """The factors of rows and sums: decays, and scales that keep exponentials in range."""

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

    y (N, C, Y), z (N, C, Z), x (N, R, Y), where R is C or a multiple of it: C rows of each of several queries, one
    query after the other. Products within the part are formed under the triangle.
    """
    rows, after = _PrefixProducts.apply(x, y, z, sums, *(factors or ()))  # type: ignore[no-untyped-call]
    return rows, after


def triangle_products(x: Tensor, y: Tensor, z: Tensor, pairs: Tensor | None = None) -> Tensor:
    """The rows of `prefix_products` without sums before or after; `pairs` as in `Factors`."""
    products = torch.bmm(x, y.mT)
    if pairs is not None:
        return torch.bmm(products * pairs, z)
    return torch.bmm(products.unflatten(1, (-1, products.shape[-1])).tril().flatten(1, 2), z)


class _PrefixProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, z: Tensor, sums: Tensor, *factors: Tensor) -> tuple[Tensor, Tensor]:
        pairs = _under_triangle(torch.bmm(x, y.mT), factors)
        ctx.save_for_backward(x, y, z, sums, pairs, *factors)
        rows = torch.bmm(x, sums)
        if not factors:
            return rows.baddbmm_(pairs, z), torch.baddbmm(sums, y.mT, z)
        _, read, kept, added = factors
        return rows.mul_(read).baddbmm_(pairs, z), (sums * kept).baddbmm_(y.mT, z * added)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
        x, y, z, sums, pairs, *factors = ctx.saved_tensors
        d_products, d_z = torch.bmm(d_rows, z.mT), torch.bmm(y, d_after)
        d_factors: list[Tensor | None] = [None] * len(factors)
        if any(ctx.needs_input_grad[4:]):
            d_factors = [
                d_products * torch.bmm(x, y.mT),
                (torch.bmm(x, sums) * d_rows).sum(-1, keepdim=True),
                (sums * d_after).sum((1, 2), keepdim=True),
                (d_z * z).sum(-1, keepdim=True),
            ]
        d_pairs = _under_triangle(d_products, factors)
        if not factors:
            d_read, written = d_rows, z
            d_sums = torch.baddbmm(d_after, x.mT, d_rows)
        else:
            d_read, written = d_rows * factors[1], z * factors[3]
            d_z.mul_(factors[3])
            d_sums = (d_after * factors[2]).baddbmm_(x.mT, d_read)
        d_x = torch.bmm(d_read, sums.mT).baddbmm_(d_pairs, y)
        d_y = torch.bmm(written, d_after.mT).baddbmm_(d_pairs.mT, x)
        return d_x, d_y, d_z.baddbmm_(pairs.mT, d_rows), d_sums, *d_factors


def _under_triangle(products: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Products (N, R, C) of rows with positions, zero where the position comes after the row's; in place."""
    if factors:
        return products.mul_(factors[0])
    products.unflatten(1, (-1, products.shape[-1])).tril_()
    return products
