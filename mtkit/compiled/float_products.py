"""Products of rows in float32, by tiles."""

import numpy as np
from numpy.typing import NDArray

from mtkit.compiled.machine_code import Floats, compiled
from mtkit.compiled.tiles import FLOATS, MOST_ROWS, sums_by

write_sums, OUTPUTS = sums_by(FLOATS), FLOATS.outputs


@compiled("float32[:, :, :, ::1], float32[::1], float32[:, ::1], float32[:, ::1]")
def multiply_floats(weights: NDArray[np.float32], added: Floats, rows: Floats, out: Floats) -> None:
    """Writes the product (M, O) of rows (M, I) with weights in blocks, plus what is `added` (O,)."""
    count, outputs = out.shape
    sums = np.empty((MOST_ROWS, OUTPUTS), np.float32)
    for block in range(len(weights)):
        before = block * OUTPUTS
        here = min(OUTPUTS, outputs - before)
        for first in range(0, count, MOST_ROWS):
            left = min(count - first, MOST_ROWS)
            write_sums(rows, weights, sums, first, left, block)
            for r in range(left):
                of_row = sums[r]
                for o in range(here):
                    out[first + r, before + o] = of_row[o] + added[before + o]
