"""Elementwise functions in one pass over memory; PyTorch needs several passes."""

import numpy as np

from mtkit.attention.kernels.cpu.machine_code import Floats, compiled, exponential, part

TURNS, QUARTER = np.float64(2 / np.pi), np.float64(np.pi / 2)
"""Quarters of a turn in a radian, and the reverse."""

# sin(r) / r and cos(r) for |r| up to pi / 4, polynomials of r^2 that are interpolated at Chebyshev nodes
S0, S1, S2, S3, K0, K1, K2, K3, K4 = (
    np.float32(coefficient)
    for coefficient in (1.0, -1.66666507e-1, 8.33203553e-3, -1.95038708e-4,
                        1.0, -0.5, 4.16666167e-2, -1.38866175e-3, 2.43797892e-5)
)  # fmt: skip


@part
def write_wave_row(row: Floats, factor: np.float32, out: Floats) -> None:
    """`write_waves` of one row (D,)."""
    width = len(row)
    sines, cosines = out[:width], out[width:]
    for j in range(width):
        turns = np.float64(row[j]) * TURNS
        quarters = np.floor(turns + 0.5)
        r = np.float32((turns - quarters) * QUARTER)
        square = r * r
        sine = (((S3 * square + S2) * square + S1) * square + S0) * r
        cosine = (((K4 * square + K3) * square + K2) * square + K1) * square + K0
        place = np.int32(quarters)
        first, second = (cosine, sine) if place & 1 else (sine, cosine)
        sines[j] = factor * (-first if place & 2 else first)
        cosines[j] = factor * (-second if (place + 1) & 2 else second)


@compiled("float32[:, ::1], float32[:, ::1], float32")
def write_waves(rows: Floats, out: Floats, factor: np.float32) -> None:
    """Write the sines, then the cosines of rows (M, D), times the factor, to out (M, 2 D).

    The error of a sine or cosine is at most 2e-7 for numbers up to 1e9 in size, and NaN if they are not finite.
    """
    for i in range(len(rows)):
        write_wave_row(rows[i], factor, out[i])


@part
def sigmoid(x: np.float32) -> np.float32:
    """Return 1 / (1 + exp(-x))."""
    small = exponential(-abs(x))
    return (np.float32(1) if x > 0 else small) / (np.float32(1) + small)


@part
def tangent(x: np.float32) -> np.float32:
    """Return tanh(x) with an error of at most 2e-7."""
    small = exponential(np.float32(-2) * abs(x))
    size = (np.float32(1) - small) / (np.float32(1) + small)
    return size if x > 0 else -size


STEPS = "UniTuple(int64, 4)"


@compiled(f"float32[:, ::1], {STEPS}, float32[:, ::1], {STEPS}, float32[:, ::1], float32[:, :, :, ::1], int64, int64")
def write_additive_scores(
    queries: Floats,
    query_steps: tuple[int, int, int, int],
    keys: Floats,
    key_steps: tuple[int, int, int, int],
    vectors: Floats,
    out: Floats,
    begin: int,
    end: int,
) -> None:
    """Write v . tanh(q + k) of all queries and keys, whose rows are in matrices (R, A), to out (B, H, T, S).

    `steps` are the distances in rows to the next of B, 1, H, and T or S; vectors (H, A). Only segments `begin` to
    `end` - 1.
    """
    _, heads, length, count = out.shape
    for b in range(begin, end):
        for h in range(heads):
            vector = vectors[h]
            for t in range(length):
                query = queries[b * query_steps[0] + h * query_steps[2] + t * query_steps[3]]
                first = b * key_steps[0] + h * key_steps[2]
                for s in range(count):
                    key, total = keys[first + s * key_steps[3]], np.float32(0)
                    for a in range(len(vector)):
                        total += vector[a] * tangent(query[a] + key[a])
                    out[b, h, t, s] = total
