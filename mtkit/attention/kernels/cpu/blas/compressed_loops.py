"""Loops of attention to compressed blocks, with the importance of the token blocks that contain them."""

import numpy as np
from numpy.typing import NDArray

from mtkit.attention.kernels.cpu.blas.column_softmax import (
    FAR,
    TOGETHER,
    replace_d_weights,
    replace_scores,
    write_means,
    write_weights,
)
from mtkit.attention.kernels.cpu.blas.matrices import add, load, multiply_all, store, transpose
from mtkit.attention.kernels.cpu.machine_code import Floats, compiled, part

Counts = NDArray[np.int64]


@part
def write_scores(
    qt: Floats, k: Floats, ended: int, size: int, stride: int, first: int, count: int, out: Floats
) -> None:
    """Write the scores of `count` keys, a multiple of `TOGETHER`; those from `ended` on are hidden.

    qt (K, queries). With a stride, query first + i sees key p if p * stride + size <= first + i + 1.
    """
    for p in range(0, count, TOGETHER):
        np.dot(k[p : p + TOGETHER], qt, out[p : p + TOGETHER])
    for p in range(count):
        row, hidden = out[p], 0
        if stride > 0:
            hidden = min(max(p * stride + size - 1 - first, 0), len(row))
        if p >= ended:
            hidden = len(row)
        for i in range(hidden):
            row[i] = FAR


@part
def add_importance(weights: Floats, count: int, inside: int, of_block: int, total: Floats) -> None:
    """Add the weights (keys, queries) to total (blocks, queries): a key counts once for each stride in a block."""
    for p in range(count):
        row = weights[p]
        for s in range(p, p + of_block):
            if s // inside < len(total):
                of_all = total[s // inside]
                for i in range(len(row)):
                    of_all[i] += row[i]


@part
def visible(seen: int, first: int, size: int, stride: int) -> int:
    """Return the number of keys that some of the queries from `first` on see, as a multiple of `TOGETHER`."""
    count = seen
    if stride > 0:
        count = min(count, max((first + TOGETHER - size) // stride + 1, 0))
    return -(-count // TOGETHER) * TOGETHER


@part
def load_scaled(q: Floats, b: int, h: int, first: int, scale: np.float32, rows: Floats, columns: Floats) -> None:
    """Write queries times scale, as rows and as columns."""
    load(q, b, h, first, 1, rows)
    multiply_all(rows, scale)
    transpose(rows, columns)


@compiled(
    "float32[:, :, :, ::1], float32[:, :, ::1], float32[:, :, ::1], int64[::1], UniTuple(int64, 4), float32, "
    "int64, int64, float32[:, :, :, ::1], float32[:, :, :, ::1], float32[:, :, ::1], int64, int64"
)
def write_reads(
    q: Floats,
    k: Floats,
    v: Floats,
    seen: Counts,
    spans: tuple[int, int, int, int],
    scale: np.float32,
    begin: int,
    end: int,
    out: Floats,
    log_sum: Floats,
    importance: Floats,
    first: int,
    last: int,
) -> None:
    """Write the outputs (B, T, H, V), log-sum-exp (B, T, H, 1) and importance (N, end - begin, M) of some queries.

    q (B, T, H, K); k (N, P, K) and v (N, P, V) of N streams, segments and groups of heads, P a multiple of `TOGETHER`.
    seen (N,): blocks of each stream. spans: size and stride of the compressed blocks, the stride 0 if queries see all,
    strides per block of tokens and per compressed block. Only the streams `first` to `last` - 1.
    """
    size, stride, inside, of_block = spans
    heads, groups = q.shape[2], len(k) // len(q)
    several = heads // groups
    scores = np.empty((k.shape[1], TOGETHER), np.float32)
    q_c, qt = np.empty((TOGETHER, q.shape[3]), np.float32), np.empty((q.shape[3], TOGETHER), np.float32)
    of_values, sums = np.empty((2, TOGETHER, v.shape[2]), np.float32), np.empty((TOGETHER, 1), np.float32)
    o_c, some = of_values[0], of_values[1]
    total = np.empty((importance.shape[2], TOGETHER), np.float32)
    for n in range(first, last):
        b = n // groups
        for t in range(begin, end, TOGETHER):
            total[:] = 0
            count = visible(seen[n], t, size, stride)
            for h in range(n % groups * several, (n % groups + 1) * several):
                load_scaled(q, b, h, t, scale, q_c, qt)
                write_scores(qt, k[n], seen[n], size, stride, t, count, scores)
                write_weights(scores, count, sums)
                add_importance(scores, count, inside, of_block, total)
                o_c[:] = 0
                for p in range(0, count, TOGETHER):
                    np.dot(scores[p : p + TOGETHER].T, v[n, p : p + TOGETHER], some)
                    add(some, o_c)
                store(out, b, h, t, 1, o_c)
                store(log_sum, b, h, t, 1, sums)
            for i in range(min(TOGETHER, end - t)):
                for m in range(total.shape[0]):
                    importance[n, t - begin + i, m] = total[m, i]


@compiled(
    "float32[:, :, :, ::1], float32[:, :, ::1], float32[:, :, ::1], int64[::1], UniTuple(int64, 4), float32, "
    "float32[:, :, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], "
    "float32[:, :, :, ::1], float32[:, :, ::1], float32[:, :, ::1], int64, int64"
)
def write_gradients(
    q: Floats,
    k: Floats,
    v: Floats,
    seen: Counts,
    spans: tuple[int, int, int, int],
    scale: np.float32,
    out: Floats,
    log_sum: Floats,
    d_out: Floats,
    d_q: Floats,
    d_k: Floats,
    d_v: Floats,
    first: int,
    last: int,
) -> None:
    """Write q's gradient, and add k's and v's gradients, from d_out, the gradient of what `write_reads` writes."""
    size, stride, _, _ = spans
    heads, groups = q.shape[2], len(k) // len(q)
    several, width, wide = heads // groups, q.shape[3], v.shape[2]
    scores, squares = np.empty((k.shape[1], TOGETHER), np.float32), np.empty((TOGETHER, TOGETHER), np.float32)
    by_key, qt = np.empty((3, TOGETHER, width), np.float32), np.empty((width, TOGETHER), np.float32)
    by_value, d_ot = np.empty((3, TOGETHER, wide), np.float32), np.empty((wide, TOGETHER), np.float32)
    q_c, dq_c, of_keys, o_c, d_o, of_values = by_key[0], by_key[1], by_key[2], by_value[0], by_value[1], by_value[2]
    sums, mean, one = np.empty((TOGETHER, 1), np.float32), np.empty(TOGETHER, np.float32), np.float32(1)
    for n in range(first, last):
        b = n // groups
        for t in range(0, q.shape[1], TOGETHER):
            count = visible(seen[n], t, size, stride)
            for h in range(n % groups * several, (n % groups + 1) * several):
                load_scaled(q, b, h, t, scale, q_c, qt)
                write_scores(qt, k[n], seen[n], size, stride, t, count, scores)
                load(log_sum, b, h, t, 1, sums)
                replace_scores(scores, count, sums)
                load_scaled(d_out, b, h, t, one, d_o, d_ot)
                load(out, b, h, t, 1, o_c)
                write_means(o_c, d_o, mean)
                dq_c[:] = 0
                for p in range(0, count, TOGETHER):
                    weights, keys = scores[p : p + TOGETHER], k[n, p : p + TOGETHER]
                    np.dot(weights, d_o, of_values)
                    add(of_values, d_v[n, p : p + TOGETHER])
                    np.dot(v[n, p : p + TOGETHER], d_ot, squares)
                    replace_d_weights(squares, weights, mean)
                    np.dot(squares, q_c, of_keys)
                    add(of_keys, d_k[n, p : p + TOGETHER])
                    np.dot(squares.T, keys, of_keys)
                    add(of_keys, dq_c)
                multiply_all(dq_c, scale)
                store(d_q, b, h, t, 1, dq_c)
