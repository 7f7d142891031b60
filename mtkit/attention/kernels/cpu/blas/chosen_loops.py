"""Loops of attention to blocks of keys that each query chooses: queries that chose a block read it together."""

import numpy as np
from numpy.typing import NDArray

from mtkit.attention.kernels.cpu.blas.column_softmax import (
    FAR,
    LEAST,
    TOGETHER,
    replace_d_weights,
    replace_scores,
    write_means,
    write_weights,
)
from mtkit.attention.kernels.cpu.blas.matrices import add, multiply_all, transpose
from mtkit.attention.kernels.cpu.machine_code import Floats, compiled, part

Choices = NDArray[np.int64]
Places = NDArray[np.int64]


@part
def sort_queries(chosen: Choices, starts: Places, order: Places) -> None:
    """Write the queries (pairs,) sorted by the blocks of chosen (T, n): the queries of block m begin at starts[m]."""
    blocks = len(starts) - 2
    starts[:] = 0
    for t in range(chosen.shape[0]):
        for r in range(chosen.shape[1]):
            if chosen[t, r] < blocks:
                starts[chosen[t, r] + 2] += 1
    for m in range(blocks):
        starts[m + 2] += starts[m + 1]
    for t in range(chosen.shape[0]):  # starts[m + 1] moves from the first place of block m to that of m + 1
        for r in range(chosen.shape[1]):
            m = chosen[t, r]
            if m < blocks:
                order[starts[m + 1]] = t
                starts[m + 1] += 1


@part
def gather(x: Floats, b: int, h: int, places: Places, rows: Floats) -> None:
    """Copy the rows at places of x (B, T, H, K); zeros beyond the last place."""
    for i in range(len(rows)):
        real = i < len(places)
        row, read = rows[i], x[b, places[i] if real else 0, h]
        for j in range(len(row)):
            row[j] = read[j] if real else np.float32(0)


@part
def write_block_scores(keys: Floats, qt: Floats, hidden: NDArray[np.bool_], later: Places, scores: Floats) -> None:
    """Write the scores (size, queries) of a block's keys; hidden (size,) or (0,).

    later (queries,): the first key that a query does not see, because it is later.
    """
    np.dot(keys, qt, scores)
    for s in range(len(hidden)):
        if hidden[s]:
            scores[s] = FAR
    for i in range(len(later)):
        for s in range(max(later[i], 0), len(scores)):
            scores[s, i] = FAR


@part
def join(rows: Floats, sums: Floats, b: int, h: int, places: Places, out: Floats, log_sum: Floats) -> None:
    """Join a block's softmax outputs, rows (c, V) with log-sum-exp (c, 1), to the same queries' outputs so far."""
    for i in range(len(places)):
        t, new = places[i], sums[i, 0]
        if new > -LEAST:  # no key
            continue
        old = log_sum[b, t, h, 0]
        row, total = rows[i], out[b, t, h]
        if old < LEAST:
            log_sum[b, t, h, 0] = new
            for j in range(len(row)):
                total[j] = row[j]
        else:
            both = max(old, new) + np.float32(np.log1p(np.exp(-abs(old - new))))
            kept, added = np.float32(np.exp(old - both)), np.float32(np.exp(new - both))
            log_sum[b, t, h, 0] = both
            for j in range(len(row)):
                total[j] = kept * total[j] + added * row[j]


@part
def scatter(rows: Floats, scale: np.float32, b: int, h: int, places: Places, out: Floats) -> None:
    """Add rows times scale to the rows at places of out (B, T, H, K)."""
    for i in range(len(places)):
        row, total = rows[i], out[b, places[i], h]
        for j in range(len(row)):
            total[j] += scale * row[j]


@compiled(
    "boolean, float32[:, :, :, ::1], float32[:, :, ::1], float32[:, :, ::1], int64[:, :, :, ::1], boolean[:, ::1], "
    "int64, float32, float32[:, :, :, ::1], float32[:, :, :, ::1], int64, int64"
)
def write_reads(
    causal: bool,
    q: Floats,
    keys: Floats,
    values: Floats,
    chosen: Choices,
    hidden: NDArray[np.bool_],
    groups: int,
    scale: np.float32,
    out: Floats,
    log_sum: Floats,
    first: int,
    last: int,
) -> None:
    """Write the outputs (B, T, H, V) and log-sum-exp (B, T, H, 1), which begin as 0 and as the least number.

    q (B, T, H, K); keys and values (B G M, size, K or V); chosen (B, C, T, n) of M blocks; hidden (B M, size) or (0,
    size). Only the streams `first` to `last` - 1 of the B G. If causal, later keys of a block are hidden.
    """
    batch, length, heads, width = q.shape
    blocks, size, several = len(keys) // (batch * groups), keys.shape[1], heads // groups
    q_c, qt = np.empty((TOGETHER, width), np.float32), np.empty((width, TOGETHER), np.float32)
    o_c, sums = np.empty((TOGETHER, values.shape[2]), np.float32), np.empty((TOGETHER, 1), np.float32)
    scores = np.empty((size, TOGETHER), np.float32)
    starts, order = np.empty(blocks + 2, np.int64), np.empty(length * chosen.shape[3], np.int64)
    for n in range(first, last):
        b = n // groups
        for h in range(n % groups * several, (n % groups + 1) * several):
            sort_queries(chosen[b, h * chosen.shape[1] // heads], starts, order)
            for m in range(blocks):
                unseen = hidden[min(b * blocks + m, len(hidden)) : min(b * blocks + m + 1, len(hidden))].reshape(-1)
                for begin in range(starts[m], starts[m + 1], TOGETHER):
                    places = order[begin : min(begin + TOGETHER, starts[m + 1])]
                    later = places - (m * size - 1) if causal else places[:0]
                    gather(q, b, h, places, q_c)
                    multiply_all(q_c, scale)
                    transpose(q_c, qt)
                    write_block_scores(keys[n * blocks + m], qt, unseen, later, scores)
                    write_weights(scores, size, sums)
                    np.dot(scores.T, values[n * blocks + m], o_c)
                    join(o_c, sums, b, h, places, out, log_sum)


@compiled(
    "boolean, float32[:, :, :, ::1], float32[:, :, ::1], float32[:, :, ::1], int64[:, :, :, ::1], boolean[:, ::1], "
    "int64, float32, float32[:, :, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], "
    "float32[:, :, :, ::1], float32[:, :, ::1], float32[:, :, ::1], int64, int64"
)
def write_gradients(
    causal: bool,
    q: Floats,
    keys: Floats,
    values: Floats,
    chosen: Choices,
    hidden: NDArray[np.bool_],
    groups: int,
    scale: np.float32,
    out: Floats,
    log_sum: Floats,
    d_out: Floats,
    d_q: Floats,
    d_keys: Floats,
    d_values: Floats,
    first: int,
    last: int,
) -> None:
    """Add the gradients of q, keys and values, from the whole softmax's outputs, log-sum-exp and d_out."""
    batch, length, heads, width = q.shape
    blocks, size, several = len(keys) // (batch * groups), keys.shape[1], heads // groups
    by_key, qt = np.empty((2, TOGETHER, width), np.float32), np.empty((width, TOGETHER), np.float32)
    of_keys, of_values = np.empty((size, width), np.float32), np.empty((size, values.shape[2]), np.float32)
    by_value, d_ot = (
        np.empty((2, TOGETHER, values.shape[2]), np.float32),
        np.empty((values.shape[2], TOGETHER), np.float32),
    )
    q_c, dq_c, o_c, d_o = by_key[0], by_key[1], by_value[0], by_value[1]
    sums, mean = np.empty((TOGETHER, 1), np.float32), np.empty(TOGETHER, np.float32)
    both = np.empty((2, size, TOGETHER), np.float32)
    weights, d_weights = both[0], both[1]
    starts, order = np.empty(blocks + 2, np.int64), np.empty(length * chosen.shape[3], np.int64)
    for n in range(first, last):
        b = n // groups
        for h in range(n % groups * several, (n % groups + 1) * several):
            sort_queries(chosen[b, h * chosen.shape[1] // heads], starts, order)
            for m in range(blocks):
                unseen = hidden[min(b * blocks + m, len(hidden)) : min(b * blocks + m + 1, len(hidden))].reshape(-1)
                k_m, v_m = keys[n * blocks + m], values[n * blocks + m]
                for begin in range(starts[m], starts[m + 1], TOGETHER):
                    places = order[begin : min(begin + TOGETHER, starts[m + 1])]
                    later = places - (m * size - 1) if causal else places[:0]
                    gather(q, b, h, places, q_c)
                    multiply_all(q_c, scale)
                    transpose(q_c, qt)
                    write_block_scores(k_m, qt, unseen, later, weights)
                    gather(log_sum, b, h, places, sums)
                    replace_scores(weights, size, sums)
                    gather(out, b, h, places, o_c)
                    gather(d_out, b, h, places, d_o)
                    transpose(d_o, d_ot)
                    write_means(o_c, d_o, mean)
                    np.dot(weights, d_o, of_values)
                    add(of_values, d_values[n * blocks + m])
                    np.dot(v_m, d_ot, d_weights)
                    replace_d_weights(d_weights, weights, mean)
                    np.dot(d_weights, q_c, of_keys)
                    add(of_keys, d_keys[n * blocks + m])
                    np.dot(d_weights.T, k_m, dq_c)
                    scatter(dq_c, scale, b, h, places, d_q)
