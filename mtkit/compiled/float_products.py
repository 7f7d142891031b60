"""Tiled matrix products in float32."""

import numpy as np
from numpy.typing import NDArray

from mtkit.compiled.machine_code import Floats, compiled
from mtkit.compiled.tiles import FLOATS, products_by

write_products = products_by(FLOATS)


@compiled("float32[:, :, :, ::1], float32[::1], float32[:, ::1], float32[:, ::1]")
def multiply_floats(weights: NDArray[np.float32], added: Floats, rows: Floats, out: Floats) -> None:
    """Write the product (M, O) of rows (M, I) with weights in blocks, plus `added` (O,), to out."""
    write_products(rows, weights, added, out)
