"""The sub-layers of a decoding step in int8, a loop for each: norm, products, attention and residual, block by block.

A block is a number of rows whose intermediate results stay in the caches. A sub-layer takes one call instead of a dozen
operations.
"""

import numpy as np
from numpy.typing import NDArray

from mtkit.attention.kernels.cpu.decoding_loops import write_attended
from mtkit.attention.kernels.cpu.machine_code import Floats, LowFloats, bfloat16_bits, compiled, part, round_rows
from mtkit.attention.kernels.cpu.product_tiles import LEAST, WEIGHTS, ByteWeights, write_byte_products

ROWS = 96
"""Rows of a block, or the hypotheses of one segment if they are more."""

Norm = tuple[Floats, Floats, np.float32]
"""Weight (D,), bias (D,) and epsilon of a layer norm."""

NORM = "Tuple((float32[::1], float32[::1], float32))"


@part
def normalise(rows: Floats, norm: Norm, out: Floats) -> None:
    """Write the layer norm of rows (M, D) to out (M, D), which may be the same array."""
    weight, bias, epsilon = norm
    width = len(weight)
    for row in range(len(rows)):
        of_row, to = rows[row], out[row]
        total, squares = np.float32(0), np.float32(0)
        for d in range(width):
            total += of_row[d]
        mean = total / np.float32(width)
        for d in range(width):
            squares += (of_row[d] - mean) * (of_row[d] - mean)
        factor = np.float32(1) / np.sqrt(squares / np.float32(width) + epsilon)
        for d in range(width):
            to[d] = (of_row[d] - mean) * factor * weight[d] + bias[d]


@compiled(f"float32[:, ::1], {NORM}, float32[:, ::1]")
def normalise_rows(rows: Floats, norm: Norm, out: Floats) -> None:
    """`normalise` for a caller in Python."""
    normalise(rows, norm, out)


@part
def write_product(rows: Floats, weights: ByteWeights, least: np.float32, out: Floats) -> None:
    """Write the product (M, O) of rows (M, I), rounded here, with the weights, and `least` if less."""
    count = len(rows)
    whole = np.empty((count, weights[0].shape[1] * weights[0].shape[3]), np.uint8)
    units = np.empty(count, np.float32)
    round_rows(rows, whole, units)
    write_byte_products(weights, whole, units, False, least, out)


@part
def write_input_product(
    x: Floats, norm: Norm, norm_before: bool, weights: ByteWeights, least: np.float32, normed: Floats, out: Floats
) -> None:
    """`write_product` for a sub-layer's input: x (M, D), or its layer norm, which is written to the rows of normed."""
    if norm_before:
        normalise(x, norm, normed[: len(x)])
        write_product(normed[: len(x)], weights, least, out)
    else:
        write_product(x, weights, least, out)


@part
def add_and_normalise(x: Floats, norm: Norm, normed_before: bool, out: Floats) -> None:
    """Add x (M, D) to a sub-layer's output in out (M, D), and normalise the sum unless the sub-layer's input was."""
    for row in range(len(x)):
        for d in range(x.shape[1]):
            out[row, d] += x[row, d]
    if not normed_before:
        normalise(out, norm, out)


@compiled(f"{NORM}, boolean, {WEIGHTS}, {WEIGHTS}, float32[:, ::1], float32[:, ::1]")
def feed_forward(norm: Norm, norm_before: bool, inner: ByteWeights, outer: ByteWeights, x: Floats, out: Floats) -> None:
    """Write the sub-layer's result (M, D) for x (M, D): two products with ReLU between them, around a residual."""
    normed = np.empty((ROWS, x.shape[1]), np.float32)
    hidden = np.empty((ROWS, len(inner[3])), np.float32)
    for first in range(0, len(x), ROWS):
        some, result = x[first : first + ROWS], out[first : first + ROWS]
        count = len(some)
        write_input_product(some, norm, norm_before, inner, np.float32(0), normed, hidden[:count])
        write_product(hidden[:count], outer, LEAST, result)
        add_and_normalise(some, norm, norm_before, result)


@part
def write_rows(projected: Floats, first: int, cache: LowFloats, row: int) -> None:
    """Write columns `first` to first + H * K - 1 of projected (B * N, W) to cache (B, H, L, K), in bfloat16.

    Those of hypothesis n go to rows `row` + n.
    """
    segments, heads, _, width = cache.shape
    hypotheses = len(projected) // segments
    for b in range(segments):
        for n in range(hypotheses):
            for h in range(heads):
                of_row, to = projected[b * hypotheses + n], cache[b, h, row + n]
                for k in range(width):
                    to[k] = bfloat16_bits(of_row[first + h * width + k])


@compiled(
    f"{NORM}, boolean, {WEIGHTS}, {WEIGHTS}, float32[:, :, ::1], int16[:, :, :, ::1], int16[:, :, :, ::1], int64, "
    "boolean[:, :, :, :], float32, float32[:, :, ::1]"
)
def attend(
    norm: Norm,
    norm_before: bool,
    inputs: ByteWeights,
    output: ByteWeights,
    x: Floats,
    keys: LowFloats,
    values: LowFloats,
    row: int,
    seen: NDArray[np.bool_],
    scale: np.float32,
    out: Floats,
) -> None:
    """Write the sub-layer's result (B, N, D) for x (B, N, D): attention to cached rows, around a residual.

    keys and values (B, H, L, K) are in bfloat16; seen (B, N, H, M) of their first M rows. If row >= 0, `inputs` makes
    queries, keys and values, and the last two are first written to rows `row` to row + N - 1; else it makes queries.
    """
    segments, hypotheses, heads, _ = seen.shape
    length, width = keys.shape[2:]
    room = max(ROWS // hypotheses, 1)
    normed = np.empty((room * hypotheses, x.shape[2]), np.float32)
    projected = np.empty((room * hypotheses, len(inputs[3])), np.float32)
    attended = np.empty((room, hypotheses, heads, width), np.float32)
    no_factors = np.empty((0, 0, 0, 0), np.float32)
    per_row = projected.shape[1] // width
    for begin in range(0, segments, room):
        end = min(begin + room, segments)
        count = (end - begin) * hypotheses
        some, result = x[begin:end].reshape(count, -1), out[begin:end].reshape(count, -1)
        write_input_product(some, norm, norm_before, inputs, LEAST, normed, projected[:count])
        some_keys, some_values = keys[begin:end], values[begin:end]
        if row >= 0:
            write_rows(projected[:count], heads * width, some_keys, row)
            write_rows(projected[:count], 2 * heads * width, some_values, row)
        write_attended(
            projected[:count].reshape(count * per_row, width),
            (hypotheses * per_row, per_row, 1, 0),
            some_keys.reshape(-1, width),
            (heads * length, 0, length, 1),
            some_values.reshape(-1, width),
            (heads * length, 0, length, 1),
            heads,
            heads,
            seen[begin:end],
            scale,
            no_factors,
            attended[: end - begin],
        )
        write_product(attended[: end - begin].reshape(count, heads * width), output, LEAST, result)
        add_and_normalise(some, norm, norm_before, result)
