"""Quantisation of rows to bytes with one scale (unit) per row, and its inverse, for int8 products."""

import numpy as np
from numpy.typing import NDArray

from mtkit.compiled.machine_code import Floats, bits_of, compiled, of_bits

LARGEST = np.float32(127)
"""Largest rounded number."""

ZERO = 128
"""Byte that represents 0."""

LEAST_UNIT = np.float32(1e-32)
"""Unit of a row of zeros."""

WHOLE = np.float32(3 << 22 | ZERO)
"""Added to a float32, it leaves no bits for a fraction (1.5 * 2^23): the lowest bits are the integer plus ZERO."""


@compiled("float32[:, ::1], uint8[:, ::1], float32[::1]")
def round_rows(rows: Floats, whole: NDArray[np.uint8], units: Floats) -> None:
    """Write rows (M, I) to whole (M or more, I) as bytes, divided by units (M,) that map each row's largest to 127.

    Halves are rounded to even. A row with NaN or infinity has a NaN or infinite unit; its bytes are undefined.
    """
    count, width = rows.shape
    for i in range(count):
        largest = np.int32(0)
        for j in range(width):  # bits of non-negative floats compare like the numbers, with NaN above infinity
            largest = max(largest, np.int32(bits_of(rows[i, j]) & np.int32(0x7FFFFFFF)))
        unit = of_bits(largest) / LARGEST
        unit = LEAST_UNIT if unit < LEAST_UNIT else unit
        units[i] = unit
        for j in range(width):
            whole[i, j] = np.uint8(bits_of(rows[i, j] / unit + WHOLE))


@compiled("float32[:, ::1], float32[::1], float32[::1], float32[:, ::1]")
def scale_rows(sums: Floats, units: Floats, bias: Floats, out: Floats) -> None:
    """Write sums (M, O) * units (M,) + bias (O,) to out (M, O), which may be the same array as sums."""
    count, width = out.shape
    for i in range(count):
        unit = units[i]
        for j in range(width):
            out[i, j] = sums[i, j] * unit + bias[j]
