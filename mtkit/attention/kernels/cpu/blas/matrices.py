"""Small matrices in the processor's caches: copies from and to tensors, and products and sums of their elements."""

import numpy as np
from numpy.typing import NDArray

from mtkit.attention.kernels.cpu.machine_code import Floats, part


@part
def load(x: Floats, b: int, h: int, first: int, step: int, rows: Floats) -> None:
    """Copy the rows (c, K) of positions first, first + step, ... of x (B, T, H, K); zeros beyond its ends."""
    for i in range(len(rows)):
        t = first + i * step
        row, real = rows[i], 0 <= t < x.shape[1]
        read = x[b, t if real else 0, h]
        for j in range(len(row)):
            row[j] = read[j] if real else np.float32(0)


@part
def store(x: Floats, b: int, h: int, first: int, step: int, rows: Floats) -> None:
    """Copy rows (c, K) to the positions of x (B, T, H, K) from which `load` takes them."""
    for i in range(len(rows)):
        t = first + i * step
        if 0 <= t < x.shape[1]:
            row, written = rows[i], x[b, t, h]
            for j in range(len(row)):
                written[j] = row[j]


@part
def transpose(x: Floats, out: Floats) -> None:
    for j in range(x.shape[1]):
        for i in range(x.shape[0]):
            out[j, i] = x[i, j]


@part
def multiply_all(rows: Floats, factor: np.float32) -> None:
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            rows[i, j] *= factor


@part
def scale(rows: Floats, factors: Floats, out: Floats) -> None:
    """Write rows (c, K) times factors (c, n), n from 1: only the first column is read."""
    for i in range(len(rows)):
        factor = factors[i, 0]
        for j in range(rows.shape[1]):
            out[i, j] = factor * rows[i, j]


@part
def add_scaled(rows: Floats, factors: Floats, sign: np.float32, out: Floats) -> None:
    """Add sign times rows (c, K) times factors (c, n)."""
    for i in range(len(rows)):
        factor = sign * factors[i, 0]
        for j in range(rows.shape[1]):
            out[i, j] += factor * rows[i, j]


@part
def multiply(x: Floats, y: Floats, out: Floats) -> None:
    """Write x * y, (c, c)."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = x[i, j] * y[i, j]


@part
def add(x: Floats, out: Floats) -> None:
    """Add x to out, matrices."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] += x[i, j]


@part
def subtract_all(x: Floats, out: Floats) -> None:
    """Subtract x from out, matrices."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] -= x[i, j]


@part
def add_dots(x: Floats, y: Floats, sign: np.float32, out: NDArray[np.float64]) -> None:
    """Add sign times the dot products of x's and y's rows, (c, K), to out (c,)."""
    for i in range(len(x)):
        total = np.float32(0)
        for j in range(x.shape[1]):
            total += x[i, j] * y[i, j]
        out[i] += sign * total


@part
def dots(x: Floats, y: Floats) -> float:
    """Return the sum of two matrices' elementwise products."""
    by_row = np.zeros(len(x), np.float64)
    add_dots(x, y, np.float32(1), by_row)
    total = 0.0
    for i in range(len(x)):
        total += by_row[i]
    return total
