"""Products of float32 rows that are rounded to bfloat16 first, by AVX-512; `amx_products` has the loop for AMX."""

import numpy as np
from numpy.typing import NDArray

from mtkit.attention.kernels.cpu.machine_code import Floats, bfloat16_bits, compiled, part
from mtkit.attention.kernels.cpu.product_tiles import BFLOAT16, products_by

write_products = products_by(BFLOAT16)

Halves = NDArray[np.int16]


@part
def round_to_bfloat16(rows: Floats, low: Halves) -> None:
    """Write the bits of rows (M, I), rounded to bfloat16, into the first I columns of low."""
    count, width = rows.shape
    for i in range(count):
        for j in range(width):
            low[i, j] = bfloat16_bits(rows[i, j])


@compiled("int16[:, :, :, ::1], float32[::1], float32[:, ::1], int16[:, ::1], float32[:, ::1]")
def multiply_bfloat16(weights: Halves, added: Floats, rows: Floats, low: Halves, out: Floats) -> None:
    """Write the product (M, O) of rows (M, I) with weights in blocks, plus `added` (O,), to out; sums are in float32.

    low (M, I or one more), zero in any column after the rows, receives the bits of the rounded rows.
    """
    round_to_bfloat16(rows, low)
    write_products(low, weights, added, out)
