"""Rounding of rows to bytes, each row in a unit of its own, and the way back: the two ends of a product in int8."""

import numpy as np
from numpy.typing import NDArray

from mtkit.compiled.machine_code import Floats, bits_of, compiled, of_bits

LARGEST = np.float32(127)
"""Of a rounded number."""

ZERO = 128
"""The byte that stands for 0."""

LEAST_UNIT = np.float32(1e-32)
"""A row of zeros has a unit too."""

WHOLE = np.float32(3 << 22 | ZERO)
"""Beside 1.5 * 2^23 a float32 has no room for a fraction, and the lowest bits are the whole number."""


@compiled("float32[:, ::1], uint8[:, ::1], float32[::1]")
def round_rows(rows: Floats, whole: NDArray[np.uint8], units: Floats) -> None:
    """Writes rows (M, I), in units (M,) that make the largest number of each 127, to whole (M or more, I) as bytes.

    Halves are rounded to even. A row with NaN or infinity has such a unit, whatever its bytes.
    """
    count, width = rows.shape
    for i in range(count):
        largest = np.int32(0)
        for j in range(width):  # the bits of numbers without sign have their order, with NaN above infinity
            largest = max(largest, np.int32(bits_of(rows[i, j]) & np.int32(0x7FFFFFFF)))
        unit = of_bits(largest) / LARGEST
        unit = LEAST_UNIT if unit < LEAST_UNIT else unit
        units[i] = unit
        for j in range(width):
            whole[i, j] = np.uint8(bits_of(rows[i, j] / unit + WHOLE))


@compiled("float32[:, ::1], float32[::1], float32[::1], float32[:, ::1]")
def scale_rows(sums: Floats, units: Floats, bias: Floats, out: Floats) -> None:
    """Writes sums (M, O) times units (M,), and bias (O,) added, to out (M, O), which may be the sums themselves."""
    count, width = out.shape
    for i in range(count):
        unit = units[i]
        for j in range(width):
            out[i, j] = sums[i, j] * unit + bias[j]
