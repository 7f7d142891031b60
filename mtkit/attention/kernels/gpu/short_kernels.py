# mypy: ignore-errors
"""Attention over few keys in Triton, which PyTorch brings along for CUDA; `short` imports and calls these kernels.

A program has all queries and keys of one head of one segment, in a tile of SIDE x SIDE scores. The backward pass
computes the weights again, so that neither they nor sums of them are stored. Sums of the programs are added in a fixed
order.
"""

import triton
import triton.language as tl


@triton.jit
def _rows(x, batch, head, length, b, h, t, WIDTH: tl.constexpr, SIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """The places (SIDE, COLUMNS) of a head's rows in a tensor (B, H, T, WIDTH) of these strides, and which exist."""
    row, column = tl.arange(0, SIDE), tl.arange(0, COLUMNS)
    at = x + batch.to(tl.int64) * b + head * h + row[:, None] * t + column[None, :]
    return at, (row < length)[:, None] & (column < WIDTH)[None, :]


@triton.jit
def _weights(q, k, valid, batch, queries, keys, scale, CAUSAL: tl.constexpr, MASKED: tl.constexpr, SIDE: tl.constexpr):
    """softmax(q k^T scale) over the keys that are seen; a query that sees none has no weights."""
    i, j = tl.arange(0, SIDE), tl.arange(0, SIDE)
    real = j < keys
    if MASKED:
        real = real & (tl.load(valid + batch * keys + j, real, 0) != 0)
    seen = (i < queries)[:, None] & real[None, :]
    if CAUSAL:
        seen = seen & (j[None, :] <= i[:, None])
    scores = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, -1e30)
    weights = tl.where(seen, tl.exp(scores - tl.max(scores, 1)[:, None]), 0.0)
    total = tl.sum(weights, 1)
    return weights / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["queries", "keys", "heads"])
def attend(
    q,
    k,
    v,
    valid,
    out,
    queries,
    keys,
    heads,
    scale,
    qb,
    qh,
    qt,
    kb,
    kh,
    kt,
    vb,
    vh,
    vt,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """out (B, T, H, VALUE) = softmax(q k^T scale) v."""
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    q_at, q_real = _rows(q, batch, head, queries, qb, qh, qt, KEY, SIDE, KEYS)
    k_at, k_real = _rows(k, batch, head, keys, kb, kh, kt, KEY, SIDE, KEYS)
    v_at, v_real = _rows(v, batch, head, keys, vb, vh, vt, VALUE, SIDE, VALUES)
    q_, k_, v_ = tl.load(q_at, q_real, 0.0), tl.load(k_at, k_real, 0.0), tl.load(v_at, v_real, 0.0)
    weights = _weights(q_, k_, valid, batch, queries, keys, scale, CAUSAL, MASKED, SIDE)
    at, real = _rows(out, batch, head, queries, queries * heads * VALUE, VALUE, heads * VALUE, VALUE, SIDE, VALUES)
    tl.store(at, tl.dot(weights.to(v_.dtype), v_), real)


@triton.jit
def _store(
    gradient,
    x,
    sums,
    batch,
    head,
    length,
    b,
    h,
    t,
    WIDTH: tl.constexpr,
    SIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMMED: tl.constexpr,
):
    """Store the gradient of a head's rows in a tensor of these strides, and the sum of the rows."""
    at, real = _rows(x, batch, head, length, b, h, t, WIDTH, SIDE, COLUMNS)
    tl.store(at, gradient, real)
    if SUMMED:
        column = tl.arange(0, COLUMNS)
        tl.store(sums + head * WIDTH + column, tl.sum(gradient, 0), column < WIDTH)


@triton.jit(do_not_specialize=["queries", "keys", "heads"])
def attend_backward(
    q,
    k,
    v,
    valid,
    upstream,
    d_q,
    d_k,
    d_v,
    sums,
    queries,
    keys,
    heads,
    scale,
    qb,
    qh,
    qt,
    kb,
    kh,
    kt,
    vb,
    vh,
    vt,
    ub,
    uh,
    ut,
    dqb,
    dqh,
    dqt,
    dkb,
    dkh,
    dkt,
    dvb,
    dvh,
    dvt,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    SUMMED: tl.constexpr,
):
    """The gradients of q, k and v, and if SUMMED the sums of each segment's, (B, H KEY + H KEY + H VALUE)."""
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    q_at, q_real = _rows(q, batch, head, queries, qb, qh, qt, KEY, SIDE, KEYS)
    k_at, k_real = _rows(k, batch, head, keys, kb, kh, kt, KEY, SIDE, KEYS)
    v_at, v_real = _rows(v, batch, head, keys, vb, vh, vt, VALUE, SIDE, VALUES)
    u_at, u_real = _rows(upstream, batch, head, queries, ub, uh, ut, VALUE, SIDE, VALUES)
    q_, k_, v_ = tl.load(q_at, q_real, 0.0), tl.load(k_at, k_real, 0.0), tl.load(v_at, v_real, 0.0)
    d_heads = tl.load(u_at, u_real, 0.0)
    weights = _weights(q_, k_, valid, batch, queries, keys, scale, CAUSAL, MASKED, SIDE)
    segment_sums = sums + batch * heads * (2 * KEY + VALUE)
    last = segment_sums + 2 * heads * KEY
    gradient = tl.dot(tl.trans(weights.to(d_heads.dtype)), d_heads)
    _store(gradient, d_v, last, batch, head, keys, dvb, dvh, dvt, VALUE, SIDE, VALUES, SUMMED)
    product = tl.dot(d_heads, tl.trans(v_)) * weights
    d_scores = ((product - weights * tl.sum(product, 1)[:, None]) * scale).to(q_.dtype)
    _store(tl.dot(d_scores, k_), d_q, segment_sums, batch, head, queries, dqb, dqh, dqt, KEY, SIDE, KEYS, SUMMED)
    gradient = tl.dot(tl.trans(d_scores), q_)
    _store(gradient, d_k, segment_sums + heads * KEY, batch, head, keys, dkb, dkh, dkt, KEY, SIDE, KEYS, SUMMED)


@triton.jit(do_not_specialize=["rows"])
def add_rows(sums, out, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """out (WIDTH,) = sum over the rows of sums (rows, WIDTH); a program computes COLUMNS numbers."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    within = column < WIDTH
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        total += tl.load(sums + row[:, None] * WIDTH + column[None, :], (row < rows)[:, None] & within[None, :], 0.0)
    tl.store(out + column, tl.sum(total, 0), within)
