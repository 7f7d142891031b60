"""Loops of decayed sums, also under the delta rule: outputs, and all gradients, chunk by chunk, each head by itself.

A chunk's products are small matrix products of BLAS, which is fastest if only the first factor is transposed. Factors
stay in the processor's first caches; PyTorch's batched products would pass through memory between any two operations.
In a chunk, with the sums S before it, the sums L of the logarithms of the decays, E_ts = exp(L_t - L_s), M = E * K K^T
below the diagonal and P = E * Q K^T,

    Z = V - (e^L * K) S - M U     U = beta * Z     O = (e^L * Q) S + P U     S_after = e^L_c S + (e^(L_c - L) * K)^T U
"""

import numpy as np

from mtkit.attention.kernels.cpu.blas.matrices import (
    add,
    add_dots,
    add_scaled,
    dots,
    load,
    multiply,
    scale,
    store,
    subtract_all,
    transpose,
)
from mtkit.attention.kernels.cpu.machine_code import Floats, compiled, exponential, part

LOWEST, LEAST = np.float32(-1e4), -40.0
"""Lowest logarithm of a decay, and the exponent below which a share is 0, as in `linear/_chunk_decays` and
`linear/_halved_products`."""


@part
def share(exponent: float) -> np.float32:
    """Return exp(exponent) for exponents of at most 0."""
    return exponential(np.float32(exponent)) if exponent > LEAST else np.float32(0)


@part
def subtract(factors: Floats, rows: Floats, out: Floats) -> None:
    """Subtract factors (n,) times rows (n, V) from out (V,)."""
    count = len(factors) // 4 * 4
    for i in range(0, count, 4):  # several at a time: `out` is read and written less often
        f1, f2, f3, f4 = factors[i], factors[i + 1], factors[i + 2], factors[i + 3]
        row1, row2, row3, row4 = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        for j in range(len(out)):
            out[j] -= f1 * row1[j] + f2 * row2[j] + f3 * row3[j] + f4 * row4[j]
    for i in range(count, len(factors)):
        factor, row = factors[i], rows[i]
        for j in range(len(out)):
            out[j] -= factor * row[j]


@part
def write_decays(
    decay: Floats, exclusive: bool, reads: Floats, writes: Floats, below: Floats, shares: Floats
) -> np.float32:
    """Write e^L and e^(L_c - L), (c, 1), and E (c, c) below the diagonal, and as outputs read it; returns e^L_c."""
    count = len(decay)
    total = np.zeros(count, np.float64)
    for t in range(count):
        log = decay[t, 0]
        total[t] = (total[t - 1] if t > 0 else 0.0) + (LOWEST if log < LOWEST else log)
    for t in range(count):
        reads[t, 0], writes[t, 0] = share(total[t]), share(total[count - 1] - total[t])
        for s in range(t):
            below[t, s] = share(total[t] - total[s])
        below[t, t:] = 0
        shares[t] = below[t]
        shares[t, t] = 0 if exclusive else 1
    return reads[count - 1, 0]


@part
def add_product(x: Floats, y: Floats, added: Floats, carried: np.float32, sign: np.float32, sums: Floats) -> None:
    """Replace sums (K, V) by carried * sums + sign * x^T y; x^T y is written to `added`."""
    np.dot(x.T, y, added)
    for i in range(sums.shape[0]):
        for j in range(sums.shape[1]):
            sums[i, j] = carried * sums[i, j] + sign * added[i, j]


@part
def solve(overlaps: Floats, beta: Floats, z: Floats, u: Floats) -> None:
    """Replace z (c, V) by Z, the solution of Z + M (beta * Z) = z; u becomes beta * Z."""
    for t in range(len(z)):
        z_t, u_t, factor = z[t], u[t], beta[t, 0]
        subtract(overlaps[t, :t], u[:t], z_t)
        for j in range(len(z_t)):
            u_t[j] = factor * z_t[j]


@part
def solve_transposed(overlaps: Floats, beta: Floats, z: Floats, d_u: Floats, d_z: Floats, d_beta: Floats) -> None:
    """Write the gradients of Z and beta. d_u is the gradient of U without the term M U, which is added here."""
    for s in range(len(z) - 1, -1, -1):
        du_s, dz_s, z_s, factor, total = d_u[s], d_z[s], z[s], beta[s, 0], np.float32(0)
        subtract(overlaps[s + 1 :, s], d_z[s + 1 :], du_s)
        for j in range(len(z_s)):
            dz_s[j] = factor * du_s[j]
            total += du_s[j] * z_s[j]
        d_beta[s, 0] = total


@part
def write_d_written(
    q: Floats,
    k: Floats,
    kt: Floats,
    d_o: Floats,
    d_sums: Floats,
    writes: Floats,
    shares: Floats,
    products: Floats,
    scratch: Floats,
    d_u: Floats,
) -> None:
    """Write the gradient of U by the outputs and by the sums after the chunk."""
    np.dot(q, kt, products)
    multiply(products, shares, products)  # P
    np.dot(products.T, d_o, d_u)
    np.dot(k, d_sums, scratch)
    add_scaled(scratch, writes, np.float32(1), d_u)


@part
def add_d_writes(k: Floats, u: Floats, d_sums: Floats, writes: Floats, scratch: Floats, d_k: Floats) -> float:
    """Add k's gradient by the sums after the chunk; returns the gradient of the logarithm of all writes together."""
    np.dot(u, d_sums.T, scratch)
    scale(scratch, writes, scratch)
    add(scratch, d_k)
    return dots(k, scratch)


@part
def write_d_reads(
    q: Floats,
    k: Floats,
    ut: Floats,
    d_o: Floats,
    sums: Floats,
    reads: Floats,
    shares: Floats,
    d_products: Floats,
    scratch: Floats,
    d_q: Floats,
    d_k: Floats,
) -> None:
    """Write the gradients of q and k by what the rows read, from u transposed (V, c) and d_o (c, V)."""
    np.dot(d_o, ut, d_products)
    multiply(d_products, shares, d_products)
    np.dot(d_o, sums.T, d_q)
    scale(d_q, reads, d_q)
    np.dot(d_products, k, scratch)
    add(scratch, d_q)
    np.dot(d_products.T, q, d_k)


@part
def write_d_overlaps(
    k: Floats,
    ut: Floats,
    d_z: Floats,
    sums: Floats,
    reads: Floats,
    below: Floats,
    d_overlaps: Floats,
    scratch: Floats,
    dk_as_query: Floats,
    dk_as_key: Floats,
) -> None:
    """Subtract the gradients of k by the corrections from `dk_as_query`, for rows that read, and from `dk_as_key`."""
    np.dot(d_z, ut, d_overlaps)
    multiply(d_overlaps, below, d_overlaps)
    np.dot(d_overlaps, k, scratch)
    subtract_all(scratch, dk_as_query)
    np.dot(d_overlaps.T, k, scratch)
    subtract_all(scratch, dk_as_key)
    np.dot(d_z, sums.T, scratch)
    add_scaled(scratch, reads, np.float32(-1), dk_as_query)


@part
def write_d_decay(
    q: Floats, k: Floats, d_q: Floats, dk_as_query: Floats, dk_as_key: Floats, at_end: float, d_decay: Floats
) -> None:
    """Write the gradient (c, 1) of the decays: L has the gradient q dq + k dk for rows that read, less k dk for keys.

    at_end: what is added to the gradient of L_c.
    """
    d_total = np.zeros(len(q), np.float64)
    add_dots(q, d_q, np.float32(1), d_total)
    add_dots(k, dk_as_query, np.float32(1), d_total)
    add_dots(k, dk_as_key, np.float32(-1), d_total)
    for t in range(len(q) - 1, -1, -1):
        at_end += d_total[t]
        d_decay[t, 0] = at_end


@compiled(
    "boolean, int64, float32[:, :, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], "
    "float32[:, :, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], int64, int64"
)
def write_reads(
    from_end: bool,
    chunk: int,
    q: Floats,
    k: Floats,
    v: Floats,
    decay: Floats,
    beta: Floats,
    z: Floats,
    states: Floats,
    out: Floats,
    first: int,
    last: int,
) -> None:
    """Write the outputs (B, T, H, V), Z, and the sums before each chunk, states (B H, chunks, K, V).

    Without beta, (B, T, H, 0), values are added, not corrected: U is V, and Z is not written.

    q and k are (B, T, H, K), v (B, T, H, V), decay and beta (B, T, H, 1). Only the streams `first` to
    `last` - 1 of the B H.

    from_end: sums run from the last position, chunks count from there too, and an output leaves its own position out.
    """
    _, length, heads, width = k.shape
    value_width, step = v.shape[3], -1 if from_end else 1
    by_key, by_value = np.empty((2, chunk, width), np.float32), np.empty((4, chunk, value_width), np.float32)
    by_position, squares = np.empty((4, chunk, 1), np.float32), np.empty((3, chunk, chunk), np.float32)
    all_sums, added = np.empty((heads, width, value_width), np.float32), np.empty((width, value_width), np.float32)
    kt = np.empty((width, chunk), np.float32)
    q_c, k_c, v_c, read, o_c = by_key[0], by_key[1], by_value[0], by_value[1], by_value[2]
    corrects = beta.shape[3] > 0
    u = by_value[3] if corrects else v_c
    g_c, b_c, reads, writes = by_position[0], by_position[1], by_position[2], by_position[3]
    below, shares, products = squares[0], squares[1], squares[2]
    for b in range(first // heads, -(-last // heads)):
        all_sums[:] = 0
        for number in range(states.shape[1]):
            begin = length - 1 - number * chunk if from_end else number * chunk
            for h in range(max(first - b * heads, 0), min(last - b * heads, heads)):  # side by side in memory
                sums = all_sums[h]
                states[b * heads + h, number] = sums
                load(q, b, h, begin, step, q_c)
                load(k, b, h, begin, step, k_c)
                load(v, b, h, begin, step, v_c)
                load(decay, b, h, begin, step, g_c)
                carried = write_decays(g_c, from_end, reads, writes, below, shares)
                transpose(k_c, kt)
                if corrects:
                    load(beta, b, h, begin, step, b_c)
                    np.dot(k_c, kt, products)
                    multiply(products, below, below)  # M
                    np.dot(k_c, sums, read)
                    add_scaled(read, reads, np.float32(-1), v_c)
                    solve(below, b_c, v_c, u)
                    store(z, b, h, begin, step, v_c)
                np.dot(q_c, kt, products)
                multiply(products, shares, products)  # P
                np.dot(q_c, sums, read)
                scale(read, reads, read)
                np.dot(products, u, o_c)
                add(read, o_c)
                store(out, b, h, begin, step, o_c)
                scale(k_c, writes, k_c)
                add_product(k_c, u, added, carried, np.float32(1), sums)


@compiled(
    "boolean, int64, float32[:, :, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], "
    "float32[:, :, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], "
    "float32[:, :, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], int64, int64"
)
def write_gradients(
    from_end: bool,
    chunk: int,
    q: Floats,
    k: Floats,
    decay: Floats,
    beta: Floats,
    z: Floats,
    states: Floats,
    d_out: Floats,
    d_q: Floats,
    d_k: Floats,
    d_v: Floats,
    d_decay: Floats,
    d_beta: Floats,
    first: int,
    last: int,
) -> None:
    """Write the gradients of q, k, v, decay and beta from d_out, the gradient of the outputs of `write_reads`.

    Without beta, z holds the values.
    """
    _, length, heads, width = k.shape
    value_width, step = z.shape[3], -1 if from_end else 1
    by_key, by_value = np.empty((6, chunk, width), np.float32), np.empty((6, chunk, value_width), np.float32)
    by_position, squares = np.empty((5, chunk, 1), np.float32), np.empty((5, chunk, chunk), np.float32)
    all_sums, added = np.empty((heads, width, value_width), np.float32), np.empty((width, value_width), np.float32)
    kt, ut = np.empty((width, chunk), np.float32), np.empty((value_width, chunk), np.float32)
    q_c, k_c, dq_c, dk_as_query, dk_as_key, scratch = by_key[0], by_key[1], by_key[2], by_key[3], by_key[4], by_key[5]
    corrects = beta.shape[3] > 0
    z_c, d_o, d_u, d_read = by_value[0], by_value[1], by_value[2], by_value[5]
    u, d_z = (by_value[3], by_value[4]) if corrects else (z_c, d_u)
    g_c, b_c, reads, writes, db_c = by_position[0], by_position[1], by_position[2], by_position[3], by_position[4]
    below, shares, products, overlaps, d_products = squares[0], squares[1], squares[2], squares[3], squares[4]
    for b in range(first // heads, -(-last // heads)):
        all_sums[:] = 0
        for number in range(states.shape[1] - 1, -1, -1):
            begin = length - 1 - number * chunk if from_end else number * chunk
            for h in range(max(first - b * heads, 0), min(last - b * heads, heads)):
                sums, d_sums = states[b * heads + h, number], all_sums[h]
                load(q, b, h, begin, step, q_c)
                load(k, b, h, begin, step, k_c)
                load(z, b, h, begin, step, z_c)
                load(d_out, b, h, begin, step, d_o)
                load(decay, b, h, begin, step, g_c)
                carried = write_decays(g_c, from_end, reads, writes, below, shares)
                transpose(k_c, kt)
                write_d_written(q_c, k_c, kt, d_o, d_sums, writes, shares, products, d_read, d_u)
                if corrects:
                    load(beta, b, h, begin, step, b_c)
                    scale(z_c, b_c, u)
                    np.dot(k_c, kt, overlaps)
                    multiply(overlaps, below, overlaps)  # M
                    solve_transposed(overlaps, b_c, z_c, d_u, d_z, db_c)
                    store(d_beta, b, h, begin, step, db_c)
                store(d_v, b, h, begin, step, d_z)
                transpose(u, ut)
                write_d_reads(q_c, k_c, ut, d_o, sums, reads, shares, d_products, scratch, dq_c, dk_as_key)
                dk_as_query[:] = 0
                if corrects:
                    write_d_overlaps(k_c, ut, d_z, sums, reads, below, d_products, scratch, dk_as_query, dk_as_key)
                at_end = float(carried) * dots(sums, d_sums)
                at_end += add_d_writes(k_c, u, d_sums, writes, scratch, dk_as_key)
                write_d_decay(q_c, k_c, dq_c, dk_as_query, dk_as_key, at_end, g_c)
                store(d_decay, b, h, begin, step, g_c)
                store(d_q, b, h, begin, step, dq_c)
                add(dk_as_key, dk_as_query)
                store(d_k, b, h, begin, step, dk_as_query)
                scale(q_c, reads, q_c)
                add_product(q_c, d_o, added, carried, np.float32(1), d_sums)
                if corrects:
                    scale(k_c, reads, k_c)
                    add_product(k_c, d_z, added, np.float32(1), np.float32(-1), d_sums)
