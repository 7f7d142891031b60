"""Random features of queries or keys in one pass: a block of rows stays in the cache from its products to its features.

The directions are the same for all heads, or each head has its own.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mtkit.attention.kernels.cpu.decoding_loops import LEAST, ordered
from mtkit.attention.kernels.cpu.function_loops import write_wave_row
from mtkit.attention.kernels.cpu.machine_code import Floats, bits_of, compiled, exponential, of_bits, part
from mtkit.attention.kernels.cpu.product_tiles import FLOATS, each_laid_out, write_products
from mtkit.attention.kernels.cpu.threads import by_token, in_ranges

ROWS = 48
"""Rows of a block."""

SHORTEST = np.float32(1e-6)
"""Least length by which a row is divided."""


@part
def write_exponential_row(exponents: Floats, factor: np.float32, out: Floats) -> np.float32:
    """Write the exponentials (M,) relative to the largest exponent, times the factor; returns that exponent.

    Those below 2^-126 become that; NaN stays.
    """
    most = LEAST
    for j in range(len(exponents)):
        most = max(most, ordered(bits_of(exponents[j])))
    largest = of_bits(ordered(most))
    for j in range(len(exponents)):
        x = exponents[j] - largest
        out[j] = factor * exponential(x) if x <= 0 else x
    return largest


@compiled(
    "float32[:, :, ::1], float32[:, :, :, :, ::1], boolean, float32, float32[:, :, ::1], float32[:, ::1], int64, int64"
)
def write_features(
    rows: Floats,
    weights: NDArray[np.float32],
    waves: bool,
    factor: np.float32,
    out: Floats,
    scales: Floats,
    begin: int,
    end: int,
) -> None:
    """Write features of rows `begin` to `end` - 1 of (R, H, K) by D directions, weights as `each_laid_out`.

    There are weights for each of G groups of neighbouring heads.

    With waves, features (R, H, 2 D) are sines, then cosines, of the products with rows of length 1. Otherwise they are
    exponentials (R, H, D) of the products, relative to the largest; scales (R, H) are the largest, less |row|^2 / 2.
    Both are times the factor.
    """
    heads, directions = rows.shape[1], out.shape[2] // 2 if waves else out.shape[2]
    products, nothing = np.empty((ROWS, directions), np.float32), np.zeros(directions, np.float32)
    for first in range(begin, end, ROWS):
        count = min(ROWS, end - first)
        for h in range(heads):
            of_head = weights[h * len(weights) // heads]
            write_products(rows[first : first + count, h], of_head, nothing, products[:count])
            for r in range(count):
                row, of_row, features = rows[first + r, h], products[r], out[first + r, h]
                square = np.float32(0)
                for k in range(len(row)):
                    square += row[k] * row[k]
                if waves:
                    length = np.sqrt(square)
                    shrink = np.float32(1) / (SHORTEST if length < SHORTEST else length)
                    for j in range(directions):
                        of_row[j] *= shrink
                    write_wave_row(of_row, factor, features)
                else:
                    scales[first + r, h] = write_exponential_row(of_row, factor, features) - square / np.float32(2)


def laid_out_directions(directions: Tensor) -> NDArray[np.float32]:
    """Directions (G, D, K) in the form of `features_of_rows`."""
    array: NDArray[np.float32] = each_laid_out(directions.detach(), FLOATS).numpy()
    return array


def features_of_rows(
    x: Tensor, weights: NDArray[np.float32], count: int, *, waves: bool, factor: float
) -> tuple[Tensor, Tensor]:
    """Features (B, H, T, M) of x (B, H, T, K), and their log scales (B, H, T, 1).

    Weights are `laid_out_directions` of `count` directions for each of G groups of neighbouring heads; G divides H. As
    `write_features`; with waves, the scales have no meaning.
    """
    tokens = by_token(x)
    rows, (heads, width) = tokens.shape[0] * tokens.shape[1], tokens.shape[2:]
    features = tokens.new_empty(rows, heads, count * (2 if waves else 1))
    scales = tokens.new_empty(rows, heads)
    arrays = tokens.view(rows, heads, width).numpy(), weights
    results = features.numpy(), scales.numpy()
    in_ranges(lambda first, last: write_features(*arrays, waves, np.float32(factor), *results, first, last), rows)
    by_head = features.view(*tokens.shape[:3], -1), scales.view(*tokens.shape[:3], 1)
    return by_head[0].transpose(1, 2), by_head[1].transpose(1, 2)
