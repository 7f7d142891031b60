"""Tiled matrix products of float32 rows, which are first rounded to bytes."""

import numpy as np
from numpy.typing import NDArray

from mtkit.compiled.machine_code import Floats, compiled
from mtkit.compiled.rounding import round_rows
from mtkit.compiled.tiles import BYTES, MOST_ROWS, sums_by

write_sums, OUTPUTS = sums_by(BYTES), BYTES.outputs

Bytes = NDArray[np.uint8]
Weights = NDArray[np.int8]


@compiled(
    "int8[:, :, :, ::1], int32[::1], float32[::1], float32[::1], float32[:, ::1], boolean, uint8[:, ::1], "
    "float32[::1], float32[:, ::1]",
    in_any_order=False,
)
def multiply_bytes(
    weights: Weights,
    surplus: NDArray[np.int32],
    scales: Floats,
    added: Floats,
    rows: Floats,
    in_units: bool,
    whole: Bytes,
    units: Floats,
    out: Floats,
) -> None:
    """Write the product (M, O) of rows (M, I) with integer weights, in blocks, scaled by scales (O,), plus `added`.

    `whole` (M, I or a little more) and units (M,) receive the results of `round_rows`. If `in_units`, out is neither
    multiplied by units nor added to. surplus (O,) is the contribution of the byte offset (`ZERO`) to each sum.
    """
    round_rows(rows, whole, units)
    count, outputs = out.shape
    sums = np.empty((MOST_ROWS, OUTPUTS), np.int32)
    for block in range(len(weights)):
        before = block * OUTPUTS
        here = min(OUTPUTS, outputs - before)
        for first in range(0, count, MOST_ROWS):
            left = min(count - first, MOST_ROWS)
            write_sums(whole, weights, sums, first, left, block)
            for r in range(left):
                of_row, unit = sums[r], units[first + r]
                for o in range(here):
                    scaled = np.float32(of_row[o] - surplus[before + o]) * scales[before + o]
                    out[first + r, before + o] = scaled if in_units else scaled * unit + added[before + o]
