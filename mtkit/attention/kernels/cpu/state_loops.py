"""Loops over the state of decoding: copies of moved hypotheses, and products with their sums."""

import numpy as np
from numpy.typing import NDArray

from mtkit.attention.kernels.cpu.machine_code import Floats, compiled
from mtkit.attention.kernels.cpu.row_products import COLUMNS, write_weighted_sum

Places = NDArray[np.int64]


@compiled("uint8[:, ::1], int64[::1], int64[::1]")
def copy_rows(rows: NDArray[np.uint8], source: Places, target: Places) -> None:
    """Copy the rows at `source` (M,) to the rows at `target` (M,); no target is a source."""
    for move in range(len(source)):
        rows[target[move]] = rows[source[move]]


@compiled("float32[:, :, :, :], float32[:, :, :, :, ::1], int64[:, ::1], float32[:, :, :, ::1]")
def read_sums(queries: Floats, sums: Floats, ancestor: Places, out: Floats) -> None:
    """Write q S (B, N, H, V) of queries (B, N, H, M) and the sums (B, N', G, M, V) of their ancestors (B, N)."""
    batch, hypotheses, heads, width = queries.shape
    query, total, every = np.empty(width, np.float32), np.empty(out.shape[3], np.float32), np.arange(width)
    for row in range(batch * hypotheses):
        b, n = row // hypotheses, row % hypotheses
        for h in range(heads):
            query[:] = queries[b, n, h]
            matrix = sums[b, ancestor[b, n], h * sums.shape[2] // heads]
            for column in range(0, len(total), COLUMNS):
                write_weighted_sum(query, matrix, 0, 1, every, width, total, column)
            out[b, n, h] = total
